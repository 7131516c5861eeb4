"""Reads the configuration of a program of this package."""

import sys
from collections.abc import Sequence
from typing import TypeVar

from jsonargparse import ArgumentError, auto_cli

Config = TypeVar("Config")

EXIT_USAGE = 2


def parse(config_class: type[Config], *, prog: str, env_prefix: str, args: Sequence[str]) -> Config:
    """Read the command line, the environment and the file that `--config` names.

    A bad key or value ends the process with exit code 2 and a message that names it.

    Args:
        config_class: dataclass whose fields are the options.
        prog: the program as a person calls it.
        env_prefix: an environment variable is this, an underscore and the option's name.
        args: the command line; `--run-dir` is as good as `--run_dir`.
    """
    try:
        config = auto_cli(
            config_class,
            prog=prog,
            default_env=True,
            env_prefix=env_prefix,
            as_positional=False,
            exit_on_error=False,
            args=[_underscored(arg) for arg in args],
        )
    except (ArgumentError, ValueError) as error:
        reason = " ".join(str(error).split())
        print(f"error: {reason} ({prog} --help lists the options)", file=sys.stderr)
        raise SystemExit(EXIT_USAGE) from None
    assert isinstance(config, config_class), config
    return config


def _underscored(arg: str) -> str:
    """`--run-dir=x-y` is `--run_dir=x-y`."""
    if not arg.startswith("--"):
        return arg
    name, equals, value = arg.partition("=")
    return f"--{name[2:].replace('-', '_')}{equals}{value}"
