"""What the tests found, case by case: judged, printed as a table, written as JSON."""

import asyncio
import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from deploy.demo.audit import Journal, Verdict, judge
from indexer.contract import block_hash
from tests.vllm.asking import Asked
from tests.vllm.settings import BLOCK, NAME

SUMMARY = Path(__file__).parents[2] / "build/vllm/summary.json"

DEGRADED_SHARE_MAX = 0.2
"""Decided without the index or the ledger, as on a machine that stands still now and then."""

JOURNAL_S = 3.0
"""What a sidecar publishes is in its journal within this; nearly always within milliseconds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One test's figures.

    Attributes:
        name: the test.
        requests: judged ones: answered through a router that had the index and the ledger, while
            nothing was broken.
        exact: predicted to the token.
        explained: an event between decision and admission explains the difference.
        unexplained: the rest.
        hit_tokens: cached tokens of all judged ones.
        degraded: answered ones that predict nothing: decided without the index or the ledger.
        during: requests between a fault and the moment all was right again.
        wrong_during: predictions among them that were not exact.
        failed: requests without a whole answer.
        recovery_s: from the fault, or its end, until right again; None without a fault.
        bound_s: the most it may be.
    """

    name: str
    requests: int
    exact: int
    explained: int
    unexplained: int
    hit_tokens: int
    degraded: int = 0
    during: int = 0
    wrong_during: int = 0
    failed: int = 0
    recovery_s: float | None = None
    bound_s: float | None = None


@dataclass(slots=True, kw_only=True)
class Report:
    """Collects cases.

    Attributes:
        journals: reads what the sidecars have published.
        cases: in the order of the tests.
    """

    journals: Callable[[], Iterable[str]]
    cases: list[Case] = field(default_factory=list)

    async def judge(
        self,
        name: str,
        asked: Sequence[Asked],
        *,
        during: Sequence[Asked] = (),
        recovery_s: float | None = None,
        bound_s: float | None = None,
    ) -> Case:
        """Judge requests, note the case, and refuse what is not explained.

        Args:
            name: the test.
            asked: requests while nothing was broken; all have to be answered.
            during: requests while something was; they may be predicted wrongly.
            recovery_s: see `Case`.
            bound_s: see `Case`.

        Raises:
            AssertionError: a request failed, a prediction is unexplained, or too many requests
                were decided without the index or the ledger.
        """
        judged = [one for one in asked if not one.degraded]
        verdicts = await self._verdicts(judged)
        served = [one.served for one in judged if one.served is not None]
        case = Case(
            name=name,
            requests=len(served),
            exact=verdicts.count(Verdict.EXACT),
            explained=verdicts.count(Verdict.EXPLAINED),
            unexplained=verdicts.count(Verdict.UNEXPLAINED),
            hit_tokens=sum(one.actual_tokens for one in served),
            degraded=len(asked) - len(judged),
            during=len(during),
            wrong_during=sum(
                one.served is not None and one.predicted_tokens != one.actual_tokens
                for one in during
            ),
            failed=sum(one.error is not None for one in (*asked, *during)),
            recovery_s=None if recovery_s is None else round(recovery_s, 2),
            bound_s=bound_s,
        )
        self.cases.append(case)
        failures = [one.error for one in asked if one.error is not None]
        assert not failures, failures[:3]
        wrong = [
            (one.predicted_tokens, one.actual_tokens, one.instance_id)
            for one, verdict in zip(judged, verdicts, strict=True)
            if verdict is Verdict.UNEXPLAINED
        ]
        assert not wrong, f"predicted, actual, instance of what nothing explains: {wrong[:10]}"
        assert case.degraded <= DEGRADED_SHARE_MAX * len(asked), (
            f"{case.degraded} of {len(asked)} were decided without the index or the ledger"
        )
        assert bound_s is None or recovery_s is None or recovery_s <= bound_s, (
            f"right again after {recovery_s:.1f} s, not within {bound_s:g} s"
        )
        return case

    async def _verdicts(self, asked: Sequence[Asked]) -> list[Verdict]:
        """Judge, again for a while when a journal may not have been written to its end."""
        loop = asyncio.get_running_loop()
        deadline_s = loop.time() + JOURNAL_S
        while True:
            journal = Journal.parse(self.journals())
            verdicts = [_verdict(one, journal) for one in asked if one.served is not None]
            if Verdict.UNEXPLAINED not in verdicts or loop.time() > deadline_s:
                return verdicts
            await asyncio.sleep(0.2)

    def totals(self) -> dict[str, float]:
        """Sums over all cases."""
        sums = {
            name: sum(getattr(case, name) for case in self.cases)
            for name in (
                *("requests", "exact", "explained", "unexplained"),
                *("degraded", "during", "failed"),
            )
        }
        requests = sums["requests"] or 1
        return sums | {
            "exact_share": round(sums["exact"] / requests, 4),
            "unexplained_share": round(sums["unexplained"] / requests, 4),
        }

    def write(self) -> None:
        """Write the summary."""
        SUMMARY.parent.mkdir(parents=True, exist_ok=True)
        cases = [asdict(case) for case in self.cases]
        SUMMARY.write_text(json.dumps({"cases": cases, "totals": self.totals()}, indent=2) + "\n")

    def lines(self) -> list[str]:
        """The table."""
        head = f"{'case':<30} {'judged':>6} {'exact':>6} {'expl.':>6} {'unexpl.':>7} {'degr.':>6} "
        lines = [head + f"{'during':>6} {'wrong':>6} {'failed':>6} {'right again':>18}"]
        for case in self.cases:
            again = ""
            if case.recovery_s is not None:
                again = f"{case.recovery_s:.1f} s (<= {case.bound_s:g} s)"
            lines.append(
                f"{case.name:<30} {case.requests:>6} {case.exact:>6} {case.explained:>6} "
                f"{case.unexplained:>7} {case.degraded:>6} {case.during:>6} "
                f"{case.wrong_during:>6} {case.failed:>6} {again:>18}"
            )
        totals = self.totals()
        lines.append(
            f"{totals['requests']} requests judged, {totals['exact_share']:.2%} exact, "
            f"{totals['unexplained_share']:.2%} unexplained"
        )
        return lines


def _verdict(asked: Asked, journal: Journal) -> Verdict:
    assert asked.served is not None
    root = block_hash.root(
        model_scope=NAME, block_size_tokens=BLOCK, adapter=asked.adapter, salt=asked.salt
    )
    return judge(asked.served, journal, root=root, block_size_tokens=BLOCK)
