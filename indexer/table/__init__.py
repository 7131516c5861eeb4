"""What one rank of an engine holds, from its events; pure."""
