"""Clients that do everything a client can do to its sessions, and know what they were told.

What was acknowledged has to be there after any kill; what was not may be there or not, but whole.
"""

from __future__ import annotations

import json
import random
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import requests
from daemon import Daemon

TOKENS_MAX = 260
SESSIONS_MAX = 4
"""Of a client at once."""
N_REPLY = 6
ANSWER_S = 90.0
"""A request that takes longer hangs."""


class Killed(Exception):
    """The daemon ended, or is not there yet."""


@dataclass
class Session:
    """What its client knows of one session."""

    name: str
    ids: list[int] = field(default_factory=list)
    """The current branch, as acknowledged; empty: no turn was."""
    n_turns: int = 0
    """At least so many are stored."""
    title: str = ""
    is_deleted: bool = False
    prompts: list[list[int]] = field(default_factory=list)
    """Of turns that were not acknowledged."""
    titles: list[str] = field(default_factory=list)
    """That were not acknowledged."""
    may_be_deleted: bool = False
    """A deletion was not acknowledged."""
    may_be_back: bool = False
    """It was deleted, and an import was not acknowledged."""
    file: bytes = b""
    filed: tuple[list[int], int, str] = field(default_factory=lambda: ([], 0, ""))
    """An export, and what was acknowledged then: ids, turns and title."""

    def check(self, found: dict[str, Any] | None) -> None:
        """Compare with what the daemon has; that is what counts from now on. found: the session with
        its ids, None: there is none."""
        if found is None:
            may_be_gone = self.is_deleted or self.may_be_deleted or not self.ids
            assert may_be_gone, f"{self.name} is gone"
            self.ids, self.n_turns, self.title = [], 0, ""
            self.is_deleted = self.is_deleted or self.may_be_deleted
        else:
            assert not self.is_deleted or self.may_be_back, f"{self.name} came back"
            if self.is_deleted:
                self.ids, self.n_turns, self.title = self.filed
                self.is_deleted = False
            ids, title = found["ids"], found["session"]["title"]
            is_begun = any(ids[: len(prompt)] == prompt for prompt in self.prompts)
            assert ids == self.ids or is_begun, f"{self.name}: {ids} instead of {self.ids}"
            assert len(found["turns"]) >= self.n_turns, f"{self.name} lost a turn"
            if self.title:  # else its first question stands for one
                assert title in (self.title, *self.titles), f"{self.name} has the title {title}"
            self.title = title if title in self.titles else self.title
            self.ids, self.n_turns = ids, len(found["turns"])
        self.prompts, self.titles = [], []
        self.may_be_deleted = self.may_be_back = False


