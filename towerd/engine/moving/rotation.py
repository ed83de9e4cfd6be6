"""Rotation: how the keys of the model's rows are rotated, for rows that go to another position."""

from __future__ import annotations

import functools
from collections.abc import Mapping

from towerd.errors import NotSupported
from towerd.model.llama_model import LlamaModel
from towerd.model.rope import Running, read_rope
from towerd.slots.errors import StateError
from towerd.slots.layout import KVLayout
from towerd.slots.rope import Rope
from towerd.slots.row_identity import RowIdentity
from towerd.slots.rows import KVRows
from towerd.slots.shift import check_rope, shift


class Rotation:
    """The RoPE of a served model, read when it is first asked for. Any thread may use it."""

    def __init__(
        self, model: LlamaModel, row_identity: RowIdentity, n_cells: int, why_not: str = ""
    ) -> None:
        """n_cells: what a sequence of the context may have; why_not: why its rows cannot go to another
        position, whatever their rotation"""
        self._model = model
        self._row_identity = row_identity
        self._n_cells = n_cells
        self._why_not = why_not

    @property
    def layout(self) -> KVLayout:
        """The layout of native rows."""
        return self._row_identity.layout

    @property
    def why_not(self) -> str:
        """Why the model's rows cannot go to another position, or "" if they can."""
        found = self._read
        return found if isinstance(found, str) else ""

    def rope(self) -> Rope:
        """The rotation of every layer. Raises NotSupported, with the reason, if rows cannot be moved."""
        found = self._read
        if isinstance(found, str):
            raise NotSupported(f"This model's rows cannot be moved: {found}.")
        return found

    @functools.cached_property
    def _read(self) -> Rope | str:
        """The rotation, or why there is none: the file is not read again at every token."""
        if self._why_not:
            return self._why_not
        try:
            rope = rope_of(self._model, self._row_identity.rope, self._n_cells)
            check_rope(self.layout, rope)
        except StateError as error:
            return str(error)
        return rope

    def moved(self, rows: KVRows, to: int, place: int | None = None) -> KVRows:
        """Native rows of text with the first at index `to`, rotated to position `place` if given. Raises
        NotSupported or StateError."""
        return shift(rows, to, self.rope(), place=place, rot_k=self._row_identity.rot_k)


_KNOWN = ("override.freq_base", "override.freq_scale")
"""The overrides that `towerd.model.rope` knows."""


def rope_of(model: LlamaModel, in_force: Mapping[str, float | str], n_cells: int) -> Rope:
    """The rotation of every layer as a unified context of `n_cells` has it; `in_force`: what
    `LlamaModel.rope` says. Raises StateError."""
    if others := sorted(
        name for name in in_force if name.startswith("override.") and name not in _KNOWN
    ):
        raise StateError(f"flags change how this model computes its rows ({', '.join(others)})")
    running = Running(
        rope_type=int(in_force["type"]),
        n_ctx_seq=n_cells,
        freq_base=float(in_force.get("override.freq_base", 0.0)),
        freq_scale=float(in_force.get("override.freq_scale", 0.0)),
    )
    return read_rope(model.path, running)
