"""Eigenvectors of a symmetric matrix, found by a process of its own that gives way to others.

numpy's decomposition of a thousand components takes a second and cannot be interrupted; a process can be
stopped at any moment and continued. It has one thread and a low priority.
"""

from __future__ import annotations

import contextlib
import io
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable

import numpy as np
import numpy.typing as npt

Matrix = npt.NDArray[np.float64]

_LOOK_S = 0.02
"""Time between two looks whether the process has to wait."""
_PROGRAM = """
import io, os, signal, sys
if sys.platform == "linux":
    import ctypes
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG: it ends with its parent
if os.getppid() != int(sys.argv[1]):
    sys.exit(1)
os.nice(10)
import numpy as np
found = np.linalg.eigh(np.load(io.BytesIO(sys.stdin.buffer.read())))
out = io.BytesIO()
np.savez(out, values=found[0], vectors=found[1])
sys.stdout.buffer.write(out.getvalue())
"""
_ONE_THREAD = dict.fromkeys(("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS"), "1")


class EigenFailed(RuntimeError):
    """The process ended without a result."""


def patient_eigh(
    matrix: Matrix, must_wait: Callable[[], bool], check: Callable[[], object] = lambda: None
) -> tuple[Matrix, Matrix]:
    """As `numpy.linalg.eigh`: ascending eigenvalues float64[n], and a column for each.

    must_wait: asked every 20 ms; the process is stopped as long as it says so
    check: called as often; what it raises ends the process and is raised

    Raises EigenFailed."""
    data = io.BytesIO()
    np.save(data, matrix)
    command = [sys.executable, "-I", "-c", _PROGRAM, str(os.getpid())]
    child = subprocess.Popen(
        command,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        env=os.environ | _ONE_THREAD,
    )
    try:
        out = _result(child, data.getvalue(), must_wait, check)
    finally:
        with contextlib.suppress(ProcessLookupError):
            child.kill()
        child.wait()
        for pipe in (child.stdin, child.stdout):
            if pipe is not None:
                with contextlib.suppress(OSError):
                    pipe.close()
    if child.returncode and not out:
        raise EigenFailed("the process that decomposes a matrix ended early")
    try:
        found = np.load(io.BytesIO(out))
        return found["values"], found["vectors"]
    except (ValueError, OSError, KeyError, EOFError) as error:
        raise EigenFailed("the process that decomposes a matrix gave no result") from error


def _result(
    child: subprocess.Popen[bytes],
    data: bytes,
    must_wait: Callable[[], bool],
    check: Callable[[], object],
) -> bytes:
    to_send: bytes | None = data
    while True:
        try:
            return child.communicate(to_send, timeout=_LOOK_S)[0]
        except subprocess.TimeoutExpired:
            to_send = None  # it continues with what is left of the first
        check()
        if must_wait():
            child.send_signal(signal.SIGSTOP)
            try:
                while must_wait():
                    check()
                    time.sleep(_LOOK_S)
            finally:
                child.send_signal(signal.SIGCONT)
