"""deploy/METRICS.md says what is exported, and labels stay few."""

import json
import re

from metrics_table import BOUNDED_BY, TABLE, labels, router_metrics, sidecar_metrics, table


def test_the_table_of_metrics_is_true() -> None:
    """Whoever adds or changes a metric makes the table anew."""
    assert TABLE.read_text() == table(), "run: .venv/bin/python tests/metrics_table.py"


def test_every_label_is_bounded_by_something() -> None:
    """A label that nobody has thought about is not exported."""
    assert labels([*router_metrics(), *sidecar_metrics()]) == set(BOUNDED_BY)


def test_every_metric_says_what_it_is_and_of_whom() -> None:
    """A prefix by program, a unit by name, a sentence of help."""
    for one in router_metrics():
        assert one._name.startswith("timestable_router_"), one._name
        assert one._documentation.endswith("."), one._name
    for one in sidecar_metrics():
        assert one._name.startswith("timestable_indexer_"), one._name
        assert one._documentation.endswith("."), one._name


def test_the_grafana_board_asks_for_what_is_exported() -> None:
    """No panel of it is empty because a metric, or a label, has another name by now."""
    board = json.loads((TABLE.parent / "grafana" / "timestable.json").read_text())
    asked = [target["expr"] for panel in board["panels"] for target in panel.get("targets", ())]
    exported = {
        one._name + suffix
        for one in router_metrics()
        for suffix in {"counter": ("_total",), "histogram": ("_bucket",)}.get(one._type, ("",))
    }
    assert {name for one in asked for name in re.findall(r"timestable_\w+", one)} <= exported
    grouped = {
        label.strip()
        for one in asked
        for labels_of in re.findall(r"by \(([^)]*)\)", one)
        for label in labels_of.split(",")
    }
    assert grouped - {"le"} <= labels(router_metrics())
    assert len(asked) > 15
