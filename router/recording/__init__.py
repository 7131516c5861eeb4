"""Live traffic as a trace that can be studied and replayed, without a word of what it said."""
