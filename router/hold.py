"""A decision that is booked, for a request that somebody else sends."""

from dataclasses import dataclass

from router.attempt import Question
from router.ledger import Ledger
from router.policies.base import tell_ended
from router.snapshot import Booking, Decision


@dataclass(frozen=True, slots=True, kw_only=True)
class Hold:
    """Books it until it is released.

    Attributes:
        question: what was asked.
        decision: where the request goes.
        booking: in the ledger's books.
        ledger: of this router.
    """

    question: Question
    decision: Decision
    booking: Booking
    ledger: Ledger

    def prefilled(self) -> None:
        """Its prompt is computed. Idempotent."""
        self.ledger.prefilled(self.booking)

    def release(self) -> None:
        """It has ended; to be called once."""
        self.ledger.release(self.booking)
        tell_ended(self.question.policy, self.question.view, self.decision)
