"""When the plugins for vLLM load, and which categories they take; the rest needs vLLM."""

import sys
from types import SimpleNamespace

import pytest

from workers.vllm.eviction_plugin import EVICTION_VARIABLE, category_of, register
from workers.vllm.plugin_versions import UntestedVersionError, check_version


@pytest.mark.parametrize("wanted", [None, "", "lru"])
def test_off_unless_asked_for(wanted: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """An installed plugin that nobody asked for does not even look at vLLM."""
    monkeypatch.setitem(sys.modules, "vllm", None)  # importing it fails
    monkeypatch.delenv(EVICTION_VARIABLE, raising=False)
    if wanted is not None:
        monkeypatch.setenv(EVICTION_VARIABLE, wanted)
    register()


def test_unknown_order_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """With what may be written instead."""
    monkeypatch.setenv(EVICTION_VARIABLE, "lfu")
    with pytest.raises(ValueError, match="must be workload_aware or lru"):
        register()


@pytest.mark.parametrize("version", ["0.32.0", "0.32.0+cpu"])
def test_tested_versions(version: str) -> None:
    """A build of a tested release is that release."""
    check_version(version)


@pytest.mark.parametrize("version", ["0.32.1", "0.31.0", "0.33.0", "0.32.0rc1", "dev", ""])
def test_other_versions_are_refused(version: str) -> None:
    """Also those next to a tested one; the message names those that are tested."""
    with pytest.raises(UntestedVersionError, match=r"0\.32\.0"):
        check_version(version)


@pytest.mark.parametrize(
    ("extra", "category"),
    [
        (None, None),
        ({}, None),
        ({"timestable_category": "chat:1"}, "chat:1"),
        ({"timestable_category": "x" * 64}, "x" * 64),
        ({"timestable_category": "x" * 65}, None),
        ({"timestable_category": ""}, None),
        ({"timestable_category": 7}, None),
    ],
)
def test_categories_taken(extra: dict[str, object] | None, category: str | None) -> None:
    """Short texts; whatever else a client sends is no category."""
    params = SimpleNamespace(extra_args=extra)
    assert category_of(SimpleNamespace(sampling_params=params)) == category
    assert category_of(SimpleNamespace(sampling_params=None)) is None
