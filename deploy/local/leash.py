"""Run a program that does not outlive its parent: `python -I leash.py PARENT_PID PROGRAM ARGS...`.

On Linux the kernel kills the program when its parent is gone, however the parent ended (SIGKILL
included). Elsewhere the program is simply run: an orderly end of the parent still stops it.
This file is run as a script before anything of ours is imported, so it uses the standard library.
"""

import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG = 1  # linux/prctl.h


def main(argv: list[str]) -> None:
    """Tie this process to its parent and become the program.

    Args:
        argv: process id of the parent, program, its arguments.
    """
    parent_pid = int(argv[0])
    if sys.platform == "linux":
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL) != 0:
            raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG)")
        if os.getppid() != parent_pid:  # it ended before the kernel knew
            sys.exit(1)
    os.execv(argv[1], argv[1:])  # noqa: S606 - a program and its arguments, no shell


if __name__ == "__main__":
    main(sys.argv[1:])
