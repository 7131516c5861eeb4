"""The index held against what engines report."""
