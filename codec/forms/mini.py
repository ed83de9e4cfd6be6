"""The form `network` with the mini model of the package, or with a model of the user's, such as a
student of `towerctl train distill`.

A model of the bundled table's tokens is mixed with that table. Any other is mixed with what was seen
in the session, from a start that is derived from the bundled sample.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from towerd.codec.base import TokenVocabulary
from towerd.codec.errors import UnknownModel
from towerd.codec.forms.network import Network
from towerd.codec.forms.start import MixStart, derive, make_prior
from towerd.codec.models.exact import ExactPredictor
from towerd.codec.models.marks import MarkedVocabulary
from towerd.codec.models.weights import load_weights
from towerd.codec.prior import file
from towerd.codec.prior.file import Prior
from towerd.codec.vocabulary import GgufVocabulary

PATH = Path(__file__).resolve().parent.parent / "data" / "mini.gguf"
"""The model in the package, which may be absent."""
FindStart = Callable[[bytes, int, int], MixStart | None]
"""What was derived earlier for a model, by its name, its context and the tokens with its marks."""


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


class Student(Network):
    """The `FormCoder` of `network` with the model in `path`. `start`: what its mixer starts from;
    None if that is the bundled table."""

    def __init__(
        self, vocabulary: TokenVocabulary, path: Path, find: FindStart | None = None
    ) -> None:
        """`find`: looks for a start, which is derived if there is none, in some seconds.

        UnknownModel if the file cannot be evaluated here, or its tokenizer cannot spell a text."""
        self.path = path
        self.start: MixStart | None = None
        if has_tokens_of(path, file.bundled()):
            super().__init__(vocabulary, file.bundled(), ExactPredictor(path))
            return
        words = MarkedVocabulary(path)
        try:
            predictor = ExactPredictor(path, vocabulary=words)
        except UnknownModel:
            words.close()
            raise
        key = predictor.name, predictor.n_ctx, predictor.n_tokens
        found = find(*key) if find is not None else None
        self.start = found or derive(words, words.marks, predictor)
        super().__init__(vocabulary, make_prior(words, words.marks, self.start), predictor)


def check_student(path: Path) -> None:
    """UnknownModel, in one sentence, unless `Student` can evaluate the file."""
    n_tokens = load_weights(path).shape.n_vocab
    if not has_tokens_of(path, file.bundled()):
        words = MarkedVocabulary(path)
        words.close()
        if words.n_own != n_tokens:
            raise UnknownModel(f"{path} has {n_tokens} tokens and its tokenizer {words.n_own}.")