class MixedClient:
    """One client and its sessions. Its thread alone uses them while it runs."""

    def __init__(self, daemon: Daemon, seed: int, vocabulary: range, model: str = "") -> None:
        """vocabulary: ids of ordinary tokens. model: the one to name to a router; "": none."""
        self.daemon = daemon
        self.random = random.Random(seed)
        self.sessions: list[Session] = []
        self.texts: dict[str, str] = {}
        """Chats whose end arrived, and what they answered."""
        self.bases: dict[str, int] = {}
        """Precached prompts that were acknowledged, and their tokens."""
        self.done: dict[str, int] = {}
        """How often each operation was acknowledged."""
        self._vocabulary = vocabulary
        self._model = model
        self._shared = self._tokens(40)

    # ---- doing ------------------------------------------------------------------------------

    def run(self, is_over: threading.Event) -> None:
        """Do one thing after another until the daemon is gone."""
        while not is_over.is_set():
            try:
                self.step()
            except Killed:
                return

    def step(self) -> None:
        """Do one thing. Raises Killed, and AssertionError for an answer that must not be."""
        alive = [each for each in self.sessions if each.ids and not each.is_deleted]
        if len(alive) < 2:
            self._turn(self._new())
            return
        names, weights = zip(*OPERATIONS.items(), strict=True)
        name = self.random.choices(names, weights)[0]
        session = self.random.choice(alive)
        if getattr(self, f"_{name}")(session) is not False:
            self.done[name] = self.done.get(name, 0) + 1

    def _new(self) -> Session:
        living = [each for each in self.sessions if not each.is_deleted]
        if len(living) >= SESSIONS_MAX:
            return self.random.choice(living)
        self.sessions.append(Session(f"s-{self.random.getrandbits(48):x}"))
        return self.sessions[-1]

    def _begin(self, _: Session) -> None:
        self._turn(self._new())

    def _turn(self, session: Session) -> None:
        """The next message, in a conversation that has become long an edited one."""
        if len(session.ids) > TOKENS_MAX:
            self._edit(session)
            return
        start = session.ids or self._shared[: self.random.choice((0, 20, 40))]
        self._say(session, [*start, *self._tokens(self.random.randint(4, 40))])

    def _edit(self, session: Session) -> None:
        """An earlier message once more, in other words or for another answer."""
        at = self.random.randint(2, max(2, len(session.ids) - 1))
        self._say(session, [*session.ids[:at], *self._tokens(self.random.randint(1, 20))])

    def _say(self, session: Session, prompt: list[int]) -> None:
        streams = self.random.random() < 0.6
        body = {
            "prompt": prompt,
            "n_predict": N_REPLY,
            "temperature": 0,
            "ignore_eos": True,
            "return_tokens": True,
            "stream": streams,
        }
        session.prompts.append(prompt)
        reply = self._send(
            "POST", "/completion", body, headers={"X-Towerd-Session": session.name}, stream=streams
        )
        if reply is None:
            return
        said = self._events(reply) if streams else [reply.json()]
        if said and said[-1].get("stop"):
            tokens = [token for each in said for token in each["tokens"]]
            session.ids, session.n_turns = prompt + tokens, session.n_turns + 1
            session.prompts.clear()

    def _chat(self, _: Session) -> None:
        """A chat of words, whose end is [DONE]."""
        name = f"c-{self.random.getrandbits(48):x}"
        content = f"Say {self.random.getrandbits(32)}"
        body = {
            "messages": [{"role": "user", "content": content}],
            "max_tokens": N_REPLY,
            "stream": True,
        }
        reply = self._send(
            "POST",
            "/v1/chat/completions",
            body,
            headers={"X-Towerd-Session": name},
            stream=True,
        )
        if reply is None:
            return
        text, is_whole = "", False
        for data in self._data(reply):
            is_whole = data == b"[DONE]"
            event = {} if is_whole else json.loads(data)
            for choice in event.get("choices", ()):
                text += choice["delta"].get("content") or ""
        if is_whole:
            self.texts[name] = text

    def _delete(self, session: Session) -> bool:
        session.may_be_deleted = True
        if self._send("DELETE", self._path(session)) is None:
            return False
        session.is_deleted = True
        return True

    def _rename(self, session: Session) -> None:
        title = f"t-{self.random.getrandbits(32):x}"
        session.titles.append(title)
        if self._send("PATCH", self._path(session), {"title": title}) is not None:
            session.title, session.titles = title, []

    def _pin(self, session: Session) -> bool:
        body = {"session": session.name}
        return self._send("POST", "/towerd/v1/pins", body, fine=(200, 409)) is not None

    def _freeze(self, session: Session) -> bool:
        path = self._path(session) + "/freeze"
        return self._send("POST", path, {}, fine=(200, 409)) is not None

    def _thaw(self, session: Session) -> bool:
        return self._send("POST", self._path(session) + "/thaw", {}) is not None

    def _export(self, session: Session) -> bool:
        reply = self._send("GET", self._path(session) + "/export")
        if reply is None or session.prompts or session.titles:
            return False
        session.file, session.filed = reply.content, (session.ids, session.n_turns, session.title)
        return True

    def _import(self, session: Session) -> bool:
        """One that was deleted comes back; one that is here stays as it is."""
        gone = [each for each in self.sessions if each.is_deleted and each.file]
        session = self.random.choice(gone or [session])
        if not session.file:
            return False
        session.may_be_back = session.is_deleted
        path = "/towerd/v1/sessions/import"
        reply = self._send("POST", path, session.file, fine=(200, 400))
        if reply is None:
            return False
        if session.is_deleted:
            assert reply.status_code == 200, reply.text
            session.ids, session.n_turns, session.title = session.filed
            session.is_deleted = False
        return True

    def _search(self, _: Session) -> bool:
        return self._send("GET", "/towerd/v1/search?q=say") is not None

    def _precache(self, _: Session) -> None:
        name = f"b-{self.random.getrandbits(32):x}"
        ids = [*self._shared, *self._tokens(20)]
        if self._send("POST", "/towerd/v1/precache", {"name": name, "prompt": ids}) is not None:
            self.bases[name] = len(ids)

    def _gc(self, _: Session) -> bool:
        return self._send("POST", "/towerd/v1/gc", {}) is not None

    # ---- checking ---------------------------------------------------------------------------

    def check(self) -> None:
        """Everything that was acknowledged is there, and nothing that was deleted."""
        for session in self.sessions:
            reply = self._now("GET", f"{self._path(session)}?ids=1")
            while "while loading" in reply.text:  # its process was killed; the next one is whole
                time.sleep(0.2)
                reply = self._now("GET", f"{self._path(session)}?ids=1")
            assert reply.status_code in (200, 404), reply.text
            session.check(reply.json() if reply.status_code == 200 else None)
        for name, text in self.texts.items():
            reply = self._now("GET", f"/towerd/v1/sessions/{name}?text=1")
            assert reply.status_code == 200, reply.text
            assert text in reply.json()["text"], name
        bases = self._now("GET", "/towerd/v1/bases").json()["bases"]
        found = {base["name"]: base["tokens"] for base in bases}
        assert self.bases.items() <= found.items()

    def next_answer(self, session: Session) -> tuple[list[int], list[int]]:
        """A prompt that continues a session, and its greedy reply."""
        before = len(session.ids)
        self._turn(session)
        assert len(session.ids) > before or session.prompts == []
        return session.ids[:-N_REPLY], session.ids[-N_REPLY:]

    # ---- asking -----------------------------------------------------------------------------

    def _tokens(self, n: int) -> list[int]:
        return self.random.choices(self._vocabulary, k=n)

    def _path(self, session: Session) -> str:
        return f"/towerd/v1/sessions/{session.name}"

    def _send(
        self,
        method: str,
        path: str,
        body: dict[str, Any] | bytes | None = None,
        *,
        fine: tuple[int, ...] = (200,),
        headers: Mapping[str, str] | None = None,
        stream: bool = False,
    ) -> requests.Response | None:
        """The reply; None if it was not ready, or is leaving. Raises Killed."""
        reply: requests.Response = self._guarded(
            lambda: self._now(method, path, body, headers=headers, stream=stream)
        )
        if reply.status_code == 503 or (self._model and reply.status_code == 500):
            return (
                None  # loading or leaving; behind a router also a model's process that was killed
            )
        assert reply.status_code in fine, f"{method} {path}: {reply.status_code} {reply.text}"
        return reply

    def _now(
        self,
        method: str,
        path: str,
        body: dict[str, Any] | bytes | None = None,
        **options: Any,
    ) -> requests.Response:
        if self._model and isinstance(body, dict):
            body = body | {"model": self._model}
        if self._model and path.startswith("/towerd/"):
            path += f"{'&' if '?' in path else '?'}model={self._model}&autoload=1"
        given = {"data": body} if isinstance(body, bytes) else {"json": body}
        return requests.request(
            method, self.daemon.url + path, timeout=ANSWER_S, **given, **options
        )

    def _events(self, reply: requests.Response) -> list[dict[str, Any]]:
        """The events of a stream, up to an error; the last one may be missing."""
        found: list[dict[str, Any]] = []
        for data in self._data(reply):
            event = json.loads(data)
            if "error" in event:
                assert event["error"]["code"] in (500, 503), event
                break
            found.append(event)
        return found

    def _data(self, reply: requests.Response) -> list[bytes]:
        lines: list[bytes] = self._guarded(lambda: list(reply.iter_lines()))
        return [line.removeprefix(b"data: ") for line in lines if line.startswith(b"data: ")]

    def _guarded(self, ask: Callable[[], Any]) -> Any:
        """What asking gives. Raises Killed if the connection ended; a daemon that hangs is an error."""
        try:
            return ask()
        except requests.Timeout as error:
            raise AssertionError("no answer") from error
        except (requests.RequestException, ConnectionError) as error:
            raise Killed from error


OPERATIONS = {
    "turn": 30,
    "begin": 8,
    "edit": 8,
    "chat": 5,
    "delete": 8,
    "rename": 5,
    "pin": 3,
    "freeze": 6,
    "thaw": 4,
    "export": 8,
    "import": 10,
    "search": 3,
    "precache": 2,
    "gc": 3,
}
"""What a client does, and how often."""
