"""Models with M-RoPE that see pictures: asking one, and what a fresh context makes of the whole prompt."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
from oracle import GREEDY, Answer, Logits, Oracle, token_probs
from services import EmbeddedService

from lab.models.random_gguf import make_random_gguf
from lab.models.shape import Arch, Shape
from lab.models.vision import Kind, grid, make_projector, picture
from towerd.engine.base import Finish, GenerateRequest
from towerd.engine.embedded.calibration.measure import log_softmax
from towerd.media_ids import spans_of
from towerd.tokens import Ids
from towerd.wire import Projector, ProjectorOptions, Reply, Request, Writer

SHAPE = Shape(
    4, 128, 4, 2, 128, 448, n_ctx_train=2048, rope_freq_base=10000.0, ftype="F32", window=48
)
KINDS: dict[Arch, Kind] = {"qwen2vl": "qwen2vl", "qwen3vl": "qwen3vl", "qwen35": "qwen2vl"}
"""The projector of each architecture."""
WIDE, HIGH, SQUARE = (160, 64), (64, 192), (96, 96)
"""Pixels of pictures, which are 5 x 2, 2 x 6 and 3 x 3 tokens."""
Size: TypeAlias = tuple[int, int]
Part: TypeAlias = str | tuple[int, Size]
"""Words, or a picture by its seed and its pixels."""


def make_seeing(folder: Path, arch: Arch) -> tuple[Path, Path]:
    """A model and its projector."""
    model, projector = folder / f"{arch}.gguf", folder / f"{arch}-mmproj.gguf"
    make_random_gguf(model, replace(SHAPE, arch=arch))
    make_projector(projector, SHAPE.n_embd, kind=KINDS[arch])
    return model, projector


def message(*parts: Part) -> dict[str, Any]:
    """A user's message."""
    content: list[Any] = []
    for part in parts:
        if isinstance(part, str):
            content.append({"type": "text", "text": part})
        else:
            url = "data:image/png;base64," + picture(part[0], *part[1])
            content.append({"type": "image_url", "image_url": {"url": url}})
    return {"role": "user", "content": content}


@dataclass(frozen=True)
class Looked:
    """A prompt with pictures, and what was answered."""

    request: GenerateRequest
    sizes: tuple[Size, ...]
    """Of its pictures, in pixels."""
    answer: Answer

    @property
    def ids(self) -> Ids:
        return self.request.ids


def request_of(service: EmbeddedService, *parts: Part, **fields: Any) -> GenerateRequest:
    """A greedy request for what follows these words and pictures."""
    assert service.engine.wire is not None
    marker = json.loads(service.engine.wire.model.props())["media_marker"]
    text = "".join(part if isinstance(part, str) else marker for part in parts)
    data = [picture(part[0], *part[1]) for part in parts if not isinstance(part, str)]
    n_predict = fields.pop("n_predict", 8)
    prompt: Any = {"prompt_string": text, "multimodal_data": data} if data else text
    body = {**GREEDY, "prompt": prompt, "n_predict": n_predict}
    wire = Request(service.engine.wire.model, "completion", json.dumps(body).encode())
    settings: dict[str, Any] = {"media": wire.media(0), "reply": Reply(wire, 0)}
    return GenerateRequest(ids=wire.prompts[0], n_predict=n_predict, **(settings | fields))


async def look(service: EmbeddedService, *parts: Part, **fields: Any) -> Looked:
    """Have a prompt continued to its end."""
    request = request_of(service, *parts, **fields)
    finish = await service.sessions.run_quietly(request)
    assert isinstance(finish, Finish)
    assert request.reply is not None
    said = Writer(request.reply.request).final(request.reply, 0, finish.n_cached, b"")
    probs = token_probs(json.loads(said))
    sizes = tuple(part[1] for part in parts if not isinstance(part, str))
    return Looked(request, sizes, Answer(list(finish.ids), probs, finish, ""))


class SeeingOracle(Oracle):
    """libmtmd's evaluation of a whole prompt in one fresh context."""

    def __init__(self, model: Path, projector: Path, **settings: Any) -> None:
        super().__init__(model, **settings)
        options = ProjectorOptions(
            path=str(projector), digest="", n_threads=1, use_gpu=False, warmup=False
        )
        self._projector = Projector(self.model.address, options.encode())

    def seen(self, looked: Looked) -> Logits:
        """log-softmax for each token of the reply."""
        prompt, reply = looked.ids, looked.answer.ids
        ids = np.concatenate([prompt, np.array(reply[:-1], np.int32)])
        self.clear()
        at = place = 0
        for (start, end), medium, size in zip(
            spans_of(ids), looked.request.media, looked.sizes, strict=True
        ):
            self._text(ids[at:start], place)
            place += start - at
            encoded = self._projector.encode(medium)
            self._projector.decode(self.context.address, medium, encoded, place, 0, None)
            place += max(grid(*size))
            at = end
        n = self._text(ids[at:], place)
        first = len(prompt) - 1 - at
        return np.array([log_softmax(self.context.logits(i)) for i in range(first, n)])

    def difference(self, looked: Looked) -> float:
        """The largest one of the log-probabilities that were answered."""
        return max(
            abs(float(logprob - row[token]))
            for row, each in zip(self.seen(looked), looked.answer.probs, strict=True)
            for token, logprob in {**each.top, each.id: each.logprob}.items()
        )

    def _text(self, ids: Ids, place: int) -> int:
        if len(ids):
            self.context.batch.add(ids, place, 0, logits_last=True, n_last=len(ids))
            self.context.decode()
        return len(ids)


def letters(n: int, seed: int) -> str:
    """A text of `n` tokens."""
    found = np.random.default_rng(seed).choice(list("abcdefghijklmnopqrstuvwxyzABCDEFGH"), n)
    return "".join(found)
