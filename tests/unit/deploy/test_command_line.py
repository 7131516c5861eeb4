"""A bad option or trace ends a program of this package with one line that names it."""

from collections.abc import Callable, Sequence

import pytest

from deploy.demo.__main__ import main as demo
from deploy.local.__main__ import main as local

Program = Callable[[Sequence[str]], int]


def run(program: Program, option: str) -> object:
    """The exit code, whether returned or raised."""
    try:
        return program([option])
    except SystemExit as ended:
        return ended.code


@pytest.mark.parametrize(
    ("program", "option", "told"),
    [
        (local, "--nope=1", "unrecognized arguments: --nope=1"),
        (local, "--workers=0", '"workers"'),
        (local, "--router-port=x", '"router_port"'),
        (local, "--router_port=40000", "router_port: 40000 is above 32767"),
        (local, "--policy=fastest", "policy: unknown policy `fastest`; known policies: "),
        (local, "--profile=abacus", "profile: no profile named 'abacus'; known: "),
        (demo, "--capacity-ratio=-1", '"capacity_ratio"'),
        (demo, "--policies=[]", "policies: at least one"),
        (demo, "--policies=[lmetric,lmetric]", "each only once"),
        (demo, "--policies=[fastest]", "policies: unknown policy `fastest`"),
        (demo, "--trace=no/such.jsonl", "trace: there is no file no/such.jsonl"),
        (demo, "--trace=pyproject.toml", "pyproject.toml: unknown kind of file"),
    ],
)
def test_a_bad_option_is_named_on_one_line(
    program: Program, option: str, told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Exit code 2, before anything is started."""
    exit_code = run(program, option)
    output = capsys.readouterr()
    lines = output.err.splitlines()
    assert (exit_code, output.out, len(lines), told in lines[0]) == (2, "", 1, True)
