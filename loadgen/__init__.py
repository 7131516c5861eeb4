"""Measures a fleet from outside, through any OpenAI-compatible URL."""
