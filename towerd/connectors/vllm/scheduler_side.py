"""SchedulerSide: what vLLM's scheduler asks the connector: what is stored of a prompt, and what to save when.

Rows of a prompt are saved in the step that has computed the last of them, rows of a reply when the request
ends. Requests with pictures, adapters or embeddings are left alone: their ids alone do not say what their rows
are.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Sequence
from typing import Any

import numpy as np

from towerd.connectors.vllm.operations import (
    ReadPlanes,
    RowLoad,
    RowSave,
    SavedPath,
    Slots,
    StoredPlanes,
    slots_of,
)
from towerd.connectors.vllm.vllm_store import StoredPrefix, VllmStore
from towerd.errors import TowerdError
from towerd.store.tree.node import PUBLIC
from towerd.tokens import Ids, Provenances, common_prefix, computed_after

log = logging.getLogger(__name__)

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
        self._found: dict[str, StoredPrefix] = {}
        """What was said to be stored, until blocks are allocated for it."""
        self._saved: dict[str, int] = {}
        """By request whose prompt was evaluated, the tokens that are stored or about to be."""
        self._paths: dict[int, SavedPath] = {}
        """By number, what the worker reads the rows of."""
        self._n_paths = 0
        self._loads: list[tuple[RowLoad, Provenances]] = []
        self._ended: list[RowSave] = []
        n_slots = 0 if store.is_exact else n_blocks * block_tokens
        self._provenance = np.zeros(n_slots, np.uint8)
        """Of the row in each slot; empty where all are exact."""

    def n_matched(self, request: Any, n_computed: int) -> int | None:
        """How many tokens behind the first `n_computed`, which vLLM has, are stored; at least one is left to
        evaluate. None: the shared tier is being asked."""
        self._requests[request.request_id] = request
        scope = scope_of_request(request)
        if scope is None or not self._may_load:
            return 0
        found = self._found.get(request.request_id)
        if found is not None and found.p0 == n_computed:
            return found.p1 - found.p0
        ids = _ids(request)[:-1]
        shared = self._store.shared
        if shared is not None:
            n_known = max(n_computed, self._store.n_stored(ids, scope))
            if not shared.has_ended(request.request_id, ids, scope, n_known):
                return None
        found = self._find(ids, scope, n_computed) if len(ids) > n_computed else None
        if found is None:
            self._found.pop(request.request_id, None)
            return 0
        self._found[request.request_id] = found
        return found.p1 - found.p0

    def _find(self, ids: Ids, scope: str, n_computed: int) -> StoredPrefix | None:
        try:
            return self._store.find(ids, scope, n_computed)
        except TowerdError as error:
            log.warning("rows were not read: %s", error.message)
            return None

    def allocated(self, request: Any, block_ids: list[int], n_external: int) -> None:
        """vLLM has allocated blocks, and wants `n_external` tokens loaded into them."""
        found = self._found.pop(request.request_id, None)
        if self._store.shared is not None:
            self._store.shared.forget(request.request_id)
        if n_external == 0 or found is None:
            return
        p1 = found.p0 + n_external
        pieces = tuple(
            StoredPlanes.of(rows.slice(rows.p0, p1)) for rows in found.pieces if rows.p0 < p1
        )
        slots = slots_of(block_ids, found.p0, p1, self._block_tokens)
        blocks = frozenset((slots // self._block_tokens).tolist())
        self._loads.append((RowLoad(pieces, slots, blocks), found.provenance[:n_external]))

    def plan_step(self, step: Any) -> tuple[list[RowLoad], list[RowSave]]:
        """What the worker is to do in this step; `step` is the scheduler's output."""
        loads, self._loads = self._loads, []
        ended, self._ended = self._ended, []
        if not self._store.is_exact:
            self._trace(step, loads)
        saves = [*ended, *(self._prompts(step) if self._may_save else ())]
        return [load for load, _ in loads], saves

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
        self._found.clear()

    def ended(self, request: Any, block_ids: list[int]) -> bool:
        """A request has ended. Whether its blocks are to be kept until its rows are read."""
        id = request.request_id
        self._found.pop(id, None)
        self._requests.pop(id, None)
        if self._store.shared is not None:
            self._store.shared.forget(id)
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
        for id, before, after in _scheduled(step):
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
        ids = ids[: p0 + max(0, self._store.room_rows - n_rows)]
        if len(ids) - p0 < SAVED_TOKENS_MIN:
            return None
        provenance: Provenances = np.zeros(len(ids), np.uint8)
        if len(self._provenance):
            provenance = self._provenance[slots_of(block_ids, 0, len(ids), self._block_tokens)]
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

    def _trace(self, step: Any, loads: list[tuple[RowLoad, Provenances]]) -> None:
        """Note the provenance of what this step writes into the cache. A request may build on another of the same
        step, whichever is listed first, so that it is repeated until nothing changes."""
        for copy in step.kv_cache_block_copies or ():
            self._block(copy.dst_block_id)[:] = self._block(copy.src_block_id)
        for load, provenance in loads:
            self._provenance[load.slots] = provenance
        computed: list[tuple[Slots, Slots]] = []
        for id, before, after in _scheduled(step):
            found = step.kv_connector_block_state.get_block_ids(id)
            if found is not None:
                slots = slots_of(found[0], 0, after, self._block_tokens)
                computed.append((slots[:before], slots[before:]))
        is_settled = False
        while not is_settled:
            is_settled = True
            for behind, new in computed:
                origin = computed_after(self._provenance[behind])
                if (self._provenance[new] != origin).any():
                    self._provenance[new] = origin
                    is_settled = False

    def _block(self, block_id: int) -> Provenances:
        return self._provenance[block_id * self._block_tokens :][: self._block_tokens]


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


def _scheduled(step: Any) -> list[tuple[str, int, int]]:
    """Of each request of a step its id, how many of its tokens were computed before, and after it."""
    cached = step.scheduled_cached_reqs
    before = [
        *zip(cached.req_ids, cached.num_computed_tokens, strict=True),
        *((each.req_id, each.num_computed_tokens) for each in step.scheduled_new_reqs),
    ]
    return [(id, n, n + step.num_scheduled_tokens.get(id, 0)) for id, n in before]
