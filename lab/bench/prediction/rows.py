"""Rows of a text with their tokens: what predictions are fitted on and measured on."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import numpy.typing as npt
import psutil

from towerd.engine.embedded.calibration.scratch import BatchShape, Scratch
from towerd.engine.embedded.context.context import LlamaContext
from towerd.engine.embedded.context.core import flash_attention
from towerd.engine.embedded.context.memory import SequenceMemory, WindowMemory, open_memory
from towerd.engine.moving.rotation import rope_of
from towerd.errors import NotSupported
from towerd.kernels import dispatch
from towerd.model.llama_model import LlamaModel
from towerd.model.row_memory import row_memory
from towerd.model.vocab import Vocab
from towerd.settings.sources import load
from towerd.slots.layout import KVLayout
from towerd.slots.rope import Rope
from towerd.slots.rows import KVRows
from towerd.slots.shift import unrotated
from towerd.tiers.shrink import SINKS
from towerd.tokens import Ids

PASSAGE_TOKENS = 512
"""Tokens that are evaluated together: as many as the smallest sliding window in use."""
TOKENS_BEFORE = 3
"""Tokens before a row's own that predictions may know."""

Floats = npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True, eq=False)
class TextRows:
    """Un-rotated native rows of the passages of a text, without the first ones of each.

    ids: int32[n, 1 + TOKENS_BEFORE]: of each row its token and those before it, nearest first
    planes: of `layout.planes` float16[n, n_elements]
    follows: bool[n]: whether the row before is that of the token before"""

    layout: KVLayout
    ids: Ids
    planes: tuple[npt.NDArray[np.float16], ...]
    follows: npt.NDArray[np.bool_]

    def __len__(self) -> int:
        return len(self.ids)

    def plane(self, i: int) -> Floats:
        """float32[n, n_elements]."""
        return self.planes[i].astype(np.float32)

    def part(self, begin: int, end: int) -> TextRows:
        """Rows [begin, end)."""
        planes = tuple(plane[begin:end] for plane in self.planes)
        return replace(
            self, ids=self.ids[begin:end], planes=planes, follows=self.follows[begin:end]
        )


class TextEvaluator:
    """A model with a context of its own. Raises NotSupported for one without rows."""

    def __init__(self, path: Path) -> None:
        config = load({"model": str(path)})
        self.model = LlamaModel(path, config)
        rows = row_memory(self.model, config, psutil.virtual_memory().total)
        attention = flash_attention(
            config, rows, n_head=self.model.n_head, n_cells=2 * PASSAGE_TOKENS
        )
        config = replace(config, flash_attn=attention)
        self._context = LlamaContext(self.model, config, n_cells=2 * PASSAGE_TOKENS, n_seqs=2)
        memory = open_memory(self._context, self.model)
        if type(memory) not in (SequenceMemory, WindowMemory):
            raise NotSupported("This model has no rows of every position.")
        self._scratch = Scratch(
            self._context, 0, window=self.model.n_swa if type(memory) is WindowMemory else 0
        )
        self.vocab = Vocab(self.model.ptr)
        self.rope: Rope = rope_of(self.model, self.model.rope(config), PASSAGE_TOKENS)

    def close(self) -> None:
        self._context.close()
        self.model.close()

    def evaluated(self, ids: Ids, width: int = PASSAGE_TOKENS) -> KVRows:
        """Native rows of at most PASSAGE_TOKENS tokens, evaluated `width` at a time."""
        shape = BatchShape("", width)
        rows = self._scratch.evaluate(None, 0, ids, logits=False, rows=True, shape=shape).rows
        assert rows is not None
        return rows

    def rows(self, text: str, n_tokens: int) -> TextRows:
        """Of the first tokens of a text."""
        ids = self.vocab.tokenize(text, False, False)[:n_tokens]
        head = [self.vocab.bos_id] if self.vocab.add_bos else []
        step = PASSAGE_TOKENS - len(head)
        passages = [
            np.array([*head, *ids[at : at + step]], np.int32) for at in range(0, len(ids), step)
        ]
        passages = [passage for passage in passages if len(passage) > SINKS]
        parts = [
            unrotated(self.evaluated(passage), self.rope).slice(SINKS, len(passage))
            for passage in passages
        ]
        n_planes = len(parts[0].layout.planes)
        planes = tuple(
            np.concatenate([_halves(rows, i) for rows in parts]) for i in range(n_planes)
        )
        known = [
            np.stack([p[SINKS - k : len(p) - k] for k in range(1 + TOKENS_BEFORE)], 1)
            for p in passages
        ]
        follows = [np.arange(len(rows)) > 0 for rows in parts]
        return TextRows(parts[0].layout, np.concatenate(known), planes, np.concatenate(follows))


def _halves(rows: KVRows, i: int) -> npt.NDArray[np.float16]:
    name = rows.layout.planes[i].format.name
    return dispatch.transcoded(rows.plane(i), name, "f16").view(np.float16)
