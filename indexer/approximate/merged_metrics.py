"""Metrics of many engines on one page: those of each, with its address as a further label."""

from collections.abc import Iterator, Mapping

from prometheus_client import CollectorRegistry
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector


class MergedMetrics(Collector):
    """Collects from a registry for each engine; they come and go.

    Args:
        registries: label of the engine -> its own metrics.
    """

    def __init__(self, registries: Mapping[str, CollectorRegistry]) -> None:
        self._registries = registries

    def collect(self) -> Iterator[Metric]:
        """Each family once, with the samples of all engines."""
        families: dict[str, Metric] = {}
        for engine, registry in list(self._registries.items()):
            for one in registry.collect():
                family = families.get(one.name)
                if family is None:
                    family = families[one.name] = Metric(one.name, one.documentation, one.type)
                family.samples += [
                    sample._replace(labels=sample.labels | {"engine": engine})
                    for sample in one.samples
                ]
        yield from families.values()

    def describe(self) -> list[Metric]:
        """Nothing ahead of time: names are known to be no others'."""
        return []
