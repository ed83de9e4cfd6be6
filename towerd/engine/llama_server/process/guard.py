"""Runs between towerd and its llama-server, so that llama-server ends when towerd does, for
whatever reason. A separate program that uses the standard library only:

    python -I -S guard.py METHOD PARENT_PID PROGRAM [ARGUMENT...]

`kernel` (Linux): asks the kernel for SIGKILL at the parent's death, then becomes PROGRAM. Asked
between fork and exec this could deadlock in a process with threads; a fresh interpreter cannot.
`watch` (elsewhere): runs PROGRAM below itself and kills it when its standard input ends, which
only towerd holds open. It ends as PROGRAM ended. Signals are sent to the process group.
"""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import threading

PR_SET_PDEATHSIG = 1


def become(parent: int, program: list[str]) -> None:
    """Replace this process by `program`, which dies with `parent`. Returns if that is gone."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() == parent:
        os.execv(program[0], program)


def watch(parent: int, program: list[str]) -> int:
    """Run `program` until it ends or `parent` does; its exit status as Popen has it."""
    # A handler, because ignoring it would be inherited: the group's SIGTERM is for the program.
    signal.signal(signal.SIGTERM, lambda *_: None)
    child = subprocess.Popen(program, stdin=subprocess.DEVNULL)

    def kill_at_end() -> None:
        while os.getppid() == parent and os.read(0, 1):
            pass
        child.kill()

    threading.Thread(target=kill_at_end, daemon=True).start()
    return child.wait()


def main() -> int:
    method, parent, program = sys.argv[1], int(sys.argv[2]), sys.argv[3:]
    if method == "kernel":
        become(parent, program)
        return 1
    code = watch(parent, program)
    if code < 0:
        signal.signal(-code, signal.SIG_DFL) if -code != signal.SIGKILL else None
        os.kill(os.getpid(), -code)
    return code


if __name__ == "__main__":
    sys.exit(main())
