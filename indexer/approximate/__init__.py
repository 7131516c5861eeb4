"""Blocks of which no event tells: learned from what routers notice, forgotten as engines do."""
