"""The router's own histogram says what Prometheus's would."""

from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, Histogram

from router.fast_histogram import FastHistogram

BUCKETS = (0.001, 0.5, 1.0, 10.0)
SEEN = st.tuples(
    st.sampled_from("ab"), st.sampled_from([*BUCKETS, 0.0, 0.7, 99.0]) | st.floats(0, 20)
)


def samples(registry: CollectorRegistry) -> dict[tuple[str, frozenset[tuple[str, str]]], float]:
    """Everything exported, by name and labels, but the library's times of creation."""
    return {
        (one.name, frozenset(one.labels.items())): round(one.value, 9)
        for family in registry.collect()
        for one in family.samples
        if not one.name.endswith("_created")
    }


@given(st.lists(SEEN, max_size=30))
def test_it_equals_the_librarys(seen: list[tuple[str, float]]) -> None:
    """Same series, same bounds inclusive, same sums, whatever is observed."""
    ours, theirs = CollectorRegistry(), CollectorRegistry()
    fast = FastHistogram(
        "x_seconds", "X.", label="stage", values="ab", buckets=BUCKETS, registry=ours
    )
    plain = Histogram("x_seconds", "X.", ["stage"], buckets=BUCKETS, registry=theirs)
    for value in "ab":
        plain.labels(value)
    for value, seconds in seen:
        fast.observe(value, seconds)
        plain.labels(value).observe(seconds)
    assert samples(ours) == samples(theirs)
