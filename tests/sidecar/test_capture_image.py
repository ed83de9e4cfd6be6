"""Slot files: parsed and composed, with sliding windows and without; what a capture keeps."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from sidecar_tools import OpenSidecar, alone, ask, prompt

from towerd.engine.llama_server.process.upstream_client import UpstreamClient
from towerd.errors import InvalidRequest
from towerd.models.bundled import bundled_model
from towerd.slots.errors import StateError
from towerd.slots.image import (
    ImageSpec,
    SlotImage,
    image_size,
    parse_image,
    usable,
    window_rows,
    write_image,
)
from towerd.slots.reader import ByteReader
from towerd.slots.rows import KVRows
from towerd.slots.state import parse_state
from towerd.tokens import Ids

WINDOW = 48
N = 130


async def saved(upstream: UpstreamClient, folder: Path, ids: Ids) -> bytes:
    """What llama-server writes for a slot of these tokens."""
    await upstream.evaluate(ids, 0)
    await upstream.save(0, "saved")
    return _read(folder / "saved")


def _read(path: Path) -> bytes:
    return path.read_bytes()


def array(data: bytes) -> np.ndarray[Any, np.dtype[np.uint8]]:
    return np.frombuffer(data, np.uint8)


def compose(spec: ImageSpec, tokens: Ids, parts: list[KVRows]) -> bytes:
    """A slot file of `parts`, as the engine writes it."""
    window = window_rows(spec, parts, len(tokens))
    out = np.empty(image_size(spec, len(tokens), sum(map(len, window))), np.uint8)
    write_image(spec, tokens, parts, window, 0, out)
    return out.tobytes()


@pytest.fixture(params=["dense", "window", "window-unified"])
async def image(
    request: pytest.FixtureRequest,
    llama_server: Path,
    tiny_model: Path,
    window_model: Path,
    tmp_path: Path,
) -> tuple[SlotImage, bytes]:
    """A real one of N tokens."""
    model = tiny_model if request.param == "dense" else window_model
    flags = ["-c", "512", "--slot-save-path", str(tmp_path)]
    flags += ["-np", "3", "-kvu"] if request.param == "window-unified" else []
    async with alone(llama_server, model, tmp_path, *flags) as process:
        data = await saved(process.upstream, tmp_path, prompt(N))
    return parse_image(array(data)), data


def test_it_is_read_whole(image: tuple[SlotImage, bytes]) -> None:
    """Byte for byte, with the positions that it has to have."""
    parsed, data = image
    assert parsed.to_bytes() == data
    assert np.array_equal(parsed.tokens, prompt(N))
    assert parsed.n == N
    spec = parsed.spec(WINDOW)
    if parsed.window is None:
        assert (parsed.window_from, spec.has_window) == (0, False)
        again = compose(spec, parsed.tokens, [parsed.rows(spec.layout, 0, N)])
        assert again == data
    else:
        assert parsed.window_from == N - WINDOW
        assert (spec.n_full, spec.layout.n_layer) == (2, 4)
        # The composed file has one row more: the one that opens the server's gate.
        again = compose(spec, parsed.tokens, [parsed.rows(spec.layout, 0, N)])
        composed = parse_state_of(again)
        assert composed == [N - WINDOW - 2, *range(N - WINDOW, N)]


def parse_state_of(data: bytes) -> list[int]:
    """Positions of the sliding-window rows of a composed file; not consecutive, so that
    `parse_image` refuses them."""
    rest = array(data)[12 + 4 * (N + 4) :]
    reader = ByteReader(rest)
    parse_state(reader, cell_ext=False, has_v=True, is_last=False)
    window = parse_state(reader, cell_ext=False)
    return [int(position) for position in window.rows.positions]


def test_rows_outside_the_window_are_marked(image: tuple[SlotImage, bytes]) -> None:
    """Which tokens can be resumed at follows from the rows themselves."""
    parsed, _ = image
    spec = parsed.spec(WINDOW)
    parts = [parsed.rows(spec.layout, 0, 50), parsed.rows(spec.layout, 50, N)]
    assert usable(spec, parts, N) == N
    if parsed.window is None:
        assert usable(spec, parts, 20) == 20
        return
    # One token before the end its window still is complete, two before it is not.
    assert usable(spec, parts, N - 1) == N - 1
    assert usable(spec, parts, N - 2) == 0
    unknown = parsed.spec(0)
    assert usable(unknown, parts, N) == 0


def test_damaged_files(image: tuple[SlotImage, bytes]) -> None:
    """Truncated anywhere, another version, tokens that are not the rows': refused."""
    _, data = image
    for end in (0, 3, 11, 40, len(data) // 2, len(data) - 1):
        with pytest.raises(StateError):
            parse_image(array(data[:end]))
    with pytest.raises(StateError, match="version 4"):
        parse_image(array(data[:4] + (4).to_bytes(4, "little") + data[8:]))
    with pytest.raises(StateError):
        parse_image(array(data + b"\0"))
    with pytest.raises(StateError, match="not a slot file"):
        parse_image(array(b"GGUF" + data[4:]))
    fewer = bytearray(data)
    fewer[20:24] = (N - 1).to_bytes(4, "little")
    with pytest.raises(StateError):
        parse_image(array(bytes(fewer)))


async def test_only_the_delta_is_kept(sidecar_on: OpenSidecar) -> None:
    """Three captures of one growing chat write every token once."""
    async with sidecar_on() as sidecar:
        engine = sidecar.engine
        ids, kept = prompt(60), 0
        for turn in range(3):
            _, done = await ask(sidecar, ids)
            ids = np.concatenate([ids, done.ids, prompt(10, turn + 1)])
            await engine.settle()
            stats = engine.stats()
            assert stats["saves"] == turn + 1
            assert stats["captured_tokens"] - kept == (67 if turn == 0 else 18)
            kept = stats["captured_tokens"]
        await engine.settle()
        assert engine.stats()["saves"] == 3
        assert sidecar.store.state.hot_bytes == kept * engine.info.kv_bytes_per_token


async def test_steady_chatting_costs_no_io(sidecar_on: OpenSidecar) -> None:
    """As many chats as slots, many turns: nothing is saved or restored."""
    async with sidecar_on() as sidecar:
        chats = [prompt(40, 1), prompt(40, 2)]
        for turn in range(5):
            for i, ids in enumerate(chats):
                _, done = await ask(sidecar, ids)
                assert done.timings.cache_n == (0 if turn == 0 else len(ids) - 4)
                chats[i] = np.concatenate([ids, done.ids, prompt(3, turn)])
        stats = sidecar.engine.stats()
        assert (stats["saves"], stats["restores"], stats["erases"]) == (0, 0, 0)


async def test_the_saved_tokens_are_the_truth(sidecar_on: OpenSidecar) -> None:
    """Where a reply's ids are not certain, the slot file corrects them."""
    async with sidecar_on() as sidecar:
        engine = sidecar.engine
        ids = prompt(50)
        async with await engine.holds.hold(ids, "local") as hold:
            body = {"prompt": ids.tolist(), "id_slot": hold.slot, "n_predict": 12}
            reply = await engine.upstream.post(
                "/completion",
                {**body, "temperature": 0.0, "ignore_eos": True, "return_tokens": True},
            )
            hold.replied(prompt(0), n_uncertain=12)
        await engine.settle()
        said = np.concatenate([ids, np.array(reply["tokens"], np.int32)])
        match = sidecar.store.match(said, "local")
        assert match.n == len(said) - 1
        plan = sidecar.tiers.plan(sidecar.tiers.store.hold(said, "local"), 0)
        assert plan.n == len(said) - 1


async def test_a_file_of_another_model(
    llama_server: Path, tiny_model: Path, tmp_path: Path
) -> None:
    """llama-server refuses what its layers do not fit, and continues. (A file that is too short
    ends it, so the composer works out every size before it writes a byte.)"""
    flags = "--slot-save-path", str(tmp_path)
    async with alone(llama_server, bundled_model(), tmp_path, *flags) as process:
        parsed = parse_image(array(await saved(process.upstream, tmp_path, prompt(20))))
        spec = parsed.spec(0)
        with pytest.raises(StateError, match="tokens for"):
            compose(spec, prompt(21), [parsed.rows(spec.layout, 0, 20)])
    async with alone(llama_server, tiny_model, tmp_path, *flags) as process:
        with pytest.raises(InvalidRequest, match="Unable to restore"):
            await process.upstream.restore(0, "saved")
        assert await process.upstream.evaluate(prompt(20), 0) == 0


async def test_a_request_that_was_given_up_leaves_nothing_to_save(sidecar_on: OpenSidecar) -> None:
    """Its client left before the reply began: only what the slot held before is known."""
    async with sidecar_on() as sidecar:
        engine = sidecar.engine
        ids = prompt(50)
        async with await engine.holds.hold(ids, "local"):
            pass
        await engine.settle()
        assert engine.stats()["saves"] == engine.stats()["saves_failed"] == 0
        assert sidecar.store.match(ids, "local").n == 0


async def test_what_froze_is_not_saved_again(sidecar_on: OpenSidecar) -> None:
    """Also where the slot may hold more than is known, as its client left in the reply."""
    async with sidecar_on() as sidecar:
        engine = sidecar.engine
        ids = prompt(50)
        async with await engine.holds.hold(ids, "local") as hold:
            await engine.upstream.evaluate(ids, hold.slot)
            hold.replied(prompt(0), hidden=True)
        engine.holds.frozen({("local", ids[:20].tobytes())})
        await engine.settle()
        assert engine.stats()["saves"] == 0
