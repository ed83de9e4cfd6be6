"""Which small model talks better: the bits by another evaluation, and what is asked and answered."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import zstandard
from click.testing import CliRunner

import towerd
from lab.texts.chat_records import ChatRecord, Message
from lab.train.errors import TrainError
from lab.train.evaluation.talking import (
    N_CTX,
    QUESTIONS,
    SAID_BYTES_MAX,
    bits_per_byte,
    exchanges,
    main,
)
from lab.train.objectives.teacher import Teacher, TeacherForm
from towerd.codec.forms.mini import PATH
from towerd.codec.models.exact import ExactPredictor

BUNDLED = Path(towerd.__file__).parent / "data" / "stories260K.gguf"
ASKED = [
    ("What is the capital of France?", "The capital of France is Paris."),
    ("Tell me a story.", "Once upon a time, there was a little girl named Lily."),
]


def record(source: str, *said: str) -> ChatRecord:
    roles = ("user", "assistant") * len(said)
    return ChatRecord(f"{source}/1", [Message(*each) for each in zip(roles, said, strict=False)])


def test_exchanges_are_short_and_of_every_source() -> None:
    long = "é" * SAID_BYTES_MAX
    found = exchanges(
        [
            record("gpteacher", "1", "a", "2", "b"),
            record("gpteacher", "3", long),
            record("wildbench", "4", "c"),
            record("wildbench", long, "d"),
            record("python", "5", "e"),
            record("wildbench", "6"),
        ]
    )
    assert found == [("1", "a"), ("4", "c"), ("3", "é" * (SAID_BYTES_MAX // 2))]
    with pytest.raises(TrainError, match="no short question"):
        exchanges([record("python", "5", "e")])


def test_bits_by_another_evaluation() -> None:
    """Those of the codec's own kernel, which shares no code with llama.cpp."""
    predictor = ExactPredictor(PATH)
    bits = 0.0
    with Teacher(PATH, N_CTX, n_threads=1) as model:
        for question, said in ASKED:
            prompt = TeacherForm(model).question(question).tolist()
            ids = [*prompt, *model.tokenize(said, special=False)]
            predictor.reset()
            counts = [predictor.feed([(0, id)])[0] for id in ids[:-1]]
            for at in range(len(prompt), len(ids)):
                bits -= float(np.log2(counts[at - 1][ids[at]] / counts[at - 1].sum()))
        found = bits_per_byte(model, ASKED)
    assert found == pytest.approx(bits / sum(len(said) for _, said in ASKED), rel=1e-2)


def test_the_models_of_the_package(tmp_path: Path) -> None:
    """Each expects most what it was trained on, and answers all that it is asked."""
    dev = tmp_path / "dev.jsonl.zst"
    lines = [
        json.dumps(
            {
                "src": "gpteacher/1",
                "messages": [
                    {"role": "user", "content": question},
                    {"role": "assistant", "content": said},
                ],
            }
        )
        + "\n"
        for question, said in ASKED[:1]
    ]
    dev.write_bytes(zstandard.ZstdCompressor().compress("".join(lines).encode()))
    result = CliRunner().invoke(main, [str(dev), str(PATH), str(BUNDLED)])
    assert result.exit_code == 0, result.output
    heads = [line for line in result.output.splitlines() if not line.startswith(" ")]
    bits = {line.split(":")[0]: float(line.split()[1]) for line in heads}
    assert 0 < bits["mini.gguf"] < bits["stories260K.gguf"]
    assert all(result.output.count(f"  {question}\n") == 2 for question in QUESTIONS)
    with Teacher(BUNDLED, N_CTX, n_threads=1) as model:
        assert bits_per_byte(model, ASKED[1:]) < 1.5
