"""StoreBackend: the store's own files, while no daemon has them open."""

from __future__ import annotations

import time
from dataclasses import asdict
from operator import attrgetter
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING

from towerd import __version__
from towerd.api.own_segments import may_see, segment_json
from towerd.api.pins import base_json
from towerd.cli.client import Json, OnBytes
from towerd.errors import NotFound, StoreError, TowerdError
from towerd.store import Node, Store, latest_fingerprint
from towerd.store.boundaries import cut_of
from towerd.tenants import OWNER
from towerd.tiers.calibration_store import load_calibration

if TYPE_CHECKING:
    from towerd.cold import Coding
    from towerd.tower_file import Model

_ORDERS = {"used": "last_used", "tokens": "n", "id": "id", "hits": "hits"}


class StoreBackend:
    """Answers from an opened store. See `towerd.cli.client.Backend`.

    It knows the model that was served from the store last, and no text: that takes the model's
    tokenizer, so the daemon has to run for it."""

    kind = "store"

    def __init__(self, store: Store, where: str, model: Path | None = None) -> None:
        self.store = store
        self.where = where
        self._model_path = model
        self._coding: Coding | None = None

    @classmethod
    def at(cls, root: Path, model: Path | None = None) -> StoreBackend:
        """The store in `root`, which must exist; `model`: the GGUF that was served from it, None
        for the default. Raises StoreError, StoreLocked, StoreVersion."""
        if not any((root / name).exists() for name in ("catalog.sqlite", "journal", "segments")):
            raise StoreError(
                f"There is no store at {root}: run towerd serve, or name a store with --store-dir."
            )
        return cls(Store.open(root, latest_fingerprint), str(root), model)

    def __enter__(self) -> StoreBackend:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Give the store back."""
        if self._coding is not None:
            self._coding.close()
        self.store.close()

    # --- sessions and segments ------------------------------------------------------------

    def sessions(self, limit: int, scope: str | None = None) -> list[Json]:
        return [asdict(session) for session in self.store.sessions(scope, limit)]

    def session(self, id: str, scope: str | None = None, *, text: bool = False) -> Json:
        if text:
            raise needs_daemon()
        info = self.store.session(id, scope)
        turns = self.store.turns(id, info.scope)
        return {
            "text": None,
            "kept": None,
            "session": asdict(info),
            "turns": [asdict(turn) for turn in turns],
        }

    def delete_session(self, id: str, scope: str | None = None) -> None:
        self.store.delete_session(id, scope)

    def export_session(self, id: str, scope: str | None = None) -> bytes:
        from towerd.transfer import export_session

        found = self.store.session(id, scope)  # before the model is read
        return export_session(self.store, self._model(), id, found.scope)

    def import_session(self, data: bytes, scope: str | None = None) -> Json:
        from towerd.transfer import import_session

        return import_session(self.store, self._model(), data, scope or OWNER.scope)

    def freeze_session(self, id: str, scope: str | None = None) -> Json:
        from towerd.cold import freeze

        found = self.store.session(id, scope)
        froze = freeze(self.store, self._model().codec, id, found.scope)
        return {
            "session": asdict(self.store.session(id, found.scope)),
            "changed": froze is not None,
        }

    def thaw_session(self, id: str, scope: str | None = None) -> Json:
        from towerd.cold import thaw

        found = self.store.session(id, scope)
        was_frozen = bool(found.cold_bytes) and thaw(
            self.store, self._model().codec, id, found.scope
        )
        return {"session": asdict(self.store.session(id, found.scope)), "changed": was_frozen}

    def idle_sessions(self, idle_s: int, limit: int, scope: str | None = None) -> list[Json]:
        found = self.store.cold.idle(time.time() - idle_s, limit, scope)
        return [asdict(session) for session in found]

    def model_path(self) -> Path:
        """The file of the model that was served from the store last. Raises ModelError, or
        StoreError if the settings name another one."""
        from towerd.engine.model_file import file_hash
        from towerd.models.bundled import find_model

        path = find_model(self._model_path)
        if file_hash(path, self.store.state.catalog) != self.store.state.fingerprint.model_hash:
            raise StoreError(
                "Coding a text takes the vocabulary of the model that was served from this store, "
                f"and {path.name} is another one: name it with --model, or start its daemon."
            )
        return path

    def _model(self) -> Model:
        """The model of `model_path`, to code with. Raises as that, and NotSupported."""
        from towerd.cold import Coding, Source

        path, hash = self.model_path(), self.store.state.fingerprint.model_hash
        if self._coding is None:
            self._coding = Coding(lambda: Source(path, hash), tables=self.store.tables)
        return self._coding.model()

    def segments(self, sort: str, limit: int, offset: int = 0, scope: str | None = None) -> Json:
        nodes = [node for node in self.store.nodes() if may_see(node, scope)]
        nodes.sort(key=attrgetter(_ORDERS[sort]), reverse=sort != "id")
        shown = nodes[offset : offset + limit]
        return {"segments": [segment_json(n, self.store) for n in shown], "total": len(nodes)}

    def segment(self, id: int, *, text: bool = False, ids: bool = False) -> Json:
        if text:
            raise needs_daemon()
        node = self.store.node(id)
        out = segment_json(node, self.store)
        out["cut"] = cut_of(self.store)
        out["path"] = [each.id for each in node.path()]
        out["children"] = [child.id for child in node.children]
        if ids:
            out["ids"] = memoryview(node.ids).cast("i").tolist()
        return out

    def why(self, id: int) -> Json:
        raise needs_daemon()

    def trie(self, root: int, depth: int, limit: int, scope: str | None = None) -> Json:
        top = self.store.node(root) if root else self.store.root
        if not (top is self.store.root or may_see(top, scope)):
            raise NotFound(f"there is no segment {root}")
        entries: list[Json] = []
        level: list[tuple[Node, list[Json]]] = [(top, entries)]
        n, truncated = 0, False
        for _ in range(depth):
            below: list[tuple[Node, list[Json]]] = []
            for parent, into in level:
                children = [child for child in parent.children if may_see(child, scope)]
                children.sort(key=attrgetter("last_used"), reverse=True)
                truncated = truncated or len(children) > limit - n
                for child in children[: limit - n]:
                    into.append({**segment_json(child, self.store), "children": []})
                    below.append((child, into[-1]["children"]))
                    n += 1
            level = below
        truncated = truncated or any(node.children for node, _ in level)
        return {"root": top.id, "trie": entries, "segments": n, "truncated": truncated}

    # --- pins and bases -------------------------------------------------------------------

    def pins(self) -> list[Json]:
        return [segment_json(node, self.store) for node in self.store.pins()]

    def pin(self, segment: int) -> Json:
        self.store.pin(segment)
        return segment_json(self.store.node(segment), self.store)

    def unpin(self, segment: int) -> None:
        self.store.unpin(segment)

    def bases(self) -> list[Json]:
        return [base_json(base) for base in self.store.bases()]

    def remove_base(self, name: str, scope: str) -> None:
        self.store.remove_base(name, scope)

    # --- upkeep ---------------------------------------------------------------------------

    def stats(self) -> Json:
        daemon_only = (
            "engine_name", "fidelity", "model", "model_path", "n_ctx", "n_slots", "uptime_s", "reuse",
            "slots", "engine", "tiers", "cold", "traffic",
        )  # fmt: skip
        return {
            "version": __version__,
            **dict.fromkeys(daemon_only),
            "fingerprint": self.store.state.digest.hex(),
            "store": self.store.stats(),
        }

    def calibration(self) -> Json:
        found = load_calibration(self.store, self.store.state.digest.hex())
        return {
            "state": "done" if found is not None else "waiting",
            "why": "no daemon runs",
            "fidelity": None,
            "level_formats": None,
            "progress": {"done": 0, "total": 0},
            "calibration": found.to_json() if found is not None else None,
        }

    def verify(self, repair: bool, progress: OnBytes) -> Json:
        report = self.store.verify(progress, repair=repair)
        lists = {"problems": list(report.problems), "recovered": list(report.recovered)}
        return {"ok": report.ok, **asdict(report), **lists}

    def gc(self, quarantine_days: float, dry_run: bool) -> Json:
        return asdict(self.store.gc(quarantine_days=quarantine_days, dry_run=dry_run))


def needs_daemon() -> TowerdError:
    """The refusal to show text without a tokenizer."""
    return TowerdError(
        "Text needs the model's tokenizer: start the daemon with towerd serve and ask again."
    )
