"""The names by which models were served, so that a conversation can say which one it was held with."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress

from towerd.errors import DiskFull
from towerd.store.catalog.catalog import Catalog
from towerd.store.sessions.turn import SessionInfo
from towerd.store.state.state import StoreState

KEY = "model_name:"
"""Before a model's hash, the key of its name among the small values of the catalog."""
_OF_ROWS = (
    "SELECT DISTINCT t.id, json_extract(p.json, '$.model_hash') FROM turns AS t"
    " JOIN views AS v ON v.node = t.reply_node JOIN files AS f ON f.id = v.file"
    " JOIN fingerprints AS p ON p.id = f.fingerprint"
    " WHERE t.id IN (SELECT value FROM json_each(?)) ORDER BY p.opened"
)
_OF_TOKENIZERS = (
    "SELECT lower(hex(t.digest)), json_extract(p.json, '$.model_hash') FROM fingerprints AS p"
    " JOIN tokenizers AS t ON t.id = p.tokenizer ORDER BY p.opened"
)


def remember_name(state: StoreState, name: str) -> None:
    """Keep the name of the model that the store is open for; on a full disk it is not."""
    key = KEY + state.row_identity.model_hash
    with state.locked(), suppress(DiskFull):
        if state.catalog.get_meta(key) != name:
            state.catalog.set_meta(key, name)


def session_models(state: StoreState, infos: Sequence[SessionInfo]) -> list[str]:
    """The name of the model of each session: of those with rows of its last turn the served one, or else that
    which was served last; where there are none, the last one with its tokenizer. "" where that has no name."""
    served = state.row_identity.model_hash
    with state.locked():
        catalog = state.catalog
        leaves = [info.leaf for info in infos if not info.tokenizer and info.leaf is not None]
        of_rows: dict[int, str] = {}
        for leaf, model in catalog.rows(_OF_ROWS, (str(leaves),)):
            if of_rows.get(leaf) != served:
                of_rows[leaf] = model
        of_tokenizers = dict(catalog.rows(_OF_TOKENIZERS))
        found = [
            of_tokenizers.get(info.tokenizer, "")
            if info.tokenizer
            else of_rows.get(info.leaf or 0, served)
            for info in infos
        ]
        names = {model: _name(catalog, model) for model in {*found}}
    return [names[model] for model in found]


def _name(catalog: Catalog, model: str) -> str:
    return (catalog.get_meta(KEY + model) or "") if model else ""
