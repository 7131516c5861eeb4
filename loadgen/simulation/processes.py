"""Processes that run cells, and end when whoever started them has ended, however."""

import multiprocessing
import os
import threading
from concurrent.futures import ProcessPoolExecutor


def pool(count: int) -> ProcessPoolExecutor:
    """So many fresh processes; the caller shuts them down."""
    context = multiprocessing.get_context("spawn")
    return ProcessPoolExecutor(count, mp_context=context, initializer=_end_with_parent)


def _end_with_parent() -> None:
    """A killed parent tells its pool nothing: its processes would wait for work for ever."""
    parent = multiprocessing.parent_process()
    assert parent is not None, "only for the processes of a pool"

    def wait() -> None:
        parent.join()
        os._exit(1)

    threading.Thread(target=wait, name="end_with_parent", daemon=True).start()
