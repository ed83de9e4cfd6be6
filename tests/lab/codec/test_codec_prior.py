"""A table from text to file and back: built small, it helps where its text is coded."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
from fed_predictor import FedPredictor, read_in_python

from towerd.codec.container import CodedChunk
from towerd.codec.forms import training
from towerd.codec.forms.form import Coded
from towerd.codec.forms.mix import MiniText, Mix
from towerd.codec.forms.network import Network
from towerd.codec.prior import file, sample
from towerd.codec.vocabulary import GgufVocabulary
from towerd.kernels.lm import COUNT_ONE, Counts

pytest.importorskip("tokenizers")
from lab.prior import network

I32 = npt.NDArray[np.int32]


def test_build_and_use(tmp_path: Path, small: GgufVocabulary) -> None:
    from lab.prior.build import build
    from lab.train.data.bpe import train_bpe

    text = sample.load()[-60_000:].decode(errors="ignore")
    parts = [text[at : at + 500] for at in range(0, len(text), 500)]
    bpe = train_bpe(parts, 400)
    ids = np.concatenate([np.array(each, np.uint32) for each in bpe.encode(parts)])
    build(bpe, {"sample": ids}, {"sample": 1.0}, tmp_path / "mix.gguf", 0.1)
    prior = file.load(tmp_path / "mix.gguf")
    assert len(prior.ids) == 400
    assert sorted(prior.ids.tolist()) == list(range(400))
    assert prior.ids[prior.ranks].tolist() == list(range(400))
    assert len(prior.controls) == 16
    mix = Mix(small, prior)
    wanted = small.tokenize(text[:2000].encode())
    coded = mix.encode(wanted, wanted[:0])
    assert mix.decode(coded, len(wanted), wanted[:0]).tolist() == wanted.tolist()
    untrained = file.Prior(
        **{**prior.__dict__, "tables": (), "states": {"state": training.untrained(400)}}
    )
    without = Mix(small, untrained).encode(wanted, wanted[:0])
    assert size(coded) < 0.8 * size(without)


class Liar(FedPredictor):
    """A network that is sure of a token that does not come; every fourth time it tells the truth."""

    def __init__(self, ids: list[int], n_tokens: int) -> None:
        super().__init__(n_tokens, 64, 1, b"a liar..")
        self.ids, self.at = ids, 0

    def reset(self) -> None:
        self.at = 0

    def feed(self, tokens: Sequence[tuple[int, int]]) -> list[Counts]:
        found = []
        for _ in tokens:
            counts = np.ones(self.n_tokens, np.uint32)
            token = self.ids[self.at] if self.at < len(self.ids) else 0
            counts[(token + (self.at % 4 > 0)) % self.n_tokens] = COUNT_ONE
            self.at += 1
            found.append(counts)
        return found


def test_a_state_for_a_network(small: GgufVocabulary, monkeypatch: pytest.MonkeyPatch) -> None:
    """Trained with the network, the mixer knows from a text's beginning how far to trust it; the
    form takes that state, and gives back what it was given."""
    read_in_python(monkeypatch)
    prior = file.bundled()
    mini = MiniText(prior)
    text, short = sample.load()[:27_000], sample.load()[30_000:30_400]
    seen, last = np.array_split(mini.symbols(text), 9), mini.symbols(short)

    def liar(ranks: I32) -> Liar:
        return Liar(prior.ids[ranks].tolist(), len(prior.ids))

    learned = prior.states["state"]
    for ranks in seen:
        one = replace(prior, states={"state": learned})
        ((learned, _),) = network.steps(one, liar(ranks), [ranks])
    ids = small.tokenize(short)
    sizes = []
    for states in (prior.states, {**prior.states, "network": learned}):
        coder = Network(small, replace(prior, states=states), liar(last))
        coded = coder.encode(ids, ids[:0])
        assert coder.decode(coded, len(ids), ids[:0]).tolist() == ids.tolist()
        sizes.append(size(coded))
    assert sizes[1] < 0.9 * sizes[0]


def size(coded: Coded) -> int:
    chunks: tuple[CodedChunk, ...] = coded.chunks
    return sum(len(chunk.bits) for chunk in chunks)


def test_names_of_control_tokens_in_text_are_text(small: GgufVocabulary) -> None:
    """llama.cpp takes <|start|> in a text for a token whatever it is told; ours spells it."""
    mix = Mix(small, file.bundled())
    for name in file.bundled().vocabulary.pieces[:16]:
        ids = small.tokenize(b"a " + (name or b"<|begin|>") + b" b")
        coded = mix.encode(ids, ids[:0])
        assert mix.decode(coded, len(ids), ids[:0]).tolist() == ids.tolist()
