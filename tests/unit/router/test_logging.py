"""What a router's log lines say."""

import json

import pytest
import structlog

from router.log_lines import set_up_logging


def test_a_logged_exception_shows_no_locals(capsys: pytest.CaptureFixture[str]) -> None:
    """Frames hold headers, prompts and passwords; where it happened is enough."""
    set_up_logging("info")

    def crash(authorization: str) -> None:
        raise RuntimeError(f"of {len(authorization)} characters")

    try:
        crash("Bearer s3cret")
    except RuntimeError:
        structlog.get_logger().exception("request_crashed")
    written = capsys.readouterr().out
    frames = json.loads(written)["exception"][0]["frames"]
    assert [frame["name"] for frame in frames][-1] == "crash"
    assert "s3cret" not in written
