"""SchedulerSide: what vLLM's scheduler asks the connector: what is stored of a prompt, and what to save when.

Rows of a prompt are saved in the step that has computed the last of them, rows of a reply when the request
ends. Requests with pictures, adapters or embeddings are left alone: their ids alone do not say what their rows
are. No error of the store reaches vLLM.
"""

from __future__ import annotations

import hashlib
import logging
import time
from collections.abc import Sequence
from typing import Any

import numpy as np

from towerd.connectors.vllm.lookups import Lookups
from towerd.connectors.vllm.operations import (
    ReadPlanes,
    RowLoad,
    RowSave,
    SavedPath,
    StoredPlanes,
    scheduled,
    slots_of,
)
from towerd.connectors.vllm.slot_origins import SlotOrigins
from towerd.connectors.vllm.vllm_store import VllmStore
from towerd.errors import TowerdError
from towerd.store.tree.node import PUBLIC
from towerd.tokens import Ids, Provenances, common_prefix

log = logging.getLogger(__name__)

MEASURED_TOKENS_MIN = 64
"""Fewer tokens of a prompt say little of the speed of evaluation."""
SAVED_TOKENS_MIN = 16
"""Fewer new tokens are no file of their own."""
OWN_SCOPE = "local"
"""The tenant of requests without a cache_salt."""


