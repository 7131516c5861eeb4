"""A fleet in virtual time: the router's own pure decisions over simulated engines."""
