"""The event loop's thread has a short slice, and nothing that it starts."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys

import pytest

ASK = """
import ctypes, json, os, threading
from towerd.system.priority import _ATTRIBUTES, shorten_slice

def slice_ns():
    found = ctypes.create_string_buffer(_ATTRIBUTES.size)
    assert ctypes.CDLL(None).syscall(315, 0, found, _ATTRIBUTES.size, 0) == 0
    _, _, _, nice, _, runtime, _, _ = _ATTRIBUTES.unpack(found.raw)
    return runtime, nice

{before}
seen = {{"before": slice_ns(), "asked": shorten_slice(), "own": slice_ns()}}
thread = threading.Thread(target=lambda: seen.update(thread=slice_ns()))
thread.start()
thread.join()
reader, writer = os.pipe()
if os.fork() == 0:
    os.write(writer, json.dumps(slice_ns()).encode())
    os._exit(0)
seen["child"] = json.loads(os.read(reader, 100))
print(json.dumps(seen))
"""


def slices(before: str = "") -> dict[str, list[int]]:
    """[slice in nanoseconds, nice value] of a process's threads, after it asked."""
    program = [sys.executable, "-P", "-c", ASK.format(before=before)]
    done = subprocess.run(program, check=True, capture_output=True, text=True, timeout=60)
    return dict(json.loads(done.stdout))


@pytest.fixture
def kernel() -> None:
    """One that knows slices, of a machine whose numbers this test knows."""
    if sys.platform != "linux" or platform.machine() != "x86_64":
        pytest.skip("asks Linux on x86_64")
    if tuple(int(n) for n in platform.release().split(".")[:2]) < (6, 12):
        pytest.skip("Linux before 6.12")


@pytest.mark.usefixtures("kernel")
def test_only_the_thread_that_asked_has_a_short_slice() -> None:
    seen = slices()
    assert seen["asked"]
    assert seen["own"] == [100_000, seen["before"][1]]
    assert seen["thread"] == seen["child"] == seen["before"]


@pytest.mark.usefixtures("kernel")
def test_a_nice_value_stays() -> None:
    seen = slices("os.nice(3)")
    assert seen["own"][1] == seen["thread"][1] == seen["child"][1] == seen["before"][1] >= 3


@pytest.mark.usefixtures("kernel")
def test_a_scheduling_class_of_ones_own_stays() -> None:
    """A daemon that was made to run in the background is left there."""
    seen = slices("os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))")
    assert not seen["asked"]
    assert seen["own"] == seen["before"]


@pytest.mark.skipif(sys.platform != "linux", reason="only there each thread has a priority")
def test_a_background_thread_is_never_raised() -> None:
    """Which a daemon that was started with a lower priority may not do, unless it is root."""
    code = (
        "import os; from towerd.system.priority import lower_priority;"
        "os.nice({}); lower_priority(); print(os.getpriority(os.PRIO_PROCESS, 0))"
    )
    for nice in (0, 15):
        program = [sys.executable, "-P", "-c", code.format(nice)]
        done = subprocess.run(program, check=True, capture_output=True, text=True, timeout=60)
        own = os.getpriority(os.PRIO_PROCESS, 0)
        assert int(done.stdout) == max(10, min(19, own + nice))
