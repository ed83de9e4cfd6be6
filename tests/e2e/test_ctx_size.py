"""What a start says of its context: nothing, unless it is larger than the model was trained on."""

from __future__ import annotations

from collections.abc import Callable

from daemon import Daemon


def complaints(daemon: Daemon) -> list[str]:
    lines = daemon.log.splitlines()
    return [line for line in lines if "n_ctx" in line or "--ctx-size" in line]


def test_by_default_there_is_no_warning(make_daemon: Callable[..., Daemon]) -> None:
    with make_daemon() as daemon:
        assert not complaints(daemon)


def test_more_than_the_model_was_trained_on(make_daemon: Callable[..., Daemon]) -> None:
    with make_daemon("--ctx-size", "131072", "--live-tokens", "131072") as daemon:
        (line,) = complaints(daemon)
    assert "--ctx-size 131072 is more than the " in line
