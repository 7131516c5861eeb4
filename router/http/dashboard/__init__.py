"""The live page at /dashboard and the decisions it shows."""
