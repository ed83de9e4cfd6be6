"""Probe: finds out what an upstream can do by saving, reading, composing and restoring a slot.

No endpoint of llama-server says any of this, and its state format changes with its version, so
nothing is assumed. What does not work is reported, with what to do about it.
"""

from __future__ import annotations

import asyncio
import contextlib
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from towerd.engine.llama_server.process.binary import Build
from towerd.engine.llama_server.process.upstream_client import (
    UpstreamClient,
    UpstreamError,
    UpstreamGone,
)
from towerd.engine.llama_server.slot_files.slotdir import SlotDir
from towerd.errors import (
    ConfigError,
    InvalidRequest,
    NotFound,
    NotSupported,
    TowerdError,
    Unauthorized,
)
from towerd.slots.errors import StateError
from towerd.slots.image import (
    ImageSpec,
    SlotImage,
    image_size,
    parse_image,
    parse_state_image,
    parse_whole_image,
    window_rows,
    write_image,
)
from towerd.slots.kind import RECURRENT, WHOLE
from towerd.tokens import Ids

_TEXT = "The quick brown fox jumps over the lazy dog."
_UNCUT = (
    "this model's layers keep a state that cannot be cut at a token (recurrent or hybrid), in a form "
    "that towerd cannot read; a chat continues in its slot while each prompt is an exact extension of "
    "what the slot holds"
)
_DRAFT_TOKENS = 8
"""Tokens that are generated from a restored slot where drafts are made, which go through caches that
no slot file has."""
_WINDOW_TOKENS_MAX = 512
"""A probe longer than a sliding window is only made up to here; it has to be prefilled."""


@dataclass(frozen=True, slots=True)
class ProbeResult:
    """The result of the probe. `spec` None: slot states cannot be composed, and requests only
    pass through."""

    build: Build
    n_slots: int
    n_ctx: int
    """Tokens that one slot may hold."""
    spec: ImageSpec | None
    reuse_works: bool
    """A restored slot was seen to be reused (with a long window: it is believed until a reply
    says otherwise)."""
    keeps_idle_slots: bool
    """An idle slot keeps its tokens when another one runs."""
    extends_only: bool
    """A slot is reused only by a prompt that begins with all it holds (recurrent layers)."""
    speculative: bool
    loras: tuple[dict[str, Any], ...]
    model_path: str
    props: dict[str, Any]
    notes: tuple[str, ...] = ()

    @property
    def can_compose(self) -> bool:
        """Whether towers are restored at all."""
        return self.spec is not None and self.reuse_works

    @property
    def cells(self) -> int:
        """Cells that all slots share; 0 when each has its own."""
        if self.spec is None or self.spec.kind is RECURRENT:  # which takes one for each slot
            return 0
        return self.n_ctx if self.spec.n_stream == 1 and self.n_slots > 1 else 0


async def identify(upstream: UpstreamClient) -> dict[str, Any]:
    """GET /props of something that must be a llama-server with one model.

    Raises ConfigError with what to do: nothing there, something else, a router, a wrong key."""
    url = upstream.url
    try:
        props = await upstream.get("/props")
    except UpstreamGone as error:
        raise ConfigError(f"Nothing answers at {url}: start llama-server there first.") from error
    except Unauthorized as error:
        raise ConfigError(
            f"llama-server at {url} wants a key: give its key with --upstream-key."
        ) from error
    except TowerdError as error:
        raise ConfigError(f"{url} is not a llama-server: /props says {error.message}") from error
    if not isinstance(props, dict) or "build_info" not in props:
        raise ConfigError(
            f"{url} is not a llama-server that towerd knows: /props has no build_info; "
            "towerd needs llama.cpp of 2026 or later."
        )
    if props.get("role") == "router":
        raise ConfigError(
            f"llama-server at {url} is a router of several models: attach to one that was started "
            "with a model (-m), because a router's slots come and go."
        )
    return props


