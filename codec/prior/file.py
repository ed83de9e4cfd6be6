"""The prior on disk: a GGUF with a tokenizer, without a model, and the tables as tensors.

    mix.weights  int32[n]            how often each token occurs, in order of rank
    mix.index.k  int32, mix.data.k  int16   the table of order k (`lab/prior/tables.py`)
    mix.state    int32               maps and weights (`forms/training.py`)
    mix.network  int32               the same for use with the mini model, if it was trained

Unsigned numbers are stored in signed tensors of the same size, as GGUF has no
unsigned ones. The rank of a token is its place among all pieces in order of their bytes; control
tokens come last.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
from gguf import GGUFReader, TokenType

from towerd.codec.base import TokenVocabulary
from towerd.codec.errors import UnknownModel
from towerd.codec.vocabulary import GgufVocabulary
from towerd.kernels._native import Mixer
from towerd.kernels.mixing import BREAK, OPENING

PATH = Path(__file__).resolve().parent.parent / "data" / "mix.gguf"
START = 1
"""The control token that starts a message (`lab/train/data/bpe.py`)."""
U8 = npt.NDArray[np.uint8]
U16 = npt.NDArray[np.uint16]
U32 = npt.NDArray[np.uint32]
I32 = npt.NDArray[np.int32]


def ranks_of(pieces: Sequence[bytes]) -> I32:
    """int32[n]: the rank of each token."""
    order = sorted(range(len(pieces)), key=lambda i: (not pieces[i], pieces[i], i))
    ranks = np.empty(len(pieces), np.int32)
    ranks[order] = np.arange(len(pieces), dtype=np.int32)
    return ranks


def kinds_of(pieces: Sequence[bytes], opening: int | None = None) -> U8:
    """uint8[n]: the mixer's kind of each token with these bytes; `opening`: the id of the mark that
    opens a message."""
    kinds = np.array([BREAK if b"\n" in piece else 0 for piece in pieces], np.uint8)
    if opening is not None:
        kinds[opening] = OPENING
    return kinds[np.argsort(ranks_of(pieces))]


@dataclass(frozen=True)
class Prior:
    """Everything that `mix` starts from. `ranks` maps ids to ranks, `ids` back; `pieces` are the
    bytes of each token, b"" for control tokens."""

    vocabulary: TokenVocabulary
    pieces: Sequence[bytes]
    name: bytes
    ranks: I32
    ids: I32
    controls: tuple[int, ...]
    """Ids of the control tokens, in order."""
    kinds: U8
    """The mixer's kind of each rank."""
    weights: U32
    tables: tuple[tuple[U32, U16], ...]
    states: Mapping[str, U32]

    def mixer(self, state: str = "state") -> Mixer:
        """A new mixer; `state` "network": the one trained for use with the mini model."""
        return Mixer(self.weights, self.tables, self.states[state], self.kinds)


def name_of(data: bytes) -> bytes:
    """The 8 bytes that name a file with these bytes: a table or a model."""
    return hashlib.blake2b(data, digest_size=8).digest()


@functools.cache
def bundled() -> Prior:
    """The prior in the package. UnknownModel if it was left out."""
    if not PATH.exists():
        raise UnknownModel(f"The table {PATH.name} is missing: install towerd again.")
    return load(PATH)


def load(path: Path) -> Prior:
    """Read a prior; the tables stay memory-mapped. UnknownModel if the file is not one."""
    try:
        reader = GGUFReader(path)
        types = reader.fields["tokenizer.ggml.token_type"].contents()
        tensors = {tensor.name: tensor.data for tensor in reader.tensors}
        weights = tensors["mix.weights"].view(np.uint32)
        tables = tuple(
            (tensors[f"mix.index.{k}"].view(np.uint32), tensors[f"mix.data.{k}"].view(np.uint16))
            for k in range(1, 1 + sum(name.startswith("mix.index.") for name in tensors))
        )
        states = {
            name: tensors[f"mix.{name}"].view(np.uint32)
            for name in ("state", "network")
            if f"mix.{name}" in tensors
        }
    except (OSError, KeyError, ValueError) as error:
        raise UnknownModel(f"{path} is not a table of this codec: {error}.") from error
    vocabulary = GgufVocabulary(path)
    # The file says which tokens are control tokens: llama.cpp takes some of their names for text.
    controls = tuple(i for i, kind in enumerate(types) if kind == TokenType.CONTROL)
    pieces = [b"" if i in controls else piece for i, piece in enumerate(vocabulary.pieces)]
    ranks = ranks_of(pieces)
    name = name_of(path.read_bytes())
    ids = np.argsort(ranks).astype(np.int32)
    kinds = kinds_of(pieces, controls[START])
    return Prior(vocabulary, pieces, name, ranks, ids, controls, kinds, weights, tables, states)
