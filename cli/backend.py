"""What towerctl asks, over HTTP: a daemon, or this process's own application over a store."""

from __future__ import annotations

import http.client
import json
import socket as sockets
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, TypeAlias
from urllib.parse import quote, urlencode, urlsplit

from towerd.errors import ConfigError, NotFound, TowerdError

Json: TypeAlias = dict[str, Any]
OnBytes: TypeAlias = Callable[[int, int], None]
"""Called with (bytes done, bytes in total)."""

PAGE_MAX = 1000
"""Entries that one listing gives at most."""
TIMEOUT_S = 60.0
OWN = "/towerd/v1"


class RemoteError(TowerdError):
    """What the daemon answered instead of a result; `status` is its HTTP status."""

    def __init__(self, message: str, status: int) -> None:
        super().__init__(message)
        self.status = status


class Backend:
    """Asks for /towerd/v1 and what else a daemon has. Every method raises TowerdError."""

    def __init__(
        self,
        connection: http.client.HTTPConnection,
        where: str,
        key: str | None = None,
        *,
        has_model: bool = True,
    ) -> None:
        self.where = where
        """For people: the address or directory that answers."""
        self.has_model = has_model
        """Whether it can say the text of tokens."""
        self._connection = connection
        self._headers = {"Content-Type": "application/json"}
        if key is not None:
            self._headers["Authorization"] = f"Bearer {key}"

    @classmethod
    def at_socket(cls, path: Path, where: str | None = None, *, has_model: bool = True) -> Backend:
        """What listens on a Unix socket; its owner needs no key. `where`: other words for it."""
        return cls(_UnixConnection(path), where or str(path), has_model=has_model)

    @classmethod
    def at_url(cls, url: str, key: str | None) -> Backend:
        """The daemon at http(s)://host[:port]. Raises ConfigError."""
        kinds = {"http": http.client.HTTPConnection, "https": http.client.HTTPSConnection}
        try:
            parts = urlsplit(url)
            host, port = parts.hostname, parts.port
        except ValueError:
            host, port, parts = None, None, urlsplit("")
        if parts.scheme not in kinds or not host or parts.path.strip("/"):
            raise ConfigError(f"--url must be like http://127.0.0.1:8080, not {url!r}.")
        if key is not None and not (key.isascii() and key.isprintable()):
            raise ConfigError("--api-key must be printable ASCII text.")
        return cls(kinds[parts.scheme](host, port, timeout=TIMEOUT_S), url, key)

    def __enter__(self) -> Backend:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Hang up."""
        self._connection.close()

    # --- sessions and segments ------------------------------------------------------------

    def sessions(self, limit: int, scope: str | None = None) -> list[Json]:
        """The sessions used last first."""
        found: list[Json] = self._get(f"{OWN}/sessions", limit=limit, scope=scope)["sessions"]
        return found

    def session(self, id: str, scope: str | None = None, *, text: bool = False) -> Json:
        """`session`, `turns`, `text` (that of the current branch, or None) and `kept`: what is
        live of a chat with a budget, or None."""
        # Who looks does not go on.
        query = {"scope": scope, "text": int(text), "kept": int(self.has_model), "thaw": 0}
        found = self._get(f"{OWN}/sessions/{_name(id)}", **query)
        return {"text": None, "kept": None, **found}

    def delete_session(self, id: str, scope: str | None = None) -> None:
        self._ask("DELETE", f"{OWN}/sessions/{_name(id)}", query={"scope": scope})

    def freeze_session(self, id: str, scope: str | None = None) -> Json:
        """Keep a session as coded text: `session`, and `changed`: it was not frozen yet."""
        path = f"{OWN}/sessions/{_name(id)}/freeze"
        return self._ask("POST", path, {}, {"scope": scope}, timeout_s=None)

    def thaw_session(self, id: str, scope: str | None = None) -> Json:
        """Get a frozen session's tokens back: `session`, and `changed`: it was frozen."""
        path = f"{OWN}/sessions/{_name(id)}/thaw"
        return self._ask("POST", path, {}, {"scope": scope}, timeout_s=None)

    def idle_sessions(self, idle_s: int, limit: int, scope: str | None = None) -> list[Json]:
        """Sessions that can be frozen and were not used for `idle_s`, the longest unused first."""
        query = {"limit": limit, "scope": scope, "idle_s": idle_s}
        found: list[Json] = self._get(f"{OWN}/sessions", **query)["sessions"]
        return found

    def export_session(self, id: str, scope: str | None = None) -> bytes:
        """The session as a `.tower` file."""
        query = {"scope": scope} if scope is not None else {}
        path = f"{OWN}/sessions/{_name(id)}/export?{urlencode(query)}"
        reply = self._send("GET", path, None, None)
        try:
            data = reply.read()
        except (OSError, http.client.HTTPException) as error:
            raise self._broken(error) from error
        if reply.headers.get_content_type() == "application/octet-stream":
            return data
        self._decode(reply, data)
        raise self._broken("it sent no file")

    def import_session(self, data: bytes, scope: str | None = None) -> Json:
        """Enter the session of a `.tower` file: `session`, `added` (turns) and `bases`."""
        return self._ask("POST", f"{OWN}/sessions/import", data, {"scope": scope}, timeout_s=None)

    def segments(self, sort: str, limit: int, offset: int = 0, scope: str | None = None) -> Json:
        """`segments`, sorted by used, tokens, hits or id, and `total`."""
        return self._get(f"{OWN}/segments", sort=sort, limit=limit, offset=offset, scope=scope)

    def segment(self, id: int, *, text: bool = False, ids: bool = False) -> Json:
        """One segment with `path` and `children` ids; with `text` and `ids` if asked for."""
        query = {"text": int(text), "ids": int(ids)}
        found: Json = self._get(f"{OWN}/segments/{id}", **query)["segment"]
        return found

    def why(self, id: int) -> Json:
        """`segment`, and `why`: what the policies of the running daemon go by."""
        return self._get(f"{OWN}/segments/{id}/why")

    def trie(self, root: int, depth: int, limit: int, scope: str | None = None) -> Json:
        """`root`, `trie` (segments with nested `children`), `segments` (how many), `truncated`."""
        return self._get(f"{OWN}/trie", root=root, depth=depth, limit=limit, scope=scope)

    # --- pins and bases -------------------------------------------------------------------

    def pins(self) -> list[Json]:
        found: list[Json] = self._get(f"{OWN}/pins")["pins"]
        return found

    def pin(self, segment: int) -> Json:
        found: Json = self._ask("POST", f"{OWN}/pins", {"segment": segment})["pinned"]
        return found

    def unpin(self, segment: int) -> None:
        self._ask("DELETE", f"{OWN}/pins/{segment}")

    def bases(self) -> list[Json]:
        found: list[Json] = self._get(f"{OWN}/bases")["bases"]
        return found

    def remove_base(self, name: str, scope: str) -> None:
        self._ask("DELETE", f"{OWN}/bases/{_name(name)}", query={"scope": scope})

    # --- upkeep ---------------------------------------------------------------------------

    def model_path(self) -> Path:
        """The file of the served model, if the daemon runs on this machine. Raises NotFound."""
        path = Path(self.stats()["model_path"])
        if not path.is_file():
            raise NotFound(f"The served model, {path}, is not on this machine: ask there.")
        return path

    def stats(self) -> Json:
        """Everything that is counted; what only a daemon knows is None without one."""
        return self._get(f"{OWN}/stats")

    def verify(self, repair: bool, progress: OnBytes) -> Json:
        report: Json | None = None
        for event in self._events(f"{OWN}/verify", {"repair": repair}):
            report = event.get("verify", report)
            if "progress" in event:
                progress(event["progress"]["done"], event["progress"]["total"])
        if report is None:
            raise self._broken("it ended before the verification did")
        return report

    def gc(self, quarantine_days: float, dry_run: bool) -> Json:
        body = {"quarantine_days": quarantine_days, "dry_run": dry_run}
        report: Json = self._ask("POST", f"{OWN}/gc", body, timeout_s=None)["gc"]
        return report

    def calibration(self) -> Json:
        """How far the calibration is, and its result (`calibration`, maybe None)."""
        found: Json = self._get(f"{OWN}/calibration")["calibration"]
        return found

    # --- what needs the model -------------------------------------------------------------

    def tokenize(self, text: str, *, whole: bool = True) -> list[int]:
        """The ids of a text, special tokens in it read as such; `whole`: of a prompt, BOS
        included."""
        body = {"content": text, "add_special": whole, "parse_special": True}
        ids: list[int] = self._ask("POST", "/tokenize", body)["tokens"]
        return ids

    def calibrate(self, *, again: bool) -> Json:
        """Begin a calibration unless there is one (`again`: in any case); see `calibration`."""
        asked = self._ask("POST", f"{OWN}/calibration", {"again": again})
        found: Json = asked["calibration"]
        return found

    def apply_template(self, messages: Sequence[Mapping[str, str]]) -> str:
        """The prompt text of `messages`, without the opening of an answer."""
        body = {"messages": list(messages), "add_generation_prompt": False}
        text: str = self._ask("POST", "/apply-template", body)["prompt"]
        return text

    def precache(
        self,
        name: str,
        ids: Sequence[int],
        *,
        level: int,
        public: bool,
        format: str | None = None,
        recompute: float | None = None,
        progress: Callable[[int, int], None],
    ) -> Json:
        """Evaluate, store and pin a base; `base`, `reuse`, `timings`. `progress(done, total)` in
        tokens. `recompute`: a module of which so many per cent are evaluated again."""
        from towerd.tiers.module_text import ANYWHERE

        body: Json = {
            "name": name,
            "prompt": list(ids),
            "level": level,
            "public": public,
            "format": format,
        }
        if recompute is not None:
            body |= {"reuse": ANYWHERE, "recompute": recompute}
        result: Json | None = None
        for event in self._events(f"{OWN}/precache", body):
            if "base" in event:
                result = event
            if "progress" in event:
                progress(event["progress"]["processed"], event["progress"]["total"])
        if result is None:
            raise self._broken(f"it ended before {name} was evaluated")
        return result

    # --- HTTP -----------------------------------------------------------------------------

    def _get(self, path: str, **query: Any) -> Json:
        return self._ask("GET", path, query=query)

    def _ask(
        self,
        method: str,
        path: str,
        body: Json | bytes | None = None,
        query: Mapping[str, Any] | None = None,
        timeout_s: float | None = TIMEOUT_S,
    ) -> Json:
        """One request and its JSON object."""
        asked = {key: value for key, value in (query or {}).items() if value is not None}
        target = f"{path}?{urlencode(asked)}" if asked else path
        reply = self._send(method, target, body, timeout_s)
        try:
            return self._decode(reply, reply.read())
        except (OSError, http.client.HTTPException) as error:
            raise self._broken(error) from error

    def _events(self, path: str, body: Json) -> Iterator[Json]:
        """The events of a streamed reply."""
        reply = self._send("POST", path, {**body, "stream": True}, None)
        try:
            if not reply.headers.get_content_type() == "text/event-stream":
                yield self._decode(reply, reply.read())
                return
            for line in reply:
                if line.startswith(b"data: "):
                    event = json.loads(line[len(b"data: ") :])
                    _raise_if_error(event, reply.status)
                    yield event
        except (OSError, http.client.HTTPException, ValueError) as error:
            raise self._broken(error) from error
        finally:
            if not reply.isclosed():  # the rest of it would be taken for the next reply
                self._connection.close()

    def _send(
        self, method: str, target: str, body: Json | bytes | None, timeout_s: float | None
    ) -> http.client.HTTPResponse:
        data = json.dumps(body).encode() if isinstance(body, dict) else body
        try:
            if self._connection.sock is None:
                self._connection.timeout = TIMEOUT_S
                self._connection.connect()
            self._connection.sock.settimeout(timeout_s)
            self._connection.request(method, target, data, self._headers)
            return self._connection.getresponse()
        except (OSError, http.client.HTTPException) as error:
            self._connection.close()
            if isinstance(error, BrokenPipeError | ConnectionResetError):
                raise TowerdError(f"The daemon at {self.where} has ended.") from error
            raise self._broken(error) from error

    def _decode(self, reply: http.client.HTTPResponse, data: bytes) -> Json:
        try:
            value = json.loads(data)
        except (ValueError, RecursionError):
            value = None
        if not isinstance(value, dict):
            raise self._broken(f"status {reply.status} without a JSON object; is it a towerd?")
        _raise_if_error(value, reply.status)
        return value

    def _broken(self, why: object) -> TowerdError:
        text = str(why) or type(why).__name__
        return TowerdError(f"The daemon at {self.where} does not answer properly: {text}.")


class _UnixConnection(http.client.HTTPConnection):
    """HTTP over a Unix socket."""

    def __init__(self, path: Path) -> None:
        super().__init__("localhost", timeout=TIMEOUT_S)
        self._path = path

    def connect(self) -> None:
        self.sock = sockets.socket(sockets.AF_UNIX)
        self.sock.settimeout(TIMEOUT_S)
        self.sock.connect(str(self._path))


def _raise_if_error(value: Json, status: int) -> None:
    error = value.get("error")
    if not isinstance(error, dict):
        return
    message = str(error.get("message"))
    if status == 401:
        message = f"{message}: give the daemon's key with --api-key"
    if status == 503:
        message = f"The daemon cannot answer now ({message}); try again in a moment"
    raise RemoteError(message, int(error.get("code") or status))


def _name(text: str) -> str:
    """A name as one part of a path."""
    return quote(text, safe="")
