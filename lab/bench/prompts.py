"""What a benchmark's session is: random token ids, or a picture and random letters behind it."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import aiohttp
import numpy as np

from lab.models.vision import MERGE, Tower, picture
from towerd.cli.bench.harness.models import random_prompt, vocab_size

Prompt: TypeAlias = Sequence[int] | Mapping[str, Any]
"""As POST /completion takes it."""
_LETTERS = list("abcdefghijklmnopqrstuvwxyz")


@dataclass(frozen=True, slots=True)
class SessionPrompt:
    """The prompt of a session, and token ids that share nothing with it."""

    ids: list[int]
    """Of a prompt without a picture."""
    picture: str = ""
    """A PNG in base64; empty: there is none."""
    text: str = ""
    """Behind the picture, a token a letter."""

    async def whole(self, session: aiohttp.ClientSession, url: str) -> Prompt:
        """All of it, for the server at `url`."""
        return await self._first(session, url, 0)

    async def stored(self, session: aiohttp.ClientSession, url: str) -> Prompt:
        """All but its last token."""
        return await self._first(session, url, 1)

    @property
    def other(self) -> list[int]:
        """A short prompt to warm up with."""
        return self.ids[-1:] + self.ids[:31]

    async def _first(self, session: aiohttp.ClientSession, url: str, n_less: int) -> Prompt:
        if not self.picture:
            return self.ids[: len(self.ids) - n_less]
        async with session.get(f"{url}/props") as reply:  # another one after each start
            marker = (await reply.json())["media_marker"]
        text = marker + self.text[: len(self.text) - n_less]
        return {"prompt_string": text, "multimodal_data": [self.picture]}


def text_prompt(model: Path, tokens: int) -> SessionPrompt:
    """`tokens` token ids and one more."""
    ids = random_prompt(np.random.default_rng(1), tokens + 1, vocab_size(model))
    return SessionPrompt(ids.tolist())


def picture_prompt(model: Path, tokens: int, tower: Tower) -> SessionPrompt:
    """A square picture for Qwen-VL, of half of `tokens`, and letters for the rest and one more."""
    side = max(3, math.isqrt(tokens // 2))
    pixels = side * tower.patch * MERGE
    rng = np.random.default_rng(1)
    text = "".join(rng.choice(_LETTERS, max(1, tokens + 1 - side**2)))
    return SessionPrompt(text_prompt(model, 64).ids, picture(1, pixels, pixels), text)