async def probe(
    upstream: UpstreamClient,
    slotdir: SlotDir,
    *,
    window: int = 0,
    has_indexer: bool = False,
    allow_vulnerable: bool = False,
) -> ProbeResult:
    """Probe the upstream. `window`: the model file's sliding window, if it is known; `has_indexer`:
    whether its attention keeps an index, which looks like the cache of a window.

    Raises ConfigError for what cannot be served at all."""
    props = await identify(upstream)
    build = Build.parse(str(props["build_info"]))
    build.check(allow_vulnerable=allow_vulnerable)
    try:
        speculative = any(slot.get("speculative") for slot in await upstream.slots())
    except (NotSupported, NotFound):
        raise ConfigError(
            f"llama-server at {upstream.url} hides its slots: start it without --no-slots."
        ) from None
    try:
        loras = tuple(await upstream.get("/lora-adapters"))
    except TowerdError:
        loras = ()
    found = ProbeResult(
        build=build,
        n_slots=int(props["total_slots"]),
        n_ctx=int(props["default_generation_settings"]["n_ctx"]),
        spec=None,
        reuse_works=False,
        keeps_idle_slots=True,
        extends_only=False,
        speculative=speculative,
        loras=loras,
        model_path=str(props.get("model_path", "")),
        props=props,
    )
    return await _try_slots(upstream, slotdir, found, window, has_indexer)


def _without(found: ProbeResult, why: str) -> ProbeResult:
    return replace(found, notes=(*found.notes, f"Nothing is restored: {why}."))


async def _try_slots(
    upstream: UpstreamClient,
    slotdir: SlotDir,
    found: ProbeResult,
    window: int,
    has_indexer: bool,
) -> ProbeResult:
    """Save, parse, re-emit, restore, reuse."""
    last = found.n_slots - 1
    try:
        ids = await _probe_ids(upstream, found.n_ctx, window)
        await upstream.evaluate(ids, 0)
    except (InvalidRequest, NotSupported) as error:
        return _without(found, f"it does not complete prompts ({error.message})")
    try:
        image = await _save(upstream, slotdir, ids, has_indexer)
        if image.window is not None and len(image.window.rows) < image.n:
            window = len(image.window.rows)  # what the server keeps, whatever the file says
        spec = image.spec(window)
        found = replace(found, spec=spec, extends_only=spec.kind.has_state)
        if image.window is None or 0 < window < len(ids) - 1:
            found = await _check_reuse(upstream, slotdir, found, image, last)
        else:
            found = replace(found, reuse_works=True)
        return _check_sharing(await _check_idle(upstream, found, len(ids)))
    except StateError as error:
        if await _is_uncut(upstream, ids):
            return replace(_without(found, _UNCUT), extends_only=True)
        return _without(found, f"this llama-server's slot files cannot be read ({error})")
    finally:
        with contextlib.suppress(TowerdError):
            for slot in {0, last}:
                await upstream.erase(slot)


async def _probe_ids(upstream: UpstreamClient, n_ctx: int, window: int) -> Ids:
    """A prompt that is longer than a small window."""
    words = await upstream.tokenize(_TEXT, add_special=False, parse_special=False)
    if not len(words):
        raise InvalidRequest("its tokenizer makes no tokens")
    n = max(16, window + 4 if window <= _WINDOW_TOKENS_MAX else 0)
    return np.resize(words, min(n, n_ctx - 2)).astype(np.int32)


async def _save(
    upstream: UpstreamClient, slotdir: SlotDir, ids: Ids, has_indexer: bool
) -> SlotImage:
    """The state of slot 0, checked. Raises StateError; ConfigError if its file cannot be had."""
    name = slotdir.new_name()
    try:
        await upstream.save(0, name)
    except NotSupported as error:
        raise ConfigError(
            f"llama-server at {upstream.url} cannot save slots: start it with --slot-save-path DIR "
            "and name the same directory with --slot-dir."
        ) from error
    try:
        data = await asyncio.to_thread(slotdir.take, name)
    except OSError as error:
        raise ConfigError(
            f"llama-server at {upstream.url} saved a slot, but not to {slotdir.path}: name the "
            "directory of its --slot-save-path with --slot-dir."
        ) from error
    return await asyncio.to_thread(_read, data, ids, has_indexer)


