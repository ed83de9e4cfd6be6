"""A small world to train on: two sources of made-up chat with a split, and one without."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from pathlib import Path

import zstandard

WORDS = (
    "the a of to store row tower bit page tree key value query cache slot model token count reads "
    "writes keeps finds drops asks says waits works quickly slowly never often café naïve 数据 día"
).split()
MANIFEST = """
[talk]
origin = "made up"
licence = "Apache-2.0"
kind = "human"
weight = 2
[notes]
origin = "made up"
licence = "MIT"
kind = "code"
weight = 1
[answers]
origin = "made up"
licence = "MIT"
kind = "assistant"
weight = 1
"""


def sentence(chance: random.Random) -> str:
    return " ".join(chance.choices(WORDS, k=chance.randint(3, 12))).capitalize() + "."


def talk(chance: random.Random, number: int) -> dict[str, object]:
    roles = ["user", "assistant"] * chance.randint(1, 3)
    messages = [{"role": role, "content": sentence(chance)} for role in roles]
    return {"src": f"talk/{number}", "messages": messages}


def note(chance: random.Random, number: int) -> dict[str, object]:
    lines = [f"def f{chance.randint(0, 99)}(x):\n    return x + {chance.randint(0, 9)}\n"]
    lines += [f"# {sentence(chance)}\n" for _ in range(chance.randint(1, 4))]
    return {"src": f"notes/{number}", "messages": [{"role": "document", "content": "".join(lines)}]}


def answer(chance: random.Random, number: int) -> dict[str, object]:
    text = " ".join(sentence(chance) for _ in range(4))
    return {
        "src": f"answers/m{number % 3}",
        "messages": [{"role": "assistant", "content": f"Answer {number // 3}. {text}"}],
    }


def write_records(path: Path, records: Sequence[object]) -> None:
    text = "\n".join(json.dumps(record, ensure_ascii=False) for record in records)
    path.write_bytes(zstandard.compress(text.encode()))


def write_world(folder: Path) -> None:
    """train, dev, and a file whose split is made by the program."""
    chance = random.Random(7)
    made = [talk(chance, i) for i in range(300)] + [note(chance, i) for i in range(150)]
    write_records(folder / "train.jsonl.zst", [r for i, r in enumerate(made) if i % 10])
    write_records(folder / "dev.jsonl.zst", made[::10])
    write_records(folder / "more.jsonl.zst", [answer(chance, i) for i in range(300)])
