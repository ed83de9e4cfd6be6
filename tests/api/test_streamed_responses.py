"""How long a request waits for what it continues, by a virtual clock."""

from __future__ import annotations

import asyncio

import pytest
from virtual_clock import run_at_once

from towerd.api.responses.streamed import (
    KEEP_S_MAX,
    LOOK_S_MAX,
    NOTICE_S_MAX,
    StreamedResponse,
    StreamedResponses,
)
from towerd.errors import NotFound

LEAVES_S, KEPT_S = 1.0, 3.0


def enter_four(streams: StreamedResponses) -> list[StreamedResponse]:
    return [streams.enter("ann", (f"resp_{n}", "conv")) for n in range(4)]


def test_streams_of_a_conversation_are_waited_for_at_once() -> None:
    """Those whose clients stay, and those that take too long to keep."""

    async def waited(*names: str, n_stopped: int = 0, tenant: str = "ann") -> float:
        streams = StreamedResponses()
        for one in enter_four(streams)[:n_stopped]:
            one.stopped()
        for name in names:
            await streams.wait(tenant, name)
        return asyncio.get_running_loop().time()

    assert run_at_once(waited("conv")) == pytest.approx(NOTICE_S_MAX)
    assert run_at_once(waited("conv", n_stopped=2)) == pytest.approx(KEEP_S_MAX)
    assert run_at_once(waited("resp_1", "resp_2")) == pytest.approx(2 * NOTICE_S_MAX)
    assert run_at_once(waited("conv", tenant="bob")) == run_at_once(waited("other")) == 0


class Kept:
    """What is looked for."""

    def __init__(self, *, is_there: bool) -> None:
        self.is_there = is_there
        self.looked_s: list[float] = []

    async def look(self) -> str:
        """It, once it is there."""
        self.looked_s.append(asyncio.get_running_loop().time())
        if not self.is_there:
            raise NotFound("not yet")
        return "it"


def test_a_response_that_is_kept_is_not_waited_for() -> None:
    """Also while another one of its request is still streamed."""

    async def find() -> None:
        streams, kept = StreamedResponses(), Kept(is_there=True)
        streams.enter("ann", ("resp_0", "resp_1"))
        assert await streams.find("ann", "resp_0", kept.look, look_s=LOOK_S_MAX) == "it"
        assert kept.looked_s == [0]

    run_at_once(find())


def test_a_response_that_is_left_is_found_when_it_is_kept() -> None:
    async def find() -> None:
        streams, kept = StreamedResponses(), Kept(is_there=False)
        one = enter_four(streams)[0]

        def keep() -> None:
            kept.is_there = True
            one.end()

        loop = asyncio.get_running_loop()
        loop.call_at(LEAVES_S, one.stopped)
        loop.call_at(KEPT_S, keep)
        assert await streams.find("ann", "resp_0", kept.look) == "it"
        assert kept.looked_s == pytest.approx([0, KEPT_S])

    run_at_once(find())


def test_a_response_that_is_not_made_here_is_looked_for_less_and_less() -> None:
    async def find(look_s: float, streamed: str = "") -> list[float]:
        streams, kept = StreamedResponses(), Kept(is_there=False)
        streams.enter("ann", (streamed,))
        with pytest.raises(NotFound):
            await streams.find("ann", "resp_9", kept.look, look_s=look_s)
        return kept.looked_s

    looks = [0, 0, 0.05, 0.15, 0.35, 0.75, 1.55, LOOK_S_MAX]
    assert run_at_once(find(LOOK_S_MAX)) == pytest.approx(looks)
    assert run_at_once(find(0)) == [0, 0]
    assert run_at_once(find(LOOK_S_MAX, "resp_9")) == pytest.approx([0, NOTICE_S_MAX])
