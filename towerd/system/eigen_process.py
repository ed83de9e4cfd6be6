"""The processes of `patient_eigh`: a worker that decomposes a matrix, and its keeper, which stops and continues
it, and which kills it when the process that asked has gone, however that ended.

A stopped process notices nothing, so that it cannot end itself; and only Linux has a signal for the death of a
parent. The keeper is never stopped. Run by its path, this file imports nothing of towerd.

    eigen_process.py keeper PID CONTROL    PID: the parent; CONTROL: a pipe of b"s" (stop), b"c" (continue)
    eigen_process.py worker PID

The matrix comes on stdin and the result leaves on stdout, as numpy's files.
"""

from __future__ import annotations

import ctypes
import os
import select
import signal
import subprocess
import sys

STOP, CONTINUE = b"s", b"c"
NICE = 10
_LOOK_S = 1.0
"""Time between two looks whether the parent is still there, should another process hold its end of the pipe."""
_PR_SET_PDEATHSIG = 1


def keep(parent: int, control: int) -> int:
    """Start a worker, do with it what `control` says, and give its result; returns the exit code."""
    command = [sys.executable, "-I", __file__, "worker", str(os.getpid())]
    worker = subprocess.Popen(command, stdout=subprocess.PIPE, preexec_fn=_die_with_parent)
    os.close(0)  # the matrix is read by the worker alone
    assert worker.stdout is not None
    out, parts = worker.stdout.fileno(), []
    try:
        while os.getppid() == parent:
            ready, _, _ = select.select([control, out], [], [], _LOOK_S)
            if control in ready:
                if not (said := os.read(control, 64)):
                    return 1
                worker.send_signal(signal.SIGSTOP if said.endswith(STOP) else signal.SIGCONT)
            if out in ready:
                if not (part := os.read(out, 1 << 20)):
                    break
                parts.append(part)
        else:
            return 1
        code = worker.wait()
    finally:
        worker.kill()
        worker.wait()
    for part in parts:
        sys.stdout.buffer.write(part)
    return abs(code)


def _die_with_parent() -> None:
    """Should the keeper be killed, so is the worker, on Linux. Called before the worker's program begins,
    and before it can be stopped."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def work(keeper: int) -> int:
    """Decompose the matrix on stdin; returns the exit code."""
    if os.getppid() != keeper:
        return 1
    os.nice(NICE)
    import io

    import numpy as np

    values, vectors = np.linalg.eigh(np.load(io.BytesIO(sys.stdin.buffer.read())))
    out = io.BytesIO()
    np.savez(out, values=values, vectors=vectors)
    sys.stdout.buffer.write(out.getvalue())
    sys.stdout.buffer.flush()
    return 0


if __name__ == "__main__":
    sys.exit(keep(*map(int, sys.argv[2:])) if sys.argv[1] == "keeper" else work(int(sys.argv[2])))
