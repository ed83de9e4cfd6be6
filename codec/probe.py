"""Whether a tokenizer still cuts text as it did: the ids of fixed texts, as one hash."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence

import numpy as np

from towerd.tokens import Ids

TEXTS = (
    "The quick brown fox doesn't jump; it's 'tired', isn't it? Naïve café, Straße, Ångström.",
    "Съешь же ещё этих мягких французских булок. Ξεσκεπάζω την ψυχοφθόρα βδελυγμία.",
    "我能吞下玻璃而不伤身体。今日は良い天気ですね、東京へ行きましょう。다람쥐 헌 쳇바퀴에 타고파.",
    "نص حكيم له سر قاطع وذو شأن عظيم. דג סקרן שט בים. ऋषियों को सताने वाले दुष्ट। ภาษาไทยไม่มีช่องว่าง",
    "👩‍👩‍👧‍👦 🏳️‍🌈 👍🏽 ❤️ 🇩🇪 e\u0301 ﷽ \u200b\u00a0\ufeff 𝔘𝔫𝔦",
    'def f(x: int) -> str:\n\treturn f"{x!r:>8}"  # later\n\nfor (i=0; i<n; ++i) { a[i] += 0x1F; }\r\n',
    "0 1 12 123 1234 12345 3.14159 1,000,000 -7 2026-11-25T23:59:59Z v1.2.3 5e-324 ½ ²",
    "a b  c   d    e     f      \n\n\n \n\t\t\t \r\n  \n" + " " * 64 + "." + "\n" * 9,
    "<s></s> <|im_start|>user <|im_end|> [INST] <bos> <0x41> <unk> <|endoftext|> ▁x Ġy </think>",
    "https://example.org/a?b=c&d=%20#e user@example.com C:\\dir\\file $HOME ---===*** aaaaaaaaaaaaaaaa",
)
"""Many scripts, joined emoji, code, numbers, runs of spaces and what looks like control tokens."""


def probe(tokenize: Callable[[bytes], Sequence[int] | Ids]) -> str:
    """32 hex digits of the ids that `tokenize` gives for TEXTS."""
    digest = hashlib.blake2b(digest_size=16)
    for text in TEXTS:
        ids = np.asarray(tokenize(text.encode()), "<i4")
        digest.update(len(ids).to_bytes(4, "little") + ids.tobytes())
    return digest.hexdigest()
