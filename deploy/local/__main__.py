"""`python -m deploy.local`: start the local fleet, tell where everything is, keep it."""

import asyncio
import sys
from collections.abc import Sequence
from signal import Signals

from deploy import command_line
from deploy.local import signals
from deploy.local.config import FleetConfig
from deploy.local.errors import FleetError
from deploy.local.fleet import LocalFleet
from deploy.local.layout import role_of


def describe(fleet: LocalFleet) -> str:
    """Where everything is and a command to try, for a person."""
    layout = fleet.layout
    body = (
        f'{{"model": "{fleet.config.model_name}", "stream": true, "max_tokens": 16, '
        '"messages": [{"role": "user", "content": "Hello"}]}'
    )
    lines = [
        "",
        f"  routers   {layout.router_url}/v1 (OpenAI API), /fleet, /metrics, /dashboard",
        *(f"            {router.admin_url} (this process alone)" for router in layout.routers),
        *(
            f"  engine    {worker.engine_url}{_role(fleet.config, number)}"
            for number, worker in enumerate(layout.workers)
        ),
        *(f"  sidecar   {worker.sidecar_url}/metrics" for worker in layout.workers),
        f"  redis     {layout.redis_url}",
        f"  logs      {fleet.config.run_dir}/logs",
        "",
        "try:",
        f"  curl -N {layout.router_url}/v1/chat/completions -H 'content-type: application/json' \\",
        f"    -d '{body}'",
        "",
        "Ctrl-C drains the routers and stops everything; a second Ctrl-C does not wait.",
    ]
    return "\n".join(lines)


def _role(config: FleetConfig, number: int) -> str:
    return f" ({role_of(config, number)})" if config.prefill_workers else ""


async def serve(config: FleetConfig) -> int:
    """Keep a fleet until cancelled.

    Raises:
        FleetError: a part did not come up or crashed.
    """

    def say(line: str) -> None:
        print(line, flush=True)

    say(f"starting {config.workers} workers with sidecars, {config.routers} routers and Redis")
    try:
        async with LocalFleet.running(config, say) as fleet:
            say(describe(fleet))
            try:
                await asyncio.Event().wait()
            finally:
                say("draining and stopping")
    finally:
        say("stopped")
    return 0


def main(args: Sequence[str] | None = None) -> int:
    """Run the fleet until a signal; exit code 0 then, 1 when a part failed, 2 for a bad option."""
    config = command_line.parse(
        FleetConfig,
        prog="python -m deploy.local",
        env_prefix="TIMESTABLE_LOCAL",
        args=sys.argv[1:] if args is None else args,
    )
    try:
        code = signals.run(lambda: serve(config))
    except FleetError as failure:
        print(f"error: {failure}", file=sys.stderr)
        return 1
    return 0 if code in {128 + Signals.SIGINT, 128 + Signals.SIGTERM} else code


if __name__ == "__main__":
    sys.exit(main())
