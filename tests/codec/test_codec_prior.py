"""A table from text to file and back: built small, it helps where its text is coded."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from towerd.codec import sample
from towerd.codec.container import Chunk
from towerd.codec.forms import Coded
from towerd.codec.mix import Mix
from towerd.codec.prior import file, state
from towerd.codec.vocabulary import GgufVocabulary

pytest.importorskip("tokenizers")


def test_build_and_use(tmp_path: Path, small: GgufVocabulary) -> None:
    from towerd.codec.prior.build import build
    from towerd.codec.train.bpe import train_bpe

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
        **{**prior.__dict__, "tables": (), "states": {"state": state.untrained(400)}}
    )
    without = Mix(small, untrained).encode(wanted, wanted[:0])
    assert size(coded) < 0.8 * size(without)


def size(coded: Coded) -> int:
    chunks: tuple[Chunk, ...] = coded.chunks
    return sum(len(chunk.bits) for chunk in chunks)


def test_names_of_control_tokens_in_text_are_text(small: GgufVocabulary) -> None:
    """llama.cpp takes <|start|> in a text for a token whatever it is told; ours spells it."""
    mix = Mix(small, file.bundled())
    for name in file.bundled().vocabulary.pieces[:16]:
        ids = small.tokenize(b"a " + (name or b"<|begin|>") + b" b")
        coded = mix.encode(ids, ids[:0])
        assert mix.decode(coded, len(ids), ids[:0]).tolist() == ids.tolist()
