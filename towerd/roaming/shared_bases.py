"""Precached bases in the bucket: a record holds the tokens, and says which objects their rows are in."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from towerd.errors import InvalidRequest, NotFound
from towerd.roaming.shared_records import SharedRecords
from towerd.store import Base, Store
from towerd.store.sessions.turn import ANYWHERE
from towerd.store.tree.scope import is_public, public_of, scope_of, tenant_of
from towerd.tiers.shared.naming import naming
from towerd.tiers.shared.objects import BaseRecord
from towerd.tiers.shared.records import version_of
from towerd.tiers.shared.tier import SharedTier
from towerd.tokens import Ids, ids_array, ids_bytes


class SharedBases:
    """Belongs to the thread that talks with the bucket."""

    def __init__(
        self,
        shared: SharedTier,
        store: Store,
        records: SharedRecords,
        flush: Callable[[], object],
    ) -> None:
        """flush: writes the rows that are only in RAM"""
        self._shared, self._store, self._records = shared, store, records
        self._flush = flush

    def named(self, name: str, scope: str) -> Base:
        """The base here that the tenant of `scope` uses: its own, or else a public one. Raises NotFound."""
        seen = (scope, public_of(scope))
        found = [
            base for base in self._store.bases.listing() if base.name == name and base.scope in seen
        ]
        if not found:
            raise NotFound(f"There is no base {name!r}: towerctl pin lists them.")
        return min(found, key=lambda base: seen.index(base.scope))

    def push(self, base: Base, *, by_itself: bool = False) -> dict[str, Any]:
        """Put a base; see `Roaming.push_base`.

        by_itself: a text that is there stays as old as it is, and a record that adds no rows is not put"""
        self._flush()
        ids = self._store.node(base.node).prefix_ids()
        put = self._shared.put_path(ids, base.scope)
        record = BaseRecord(
            **self._records.common(put, base.scope),
            name=base.name,
            level=base.level,
            tokenizer=self._store.state.identity.tokenizer_digest,
            ids=ids_bytes(ids),
            format=base.format,
            reuse=base.reuse,
        )
        folder = self._records.base_folder(base.name, base.scope)
        found = self._records.listed(folder, base.scope)
        text = self._records.text(record.ids, base.scope)
        version = version_of(text, found, is_newest=not by_itself)
        model = self._shared.model_name(base.scope)
        known = [each.name for each in self._records.put_lately(found) if each.name.text == text]
        n_there = max((each.n_rows for each in known if each.model == model), default=0)
        if not (by_itself and known and put.n_tokens <= n_there):
            what = [text.encode()]
            named = naming(
                put.objects,
                what,
                what,
                [each.chain for each in put.checkpoints],
                self._shared.way(ids, base.scope, put),
            )
            self._records.put_record(folder, version, text, record, base.scope, named)
        self._shared.kept(ids, base.scope, put)
        return {"base": base.name, "tokens": len(ids), "rows": min(put.n_tokens, len(ids))}

    def pull(self, name: str, scope: str, replace: bool) -> dict[str, Any]:
        """Take a base; see `Roaming.pull_base`."""
        found = self._records.listed(self._records.base_folder(name, scope), scope)
        if not is_public(scope) and not found:
            return self.pull(name, public_of(scope), replace)
        record = self._records.read(found, scope, BaseRecord, f"base {name!r}")
        if record.tokenizer != self._store.state.identity.tokenizer_digest:
            raise InvalidRequest(
                f"The base {name!r} has another tokenizer than the served model: precache it here."
            )
        ids = ids_array(record.ids)
        own, place = scope_of(tenant_of(scope), record.adapters), (record.level, is_public(scope))
        if not replace and self._is_another(name, ids, public_of(own) if place[1] else own):
            raise InvalidRequest(
                f"The base {name!r} here has another text than the one in the shared tier: towerctl shared pull "
                f"--base {name} --replace takes that one."
            )
        self._store.bases.add(name, ids, own, *place, record.format, record.reuse == ANYWHERE)
        n_rows = self._records.fetch(record, ids, own)
        return {"base": name, "tokens": len(ids), "rows": n_rows}

    def _is_another(self, name: str, ids: Ids, scope: str) -> bool:
        """Whether a base of this name and scope is here, with other tokens than `ids`."""
        named = (each for each in self._store.bases.listing() if each.name == name)
        base = next((each for each in named if each.scope == scope), None)
        return base is not None and not np.array_equal(
            self._store.node(base.node).prefix_ids(), ids
        )
