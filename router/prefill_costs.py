"""What prefill costs in each fleet, as this router sees it from its own requests."""

from collections import OrderedDict
from dataclasses import dataclass, field
from typing import Any, Final

import structlog

from router import telemetry
from router.prefill_fit import PrefillFit, SeenPrefill
from router.snapshot import Decision, PrefillCost

log = structlog.get_logger()

FLEETS_MAX: Final = 256
"""Of more, the one of which nothing was seen for longest is forgotten; about 30 KB each."""


@dataclass(slots=True)
class _Fleet:
    fit: PrefillFit = field(default_factory=PrefillFit)
    told: bool = False


class PrefillCosts:
    """A fit for each fleet, over all its instances: slower devices on the scale of the fastest.

    Nothing of it is shared: load balancers spread traffic evenly over routers, so each sees a fair
    sample of it.
    """

    def __init__(self) -> None:
        self._fleets: OrderedDict[str, _Fleet] = OrderedDict()

    def of(self, scope: str) -> PrefillCost | None:
        """What prefill costs in a fleet; None: not known yet."""
        known = self._fleets.get(scope)
        return None if known is None else known.fit.cost

    def seen(self, decision: Decision, *, seconds: float, cached_tokens: int | None) -> None:
        """A first byte has come.

        Args:
            decision: of its request, alone with one prompt.
            seconds: since it was sent.
            cached_tokens: what its engine says it found; None: nothing, and the prediction counts.
        """
        one = SeenPrefill.of(decision, seconds=seconds, cached_tokens=cached_tokens)
        if one is None:
            return
        scope = decision.snapshot.fleet.model_scope
        fleet = self._fleet(scope)
        before = fleet.fit.cost
        used = fleet.fit.add(one)
        telemetry.PREFILLS_SEEN.labels(result="used" if used else "left_out").inc()
        if fleet.fit.cost is not before:
            self._tell(scope, fleet)

    def annotate(self, fleet_view: dict[str, Any]) -> None:
        """Add `prefill_cost` to every fleet of `IndexClient.fleet_view`; None: not known yet."""
        for fleet in fleet_view["fleets"]:
            known = self._fleets.get(fleet["model_scope"])
            cost = None if known is None else known.fit.cost
            fleet["prefill_cost"] = (
                None
                if cost is None or known is None
                else {
                    "linear_s_per_token": cost.linear_s_per_token,
                    "attention_s_per_pair": cost.attention_s_per_pair,
                    "prefills": len(known.fit),
                }
            )

    def _fleet(self, scope: str) -> _Fleet:
        fleet = self._fleets.setdefault(scope, _Fleet())
        self._fleets.move_to_end(scope)
        if len(self._fleets) > FLEETS_MAX:
            gone, _ = self._fleets.popitem(last=False)
            telemetry.PREFILL_LINEAR.remove(gone)
            telemetry.PREFILL_ATTENTION.remove(gone)
        return fleet

    def _tell(self, scope: str, fleet: _Fleet) -> None:
        cost = fleet.fit.cost
        if cost is None:
            return
        telemetry.PREFILL_LINEAR.labels(scope).set(cost.linear_s_per_token)
        telemetry.PREFILL_ATTENTION.labels(scope).set(cost.attention_s_per_pair)
        if not fleet.told:
            fleet.told = True
            log.info(
                "prefill_cost_known",
                fleet=scope,
                linear_s_per_token=cost.linear_s_per_token,
                attention_s_per_pair=cost.attention_s_per_pair,
            )
