"""Texts under a budget: the reference's model, with a policy that drops and brings back.

`by_head` is what the papers do: a policy of its own for each KV head of each layer. Else one policy
decides for all heads at once, from attention averaged over them, as the engine has to.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from towerd.retention.base import Retention, RetentionConfig, View
from towerd.retention.factory import open_retention
from towerd.retention.icecache import IceCacheConfig
from towerd.retention.reference.llama import Llama

MESSAGE_TOKENS = 32
"""Plain text has no messages; policies that want some get runs of this length."""


@dataclass(frozen=True, slots=True)
class _Place:
    """The heads that one policy decides for, in one text."""

    text: int
    layers: slice
    kv_heads: slice
    heads: slice


class Chats:
    """Some texts of equal length, each token of which sees at most `budget` live ones.

    Before tokens are evaluated room is made for them, so a call takes at most as many tokens as
    the policy leaves room for. Raises ValueError.
    """

    def __init__(
        self,
        model: Llama,
        batch: int,
        n_positions: int,
        config: RetentionConfig | None,
        budget: int,
        *,
        by_head: bool = False,
    ) -> None:
        """`config` None: nothing is ever dropped."""
        self._model, self._budget = model, budget
        self._cache = model.cache(batch, n_positions)
        self._policies: list[tuple[_Place, Retention]] = []
        if config is not None:
            for place in _places(model, batch, by_head=by_head):
                policy = open_retention(_for_place(config, by_head=by_head))
                self._policies.append((place, policy))

    @property
    def n_live_max(self) -> int:
        """Positions that any head of any text sees now."""
        return int(self._cache.live.sum(-1).max())

    def read(self, ids: Tensor) -> Tensor:
        """Logits [batch, n, vocab] of the next tokens [batch, n]; what they looked for decides
        what stays for those after them."""
        self._make_room(ids.shape[1])
        return self._model.evaluate(ids, self._cache)

    def ask(self, ids: Tensor) -> Tensor:
        """The same, but a policy that can recall lets the tokens see what they look for: they are
        evaluated once to know their queries, and again after the recall."""
        self._make_room(ids.shape[1])
        if not any(policy.can_recall for _, policy in self._policies):
            return self._model.evaluate(ids, self._cache)
        before = self._cache.copy()
        self._model.evaluate(ids, self._cache)
        before.queries = self._cache.queries
        self._cache = before
        self._make_room(ids.shape[1])
        return self._model.evaluate(ids, self._cache)

    def _make_room(self, n_new: int) -> None:
        """For `n_new` tokens; a policy that can recall chooses anew each time."""
        room = self._budget - n_new
        n_live = self._cache.live.sum(-1)
        for place, policy in self._policies:
            n_here = int(n_live[place.layers, place.text, place.kv_heads].max())
            if n_here > room or (policy.can_recall and self._cache.n > room):
                self._drop(place, policy, room)

    def _drop(self, place: _Place, policy: Retention, room: int) -> None:
        """Ask the policy, and let these heads see what it keeps."""
        cache, n = self._cache, self._cache.n
        live = cache.live[place.layers, place.text, place.kv_heads, :n]
        is_live = live[0, 0].numpy().copy()
        shown = np.arange(n) if policy.can_recall else np.flatnonzero(is_live)
        heads = (place.layers, place.text, place.heads)
        view = View(
            shown.astype(np.int64),
            n,
            mass=cache.mass[heads][..., :n].mean((0, 1)).numpy()[shown],
            recent=cache.recent[heads][..., :n].mean((0, 1)).numpy()[shown],
            messages=(shown // MESSAGE_TOKENS).astype(np.int64),
            keys=cache.keys[place.layers, place.text, place.kv_heads, :n].numpy()[:, :, shown],
            queries=cache.queries[heads].numpy(),
            live=is_live[shown],
        )
        kept = torch.from_numpy(policy.keep(view, room))
        live[...] = False
        live[..., kept] = True


def surprises(chats: Chats, ids: Tensor, step: int) -> Tensor:
    """Nats [batch, n - 1] that each token of ids [batch, n] after the first costs, when `step`
    tokens are read at once."""
    costs = []
    n = ids.shape[1]
    for first in range(0, n - 1, step):
        part = ids[:, first : min(first + step, n - 1)]
        logits = chats.read(part)
        wanted = ids[:, first + 1 : first + 1 + part.shape[1]]
        costs.append(F.cross_entropy(logits.transpose(1, 2), wanted, reduction="none"))
    return torch.cat(costs, 1)


def answers(chats: Chats, text: Tensor, question: Tensor, answer: Tensor, step: int) -> Tensor:
    """bool [batch]: whether the greedy answer is `answer` [batch, m] after `text` [batch, n], read
    `step` tokens at a time, and `question` [batch, k]. What the model would say is fed to it
    as long as it is right; afterwards it does not matter."""
    for first in range(0, text.shape[1], step):
        chats.read(text[:, first : first + step])
    said = chats.ask(question)[:, -1].argmax(-1)
    is_right = said == answer[:, 0]
    for i in range(1, answer.shape[1]):
        said = chats.ask(answer[:, i - 1 : i])[:, -1].argmax(-1)
        is_right &= said == answer[:, i]
    return is_right


def _places(model: Llama, batch: int, *, by_head: bool) -> Iterator[_Place]:
    s = model.shape
    for text in range(batch):
        if not by_head:
            yield _Place(text, slice(None), slice(None), slice(None))
            continue
        for layer in range(s.n_layer):
            for head in range(s.n_head_kv):
                heads = slice(head * s.group, (head + 1) * s.group)
                yield _Place(text, slice(layer, layer + 1), slice(head, head + 1), heads)


def _for_place(config: RetentionConfig, *, by_head: bool) -> RetentionConfig:
    """A head that decides for itself has a tree, whatever layer it is in."""
    if by_head and isinstance(config, IceCacheConfig):
        return replace(config, layer_first=0, layer_step=1)
    return config
