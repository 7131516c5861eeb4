"""Real vLLM, started with the flags this system relies on."""
