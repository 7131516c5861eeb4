"""No history of an instance latches it out, and none ejects it too easily."""

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from router.errors import UpstreamCause
from router.instances.standing import EjectionRules, Standing, lease_s, left_out_max

RULES = EjectionRules(failures_min=3, lease_s=2.0, lease_max_s=12.0, ratio_max=0.5)
CAUSES = st.sampled_from(sorted(UpstreamCause))
WAITS_S = st.floats(0.0, 30.0)


class EjectionMachine(RuleBasedStateMachine):
    """One instance, as requests and probes see it."""

    def __init__(self) -> None:
        super().__init__()
        self.now_s = 0.0
        self.standing = Standing()
        self.in_a_row = 0  # failures that count, since a request was served or a probe answered
        self.alive_s = -1.0

    @rule(wait_s=WAITS_S)
    def wait(self, wait_s: float) -> None:
        """Time alone changes nothing but what is due."""
        self.now_s += wait_s

    @rule(cause=CAUSES, took_s=WAITS_S)
    def fail(self, cause: UpstreamCause, took_s: float) -> None:
        """Only as many in a row eject, or one in trial; none makes a lease longer."""
        before, sent_s = self.standing, self.now_s - took_s
        self.standing = before.failed(self.now_s, cause, RULES, sent_s=sent_s, alive_s=self.alive_s)
        if cause.timeout and self.alive_s >= sent_s:
            assert self.standing == before
            return
        if before.ejected:
            assert replace(self.standing, failed_s=before.failed_s) == before
            return
        self.in_a_row += 1
        assert self.standing.ejected == (before.on_trial or self.in_a_row >= RULES.failures_min)

    @rule()
    def answer(self) -> None:
        """A first byte for anybody."""
        self.alive_s = self.now_s

    @rule(took_s=WAITS_S)
    def serve(self, took_s: float) -> None:
        """A request that was sent since the ejection ends it."""
        before, sent_s = self.standing, self.now_s - took_s
        self.standing = before.served(sent_s)
        if before.ejected and sent_s < before.ejected_s:
            assert self.standing == before
        else:
            assert not self.standing.ejected
            assert not self.standing.on_trial
            self.in_a_row = 0

    @precondition(lambda self: self.standing.probe_due(self.now_s))
    @rule(healthy=st.booleans())
    def probe(self, *, healthy: bool) -> None:
        """One good probe brings it back, whatever was before."""
        self.standing = self.standing.probed(self.now_s, RULES, healthy=healthy)
        assert self.standing.ejected is not healthy
        assert self.standing.on_trial is healthy
        if healthy:
            self.in_a_row = 0

    @invariant()
    def no_lease_outlasts_the_bound(self) -> None:
        """Then a probe is due, in every state."""
        if self.standing.until_s is not None:
            assert self.standing.until_s <= self.now_s + RULES.lease_max_s
            assert self.standing.probe_due(self.now_s + RULES.lease_max_s)
            assert not self.standing.on_trial

    @invariant()
    def forgiveness_is_only_for_those_in_service(self) -> None:
        """What is forgotten cannot be left out."""
        if self.standing.forgiven(self.now_s, RULES):
            assert not self.standing.ejected


TestEjection = EjectionMachine.TestCase


@given(
    instances=st.integers(0, 10_000),
    ratio=st.floats(0.0, 1.0),
)
def test_somebody_always_stays(instances: int, ratio: float) -> None:
    """Whatever share is configured, and at most that share."""
    left_out = left_out_max(instances, replace(RULES, ratio_max=ratio))
    assert 0 <= left_out <= instances * ratio
    assert left_out < instances or instances == 0


@given(count=st.integers(1, 10**9))
def test_leases_grow_to_a_bound(count: int) -> None:
    """Never shorter than the one before, never longer than allowed."""
    assert RULES.lease_s <= lease_s(count, RULES) <= lease_s(count + 1, RULES) <= RULES.lease_max_s
