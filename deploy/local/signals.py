"""Run an asynchronous program so that a signal ends it in an orderly way."""

import asyncio
import signal
from collections.abc import Callable, Coroutine
from typing import Any

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def run(main: Callable[[], Coroutine[Any, Any, int]]) -> int:
    """Run main to its end and return its exit code, 128 + number when a signal ended it.

    The first signal cancels main, whose cleanup then runs; a second one cancels that cleanup too.
    """
    received: list[signal.Signals] = []

    async def cancellable() -> int:
        loop = asyncio.get_running_loop()
        task = asyncio.current_task()
        assert task is not None

        def on_signal(number: signal.Signals) -> None:
            received.append(number)
            task.cancel()

        for number in SIGNALS:
            if number == signal.SIGHUP and signal.getsignal(number) is signal.SIG_IGN:
                continue  # nohup: the terminal may go
            loop.add_signal_handler(number, on_signal, number)
        return await main()

    try:
        return asyncio.run(cancellable())
    except asyncio.CancelledError:
        assert received, "cancelled by something else than a signal"
        return 128 + received[0]
