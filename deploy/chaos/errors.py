"""What can end a chaos run besides the fleet itself; every message is for a person."""


class ChaosError(Exception):
    """The run cannot go on."""


class NotRecoveredError(ChaosError):
    """The fleet did not come back from a fault in time."""
