"""The form `network` with the mini model of the package."""

from __future__ import annotations

from pathlib import Path

from towerd.codec.base import TokenVocabulary
from towerd.codec.errors import UnknownModel
from towerd.codec.models.exact import ExactPredictor
from towerd.codec.network import Network
from towerd.codec.prior import file
from towerd.codec.prior.file import Prior
from towerd.codec.vocabulary import GgufVocabulary

PATH = Path(__file__).resolve().parent.parent / "data" / "mini.gguf"
"""The model in the package, which may be absent."""


def mini_network(
    vocabulary: TokenVocabulary, path: Path, prior: Prior | None = None, n_threads: int = 1
) -> Network:
    """The form `network` for M's vocabulary, with the mini model in `path` and a table (default:
    the one in the package).

    UnknownModel if the file is not such a model, or was trained with another tokenizer than the
    table."""
    prior = file.bundled() if prior is None else prior
    if not has_tokens_of(path, prior):
        raise UnknownModel(
            f"{path} has other tokens than the table: build the table with the "
            "tokenizer of that model (python -m lab.prior.build)."
        )
    return Network(vocabulary, prior, ExactPredictor(path, n_threads=n_threads))


def has_tokens_of(path: Path, prior: Prior) -> bool:
    """Whether a GGUF has the tokens of a table. UnknownModel if it has no tokenizer."""
    with GgufVocabulary(path) as mini:
        pieces = [b"" if i in prior.controls else piece for i, piece in enumerate(mini.pieces)]
    return pieces == list(prior.pieces)
