"""A call of one Redis Function, ready to send."""

from dataclasses import dataclass

from indexer.contract import libraries


@dataclass(frozen=True, slots=True)
class Call:
    """One function call, ready to send.

    Attributes:
        function: its name in the Lua source.
        keys: all of one hash tag.
        args: as its header says.
        read_only: it may be sent to a replica.
    """

    function: str
    keys: tuple[str, ...]
    args: tuple[bytes | str | int | float, ...]
    read_only: bool = False

    def command(self) -> tuple[bytes | str | int | float, ...]:
        """The whole command, for a client or a pipeline."""
        verb = "FCALL_RO" if self.read_only else "FCALL"
        return (
            verb,
            libraries.server_names()[self.function],
            len(self.keys),
            *self.keys,
            *self.args,
        )
