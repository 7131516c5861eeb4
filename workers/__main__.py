"""`python -m workers simulate|vllm`: run a simulated engine, or start real vLLM."""

import logging
import sys
from collections.abc import Sequence

from jsonargparse import auto_cli

from workers.config import ConfigError, SimulateConfig, VllmConfig

EXIT_FAILED = 1
EXIT_USAGE = 2


def main(argv: Sequence[str]) -> int:
    """Parse, run, exit status."""
    options, extra = _split_extra(argv)
    try:
        config = auto_cli(
            {"simulate": SimulateConfig, "vllm": VllmConfig},
            prog="python -m workers",
            default_env=True,
            env_prefix="TIMESTABLE_WORKERS",
            as_positional=False,
            args=options,
        )
    except ConfigError as error:
        sys.stderr.write(f"error: {error}\n")
        return EXIT_USAGE
    logging.basicConfig(
        level=logging.INFO, stream=sys.stdout, format="%(asctime)s %(levelname)s %(message)s"
    )
    if isinstance(config, VllmConfig):
        return _run_vllm(config, extra)
    if extra:
        sys.stderr.write(f"error: unexpected arguments after --: {' '.join(extra)}\n")
        return EXIT_USAGE
    return _run_simulated(config)


def _run_simulated(config: SimulateConfig) -> int:
    import uvloop  # noqa: PLC0415  # the other subcommand starts without these

    from workers.simulated.cost_model import ProfileError  # noqa: PLC0415
    from workers.simulated.publisher import EventPublisherError  # noqa: PLC0415
    from workers.simulated.run import run  # noqa: PLC0415
    from workers.simulated.text import TextModelError  # noqa: PLC0415

    try:
        uvloop.run(run(config))
    except (ConfigError, ProfileError, TextModelError) as error:
        sys.stderr.write(f"error: {error}\n")
        return EXIT_USAGE
    except (EventPublisherError, OSError) as error:
        sys.stderr.write(f"error: {error}\n")
        return EXIT_FAILED
    except Exception:
        logging.getLogger(__name__).exception("the simulated engine failed")
        return EXIT_FAILED
    return 0


def _run_vllm(config: VllmConfig, extra: Sequence[str]) -> int:
    from workers.vllm.launch import VllmUnavailableError, launch  # noqa: PLC0415

    try:
        launch(config, extra)
    except ConfigError as error:
        sys.stderr.write(f"error: {error}\n")
        return EXIT_USAGE
    except (VllmUnavailableError, OSError) as error:
        sys.stderr.write(f"error: {error}\n")
    return EXIT_FAILED


def _split_extra(argv: Sequence[str]) -> tuple[list[str], list[str]]:
    """Our own arguments, and those after `--`."""
    if "--" not in argv:
        return list(argv), []
    at = argv.index("--")
    return list(argv[:at]), list(argv[at + 1 :])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
