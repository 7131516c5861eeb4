"""The way to the instances and back, and what is known of their troubles."""
