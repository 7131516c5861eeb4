"""What goes to Redis: the slot, its blocks, and the upkeep of the whole index."""
