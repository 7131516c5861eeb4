"""The stateless request router: one request, one lookup, one decision, one reservation."""
