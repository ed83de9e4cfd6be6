"""The form `network` with a model of the user's, such as a student of `towerctl train distill`.

A model of the bundled table's tokens is mixed with that table, like the mini model. Any other is
mixed with what was seen in the session, from a start that is derived from the bundled sample.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from towerd.codec.base import TokenVocabulary
from towerd.codec.errors import UnknownModel
from towerd.codec.models.exact import ExactPredictor
from towerd.codec.models.marks import MarkedPredictor, MarkedVocabulary
from towerd.codec.models.mini import has_tokens_of
from towerd.codec.models.weights import load_weights
from towerd.codec.network import Network
from towerd.codec.prior import file
from towerd.codec.prior.start import MixStart, derive, make_prior

FindStart = Callable[[bytes, int, int], MixStart | None]
"""What was derived earlier for a model, by its name, its context and the tokens with its marks."""


class Student(Network):
    """The `FormCoder` of `network` with the model in `path`. `start`: what its mixer starts from;
    None if that is the bundled table."""

    def __init__(
        self, vocabulary: TokenVocabulary, path: Path, find: FindStart | None = None
    ) -> None:
        """`find`: looks for a start, which is derived if there is none, in some seconds.

        UnknownModel if the file cannot be evaluated here, or its tokenizer cannot spell a text."""
        self.path = path
        own = ExactPredictor(path)
        self.start: MixStart | None = None
        if has_tokens_of(path, file.bundled()):
            super().__init__(vocabulary, file.bundled(), own)
            return
        words = MarkedVocabulary(path)
        predictor = MarkedPredictor(own, words)
        found = find(own.name, own.n_ctx, predictor.n_tokens) if find is not None else None
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