class SchedulerSide:
    """Belongs to the scheduler's thread."""

    def __init__(
        self, store: VllmStore, block_tokens: int, n_blocks: int, *, loads: bool, saves: bool
    ) -> None:
        """loads, saves: what this engine is to do"""
        self._store = store
        self._block_tokens = block_tokens
        self._may_load, self._may_save = loads, saves
        self._requests: dict[str, Any] = {}
        self._lookups = Lookups(store)
        """Until blocks are allocated for what they find."""
        self._saved: dict[str, int] = {}
        """By request whose prompt was evaluated, the tokens that are stored or about to be."""
        self._paths: dict[int, SavedPath] = {}
        """By number, what the worker reads the rows of."""
        self._n_paths = 0
        self._loads: list[tuple[RowLoad, Provenances]] = []
        self._ended: list[RowSave] = []
        self._origins = None if store.is_exact else SlotOrigins(n_blocks, block_tokens)
        self._n_steps = 0
        self._timed: dict[int, tuple[float, int]] = {}
        """By number, when a step that only evaluates was planned, and its tokens."""
        self._done_at = 0.0

    def close(self) -> None:
        """Wait for the look-ups that run."""
        self._lookups.close()

    def n_matched(self, request: Any, n_computed: int) -> int | None:
        """How many tokens behind the first `n_computed`, which vLLM has, are stored; at least one is left to
        evaluate. None: they are being read and checked, or the shared tier is asked; it is to be asked again."""
        id, n_tokens = request.request_id, len(request.all_token_ids) - 1
        self._requests[id] = request
        scope = scope_of_request(request)
        if scope is None or not self._may_load or n_tokens <= n_computed:
            return 0
        if not self._lookups.has(id, n_tokens, n_computed):
            self._lookups.begin(id, _ids(request)[:-1], scope, n_computed)
        return self._lookups.n_found(id, n_computed)

    def allocated(self, request: Any, block_ids: list[int], n_external: int) -> None:
        """vLLM has allocated blocks, and wants `n_external` tokens loaded into them."""
        found = self._lookups.take(request.request_id)
        if n_external == 0 or found is None:
            return
        found = found.part(found.p0, found.p0 + n_external)
        pieces = tuple(map(StoredPlanes.of, found.pieces))
        slots = slots_of(block_ids, found.p0, found.p1, self._block_tokens)
        blocks = frozenset((slots // self._block_tokens).tolist())
        self._loads.append((RowLoad(pieces, slots, blocks), found.provenance))
        scope = scope_of_request(request)
        if self._store.shared is not None and self._may_save and scope is not None:
            self._store.shared.used(_ids(request)[: found.p1], scope)

    def plan_step(self, step: Any) -> tuple[list[RowLoad], list[RowSave]]:
        """What the worker is to do in this step; `step` is the scheduler's output."""
        loads, self._loads = self._loads, []
        ended, self._ended = self._ended, []
        self._lookups.begin_step(is_idle=not step.num_scheduled_tokens)
        if self._origins is not None:
            self._origins.trace(step, loads)
        saves = [*ended, *(self._prompts(step) if self._may_save else ())]
        return [load for load, _ in loads], saves

    def time_step(self, step: Any, *, is_loading: bool) -> int:
        """The number to say to `step_ended` once this step has ended; 0: it does not matter."""
        n_tokens = step.num_scheduled_tokens.values()
        if self._store.shared is None or is_loading:
            return 0
        if max(n_tokens, default=0) < MEASURED_TOKENS_MIN:  # replies are slower than prompts
            return 0
        self._n_steps += 1
        self._timed[self._n_steps] = time.monotonic(), sum(n_tokens)
        return self._n_steps

    def step_ended(self, number: int) -> None:
        """A step has ended, that of this number if it is not 0."""
        if self._store.shared is None:
            return
        now = time.monotonic()
        if number in self._timed:
            planned_at, n_tokens = self._timed[number]
            self._timed = {n: each for n, each in self._timed.items() if n > number}
            self._store.shared.evaluated(n_tokens, now - max(planned_at, self._done_at))
        self._done_at = now

    def have_read(self, read: Sequence[ReadPlanes]) -> None:
        """The worker has read rows, which are stored now."""
        for each in read:
            path = self._paths.pop(each.number)
            if each.planes and self._may_save:
                self._store.save(path, each.planes)

    def stop(self) -> None:
        """Neither load nor save from now on: vLLM's weights may be others than those of the store."""
        if self._may_load or self._may_save:
            log.warning(
                "the weights may have changed: the store is not used until vLLM is restarted"
            )
        self._may_load = self._may_save = False
        self._lookups.clear()

    def ended(self, request: Any, block_ids: list[int]) -> bool:
        """A request has ended. Whether its blocks are to be kept until its rows are read."""
        id = request.request_id
        self._lookups.forget(id)
        self._requests.pop(id, None)
        if self._origins is not None:
            self._origins.forget(id)
        n_saved = self._saved.pop(id, None)
        scope = scope_of_request(request)
        ids = _ids(request)[: min(request.num_computed_tokens, len(request.all_token_ids) - 1)]
        if scope is None or n_saved is None:
            return False
        save = self._save(ids, scope, block_ids, n_saved, id)
        if save is not None:
            self._ended.append(save)
        return save is not None

    def _prompts(self, step: Any) -> list[RowSave]:
        """The rows of the prompts that end in this step."""
        saves = []
        for id, before, after in scheduled(step):
            request = self._requests.get(id)
            if request is None or not before < request.num_prompt_tokens <= after:
                continue
            scope, ids = scope_of_request(request), _ids(request)[: request.num_prompt_tokens]
            block_ids = step.kv_connector_block_state.get_block_ids(id)
            if scope is None or block_ids is None:
                continue
            save = self._save(ids, scope, block_ids[0], 0, None)
            self._saved[id] = 0 if save is None else len(self._paths[save.number].ids)
            if save is not None:
                saves.append(save)
        return saves

    def _save(
        self, ids: Ids, scope: str, block_ids: list[int], n_saved: int, finished: str | None
    ) -> RowSave | None:
        """What is to be stored of a request's rows, of which the first `n_saved` are; None: nothing."""
        if not self._may_save or len(ids) - n_saved < SAVED_TOKENS_MIN:
            return None
        try:
            n_rows, n_planned = self._planned(ids, scope)
            p0 = max(n_saved, n_planned, self._store.n_stored(ids, scope))
        except TowerdError as error:
            log.warning("rows were not stored: %s", error.message)
            return None
        except Exception:
            log.exception("rows were not stored")
            return None
        ids = ids[: p0 + max(0, self._store.room_rows - n_rows)]
        if len(ids) - p0 < SAVED_TOKENS_MIN:
            return None
        provenance: Provenances = np.zeros(len(ids), np.uint8)
        if self._origins is not None:
            provenance = self._origins.of(slots_of(block_ids, 0, len(ids), self._block_tokens))
        slots = slots_of(block_ids, p0, len(ids), self._block_tokens)
        self._n_paths += 1
        self._paths[self._n_paths] = SavedPath(ids, scope, p0, provenance)
        return RowSave(self._n_paths, slots, finished)

    def _planned(self, ids: Ids, scope: str) -> tuple[int, int]:
        """How many rows the worker has been asked for, and how many of the first tokens of `ids` are stored with
        them."""
        paths = list(self._paths.values())
        common = (common_prefix(each.ids, ids) for each in paths if each.scope == scope)
        return sum(len(each.ids) - each.p0 for each in paths), max(common, default=0)


def scope_of_request(request: Any) -> str | None:
    """The tenant of a request: requests with different salts share nothing, and the salt itself is stored nowhere.
    None: its rows depend on more than its ids."""
    if request.mm_features or request.lora_request is not None or request.prompt_embeds is not None:
        return None
    if request.pooling_params is not None or not request.prompt_token_ids:
        return None
    if not request.cache_salt:
        return OWN_SCOPE
    digest = hashlib.blake2b(request.cache_salt.encode(), digest_size=16).hexdigest()
    scope = f"salt-{digest}"
    assert scope != PUBLIC
    return scope


def _ids(request: Any) -> Ids:
    """The tokens of a request's prompt and reply so far."""
    return np.asarray(list(request.all_token_ids), np.int32)