def _read(data: np.ndarray[Any, np.dtype[np.uint8]], ids: Ids, has_indexer: bool) -> SlotImage:
    image = _parse(data)
    if image.window is not None and has_indexer:
        image = parse_whole_image(data)
    if not np.array_equal(image.tokens, ids):
        raise StateError("the saved slot holds other tokens than it was given")
    if not np.array_equal(np.frombuffer(image.to_bytes(), np.uint8), data):
        raise StateError("parsed and written again it is not the same bytes")
    return image


def _parse(data: np.ndarray[Any, np.dtype[np.uint8]]) -> SlotImage:
    # M-RoPE models store 12 more bytes a cell, which nothing in the file says.
    for cell_ext in (False, True):
        with contextlib.suppress(StateError):
            return parse_image(data, cell_ext=cell_ext)
    return parse_state_image(data)


async def _is_uncut(upstream: UpstreamClient, ids: Ids) -> bool:
    """Whether slot 0, which holds `ids`, is reused by a prompt that adds to them, but not by one
    that begins with half of them."""
    half = len(ids) // 2
    other = next((token for token in ids if token != ids[half]), None)
    if other is None or await upstream.evaluate(np.append(ids, ids[:1]), 0) != len(ids):
        return False
    return await upstream.evaluate(np.append(ids[:half], other), 0) != half


async def _check_reuse(
    upstream: UpstreamClient, slotdir: SlotDir, found: ProbeResult, image: SlotImage, slot: int
) -> ProbeResult:
    """Restore a composed state into `slot` and see whether the next prompt uses it."""
    assert found.spec is not None
    n = image.n
    name = slotdir.new_name()
    await asyncio.to_thread(_compose, found.spec, image, slotdir, name, slot)
    longer = np.append(image.tokens, image.tokens[:1])
    n_predict = _DRAFT_TOKENS if found.speculative else 0
    try:
        if found.speculative:
            await upstream.erase(slot)
        await upstream.restore(slot, name)
        reused = await upstream.evaluate(longer, slot, n_predict=n_predict)
    except InvalidRequest as error:
        return _without(found, f"it refuses a composed slot ({error.message})")
    except UpstreamError as error:
        why = "its drafts fail in a slot that was restored" if found.speculative else "it fails"
        return _without(found, f"{why} ({error.message})")
    finally:
        await asyncio.to_thread(slotdir.remove, name)
    if reused == n:
        return replace(found, reuse_works=True)
    why = f"of {n} restored tokens it used {reused}"
    if found.spec.kind is WHOLE:
        why += ", which --swa-full changes for a model with sliding windows"
    return _without(found, why)


def _compose(spec: ImageSpec, image: SlotImage, slotdir: SlotDir, name: str, slot: int) -> None:
    half = image.n // 2
    parts = []
    if spec.kind.has_rows:
        parts = [image.rows(spec.layout, 0, half), image.rows(spec.layout, half, image.n)]
    window = window_rows(spec, parts, image.n)
    state = None if image.state is None else image.state.part
    size = image_size(spec, image.n, sum(map(len, window)), 0 if state is None else len(state))
    with slotdir.writing(name, size) as out:
        write_image(spec, image.tokens, parts, window, slot, out, state)


async def _check_idle(upstream: UpstreamClient, found: ProbeResult, n: int) -> ProbeResult:
    """Whether slot 0 still holds its tokens, now that another slot has run."""
    if found.n_slots == 1 or not found.reuse_works:
        return found
    held = int((await upstream.slots())[0].get("n_prompt_tokens", n))
    if held == n:
        return found
    note = (
        "It clears idle slots whenever another one runs, so every change of chat is a restore: "
        "start llama-server with --no-cache-idle-slots."
    )
    return replace(found, keeps_idle_slots=False, notes=(*found.notes, note))


def _check_sharing(found: ProbeResult) -> ProbeResult:
    """Sliding-window layers whose cells are shared lose what is outside a slot's window."""
    if found.spec is None or not found.spec.has_window or not found.cells:
        return found
    note = (
        "All slots share the cells of the sliding-window layers, so a restore may be lost while "
        "others run: start llama-server with --no-kv-unified."
    )
    return replace(found, notes=(*found.notes, note))
