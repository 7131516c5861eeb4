"""What can end the demo besides the fleet itself; every message is for a person."""


class DemoError(Exception):
    """The demo cannot go on."""


class WorkloadError(DemoError):
    """The trace cannot be read, or holds nothing of what is wanted."""


class NotIdleError(DemoError):
    """Counters that have to be zero are not."""


class NotColdError(DemoError):
    """A cache that has to be empty is not."""
