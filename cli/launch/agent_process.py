"""A program that stands in for this one: it has the terminal, the signals are its own, and its end is ours."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Mapping, Sequence

_PASSED_ON = frozenset(
    {
        signal.SIGHUP,
        signal.SIGINT,
        signal.SIGQUIT,
        signal.SIGTERM,
        signal.SIGUSR1,
        signal.SIGUSR2,
    }
)
_OF_A_TERMINAL = frozenset({signal.SIGHUP, signal.SIGINT, signal.SIGQUIT})
"""A terminal sends these to the program as well as to this process."""
_NOT_PYTHONS = (signal.SIGPIPE, signal.SIGXFSZ)
"""Python ignores these, and a program that it starts would, too."""


def run_program(path: str, args: Sequence[str], env: Mapping[str, str]) -> int:
    """Run a program until it ends; returns its wait status. When it stops, so does this process, until
    both are continued. Raises OSError: it cannot be started."""
    watched = _PASSED_ON | {signal.SIGCHLD}
    of_child = signal.signal(signal.SIGCHLD, lambda *_: None)  # an ignored signal is not waited for
    before = signal.pthread_sigmask(signal.SIG_BLOCK, watched)
    try:
        pid = os.posix_spawn(
            path, [path, *args], dict(env), setsigmask=before, setsigdef=_NOT_PYTHONS
        )
        while True:
            changed, status = os.waitpid(pid, os.WNOHANG | os.WUNTRACED)
            if changed and os.WIFSTOPPED(status):
                os.kill(os.getpid(), signal.SIGSTOP)
                os.kill(pid, signal.SIGCONT)
            elif changed:
                return status
            else:
                number, is_sent_here = _next_signal(watched)
                if number in _PASSED_ON and is_sent_here:
                    os.kill(pid, number)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        signal.signal(signal.SIGCHLD, of_child)


def _next_signal(watched: frozenset[signal.Signals]) -> tuple[int, bool]:
    """Wait for a signal; whether it was sent to this process alone."""
    if sys.platform == "linux":
        info = signal.sigwaitinfo(watched)
        return info.si_signo, info.si_signo not in _OF_A_TERMINAL or info.si_pid != 0
    number = signal.sigwait(watched)
    return number, number not in _OF_A_TERMINAL


def end_as(status: int) -> None:
    """End this process with a program's wait status: with its exit code, or by its signal."""
    sys.stdout.flush()
    sys.stderr.flush()
    code = os.waitstatus_to_exitcode(status)
    if code < 0:
        if -code not in (signal.SIGKILL, signal.SIGSTOP):
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
        code = 128 - code  # a signal that ends no program by default
    sys.exit(code)
