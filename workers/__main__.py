"""`python -m workers simulate|vllm`: run a simulated engine, or start real vLLM."""

import logging
import sys
from collections.abc import Sequence

from jsonargparse import auto_cli

from workers.config import ConfigError, SimulateConfig, VllmConfig

FAILED = 1


def main(argv: Sequence[str]) -> int:
    """Parse, run, exit status."""
    options, extra = _split_extra(argv)
    config = auto_cli(
        {"simulate": SimulateConfig, "vllm": VllmConfig},
        prog="python -m workers",
        default_env=True,
        env_prefix="TIMESTABLE_WORKERS",
        as_positional=False,
        args=[_with_underscores(option) for option in options],
    )
    logging.basicConfig(
        level=logging.INFO, stream=sys.stdout, format="%(asctime)s %(levelname)s %(message)s"
    )
    if isinstance(config, VllmConfig):
        return _run_vllm(config, extra)
    if extra:
        sys.stderr.write(f"unexpected arguments after --: {' '.join(extra)}\n")
        return FAILED
    return _run_simulated(config)


def _run_simulated(config: SimulateConfig) -> int:
    import uvloop  # noqa: PLC0415  # the other subcommand starts without these

    from workers.simulated.cost_model import ProfileError  # noqa: PLC0415
    from workers.simulated.publisher import EventPublisherError  # noqa: PLC0415
    from workers.simulated.run import run  # noqa: PLC0415
    from workers.simulated.text import TextModelError  # noqa: PLC0415

    try:
        uvloop.run(run(config))
    except (ConfigError, ProfileError, TextModelError, EventPublisherError, OSError) as error:
        sys.stderr.write(f"error: {error}\n")
        return FAILED
    except Exception:
        logging.getLogger(__name__).exception("the simulated engine failed")
        return FAILED
    return 0


def _run_vllm(config: VllmConfig, extra: Sequence[str]) -> int:
    from workers.vllm.launch import VllmUnavailableError, launch  # noqa: PLC0415

    try:
        launch(config, extra)
    except (ConfigError, VllmUnavailableError, OSError) as error:
        sys.stderr.write(f"error: {error}\n")
    return FAILED


def _split_extra(argv: Sequence[str]) -> tuple[list[str], list[str]]:
    """Our own arguments, and those after `--`."""
    if "--" not in argv:
        return list(argv), []
    at = argv.index("--")
    return list(argv[:at]), list(argv[at + 1 :])


def _with_underscores(option: str) -> str:
    """`--event-topic=a-b` -> `--event_topic=a-b`; values stay as they are."""
    if not option.startswith("--"):
        return option
    name, equals, value = option[2:].partition("=")
    return f"--{name.replace('-', '_')}{equals}{value}"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
