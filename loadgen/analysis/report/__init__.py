"""Tables and page of the trace analysis."""
