"""towerd and its llama-server killed together, under load and with few slots: whatever a client
saw the end of is there afterwards, and continues with the words that llama-server alone would
say."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import requests
from daemon import Daemon

MakeDaemon = Callable[..., Daemon]
CHATS = 5
KILLS = 2
TURNS_BEFORE_KILL = (8, 14)
N_PREDICT = 10
TOKENS_MAX = 700
TIE = 0.02
"""Of log-probability; llama.cpp's own noise on this model stays below."""
GREEDY: dict[str, Any] = {
    "n_predict": N_PREDICT,
    "temperature": 0,
    "ignore_eos": True,
    "return_tokens": True,
}


@dataclass
class Chat:
    """One conversation: what its client saw the end of."""

    name: str
    rng: np.random.Generator
    ids: list[int] = field(default_factory=list)
    replies: list[tuple[list[int], list[int]]] = field(default_factory=list)
    """(prompt, reply) of every turn."""

    def ask(self, url: str) -> bool:
        """One streamed turn; whether it came to its end."""
        n = 8 if self.ids else 60
        prompt = self.ids + self.rng.integers(260, 500, n).tolist()
        reply: list[int] = []
        ended = False
        body = {"prompt": prompt, "stream": True, **GREEDY}
        headers = {"X-Towerd-Session": self.name}
        try:
            with requests.post(
                url + "/completion", json=body, headers=headers, stream=True, timeout=60
            ) as stream:
                for line in stream.iter_lines(chunk_size=1):
                    if line.startswith(b"data: "):
                        event = json.loads(line[6:])
                        reply += event.get("tokens", ())
                        ended = event.get("stop", False)
        except requests.RequestException:
            return False
        if ended:
            self.ids = prompt + reply
            self.replies.append((prompt, reply))
        return ended


def talk(chat: Chat, url: str) -> None:
    """Turn after turn, until one does not come to its end."""
    while len(chat.ids) < TOKENS_MAX and chat.ask(url):
        pass


def run_and_kill(daemon: Daemon, chats: list[Chat], n_turns: int) -> None:
    """All chats talk at once; after so many turns everything is killed."""
    done_before = sum(len(chat.replies) for chat in chats)
    threads = [threading.Thread(target=talk, args=(chat, daemon.url)) for chat in chats]
    for thread in threads:
        thread.start()
    while sum(len(chat.replies) for chat in chats) < done_before + n_turns:
        assert any(thread.is_alive() for thread in threads)
        time.sleep(0.001)
    daemon.kill_both()
    for thread in threads:
        thread.join()


def check_reply(alone: str, prompt: list[int], reply: list[int]) -> None:
    """llama-server alone says the same, but where two tokens are all but equally likely."""
    body = {"prompt": prompt, "cache_prompt": False, "n_probs": 2, **GREEDY}
    said = requests.post(alone + "/completion", json=body, timeout=60).json()
    differ = [i for i in range(N_PREDICT) if said["tokens"][i] != reply[i]]
    if differ:
        first, second = said["completion_probabilities"][differ[0]]["top_logprobs"]
        assert first["logprob"] - second["logprob"] < TIE, (said["tokens"], reply)


def test_what_was_acknowledged_is_there(make_sidecar: MakeDaemon, alone: str) -> None:
    """Killed twice; every session holds at least what its client saw, in the store too."""
    daemon = make_sidecar("--log-level", "warning")
    chats = [Chat(f"chat-{i}", np.random.default_rng(i)) for i in range(CHATS)]
    for kill in range(KILLS):
        daemon.start()
        for chat in chats:
            if chat.ids:
                assert daemon.session_ids(chat.name)[: len(chat.ids)] == chat.ids
        run_and_kill(daemon, chats, TURNS_BEFORE_KILL[kill])
    with daemon.stored() as store:
        names = {info.id for info in store.sessions()}
        assert names >= {chat.name for chat in chats if chat.ids}
    daemon.start()
    for chat in chats:
        assert chat.ask(daemon.url)
        assert daemon.session_ids(chat.name) == chat.ids
    assert daemon.get("/towerd/v1/stats")["engine"]["restores_missed"] == 0
    for chat in chats:
        for prompt, reply in chat.replies:
            check_reply(alone, prompt, reply)
