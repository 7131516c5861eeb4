"""What can end a fleet; every message is for a person."""


class FleetError(Exception):
    """The fleet cannot go on."""


class RunDirError(FleetError):
    """Logs and journals have nowhere to go."""


class PartCrashError(FleetError):
    """A part ended although nobody stopped it."""


class PartNotReadyError(FleetError):
    """A part did not come up in time."""


class NoFreePortError(FleetError):
    """No port is free between the wanted one and the end of the range."""
