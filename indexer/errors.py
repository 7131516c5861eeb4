"""What can go wrong in a sidecar, one class per condition."""


class IndexerError(Exception):
    """Base of all operating errors of the sidecar."""


class EngineUnreachable(IndexerError):  # noqa: N818 - names a condition, not an Error class hierarchy
    """The engine does not answer now; asking again later may help."""


class EngineUnsuitable(IndexerError):  # noqa: N818
    """The engine answers, but cannot be indexed as it is; the message says what to change."""


class CertificatesUnusable(IndexerError):  # noqa: N818
    """A PEM file cannot be read or does not fit; the message names the option."""


class EngineRestarted(IndexerError):  # noqa: N818
    """Another engine process answers under the same address: everything known of it is void."""


class FleetChanged(IndexerError):  # noqa: N818
    """The fleet was founded anew with another shape while this sidecar was a member."""


class FleetFull(IndexerError):  # noqa: N818
    """Every slot of the fleet is taken or waits to be swept."""


class MalformedBatch(IndexerError):  # noqa: N818
    """A message on the event socket is not a batch of KV events."""


class ReplayFailed(IndexerError):  # noqa: N818
    """The engine's replay socket did not answer, or broke off."""


class MetricsUnavailable(IndexerError):  # noqa: N818
    """Our own /metrics cannot be served where it was asked for."""


class JournalFailed(IndexerError):  # noqa: N818
    """The audit journal cannot be written; an incomplete one would be worse than none."""


class MalformedCheckpoint(IndexerError):  # noqa: N818
    """What should be the dump of a block table is none, or one of another fleet or version."""


class CheckpointUnwritable(IndexerError):  # noqa: N818
    """Checkpoints cannot be kept where it was asked for."""


class ListUnreadable(IndexerError):  # noqa: N818
    """The list of engines cannot be had now; what it was before holds on."""


def first(failures: BaseExceptionGroup[BaseException]) -> BaseException:
    """What went wrong first, out of its groups."""
    error: BaseException = failures
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error
