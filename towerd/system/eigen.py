"""Eigenvectors of a symmetric matrix, found by a process of its own that gives way to others.

numpy's decomposition of a thousand components takes a second and cannot be interrupted; a process can be
stopped at any moment and continued. It has one thread and a low priority. A keeper beside it sees to it that it
is never left behind (`eigen_process`).
"""

from __future__ import annotations

import contextlib
import io
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from typing import IO
from zipfile import BadZipFile

import numpy as np
import numpy.typing as npt

from towerd.system import eigen_process
from towerd.system.eigen_process import CONTINUE, STOP

Matrix = npt.NDArray[np.float64]

_LOOK_S = 0.02
"""Time between two looks whether the process has to wait."""
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
    read, control = os.pipe()
    try:
        child = _started(read)
    except OSError as error:
        os.close(control)
        raise EigenFailed(f"no process can be started: {error}") from error
    finally:
        os.close(read)
    try:
        out = _result(child, data.getvalue(), control, must_wait, check)
    finally:
        os.close(control)
        _end(child)
    try:
        found = np.load(io.BytesIO(out))
        return found["values"], found["vectors"]
    except (ValueError, OSError, KeyError, EOFError, BadZipFile) as error:
        raise EigenFailed("the process that decomposes a matrix gave no result") from error


def _started(control: int) -> subprocess.Popen[bytes]:
    """A keeper that reads `control`, with its worker in a group of their own: what the terminal sends to
    the daemon does not reach them. Raises OSError."""
    return subprocess.Popen(
        [sys.executable, "-I", eigen_process.__file__, "keeper", str(os.getpid()), str(control)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        env=os.environ | _ONE_THREAD,
        pass_fds=[control],
        start_new_session=True,
    )


def _end(child: subprocess.Popen[bytes]) -> None:
    """Kill a keeper and its worker, unless the keeper has ended by itself: then there is no worker."""
    if child.poll() is None or child.returncode < 0:
        # The group lasts as long as either is there. A killed keeper may leave a worker; macOS answers
        # EPERM for a group of ended processes alone.
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(child.pid, signal.SIGKILL)
    child.wait()
    if child.stdout is not None:
        child.stdout.close()


def _send(pipe: IO[bytes], data: bytes) -> None:
    """Write `data` and close the pipe; a process that has ended takes no more."""
    with contextlib.suppress(OSError), pipe:
        pipe.write(data)


def _result(
    child: subprocess.Popen[bytes],
    data: bytes,
    control: int,
    must_wait: Callable[[], bool],
    check: Callable[[], object],
) -> bytes:
    pipe, child.stdin = child.stdin, None
    assert pipe is not None
    # After a timeout communicate() sends nothing more of its input (CPython 3.11).
    threading.Thread(target=_send, args=(pipe, data), name="towerd-eigen", daemon=True).start()
    while True:
        with contextlib.suppress(subprocess.TimeoutExpired):
            return child.communicate(timeout=_LOOK_S)[0]
        check()
        if must_wait():
            with contextlib.suppress(BrokenPipeError):  # it has just ended
                os.write(control, STOP)
                while must_wait() and child.poll() is None:
                    check()
                    time.sleep(_LOOK_S)
                os.write(control, CONTINUE)
