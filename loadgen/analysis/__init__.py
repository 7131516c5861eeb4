"""What a workload reuses: figures of any trace, at the grain of requests instead of blocks.

Blocks form trees, so what a later request touches of an earlier one's prompt is a leading part, and
what was last touched by a request is always a trailing part of its prompt. All figures follow from
such runs (`reuse.Reuses`), of which there are at most two a request.
"""
