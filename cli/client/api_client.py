"""towerctl's HTTP client, for a daemon or for this process's own application over a store."""

from __future__ import annotations

import functools
import http.client
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from http import HTTPStatus
from pathlib import Path
from typing import Any, TypeAlias, TypeVar
from urllib.parse import urlsplit

import msgspec

from towerd.cli.client import replies
from towerd.cli.client.transport import (
    TIMEOUT_S,
    Json,
    RemoteError,
    UnixConnection,
    json_of,
    part_of_url,
    query_of,
    raise_if_error,
)
from towerd.errors import ConfigError, NotFound, TowerdError

OnBytes: TypeAlias = Callable[[int, int], None]
"""Called with (bytes done, bytes in total)."""

PAGE_MAX = 1000
"""The most entries that one listing returns."""
OWN = "/towerd/v1"
MEDIA_HEADER = "X-Towerd-Media"
"""Of an export."""
T = TypeVar("T")
_PREFIX = re.compile("[0-9a-f]{4,15}")
"""The beginning of an id that towerd generated."""


class ApiClient:
    """Client of /towerd/v1 and a daemon's other endpoints. Every method raises TowerdError."""

    def __init__(
        self,
        connection: http.client.HTTPConnection,
        where: str,
        key: str | None = None,
        *,
        has_model: bool = True,
    ) -> None:
        self.where = where
        """The address or directory that answers, for messages."""
        self.has_model = has_model
        """Whether it can detokenize."""
        self._connection = connection
        self._headers = {"Content-Type": "application/json"}
        if key is not None:
            self._headers["Authorization"] = f"Bearer {key}"

    @classmethod
    def at_socket(
        cls, path: Path, where: str | None = None, *, has_model: bool = True
    ) -> ApiClient:
        """The daemon on a Unix socket, whose owner needs no key. where: its name in messages."""
        return cls(UnixConnection(path), where or str(path), has_model=has_model)

    @classmethod
    def at_url(cls, url: str, key: str | None) -> ApiClient:
        """The daemon at http(s)://host[:port]. Raises ConfigError."""
        kinds = {"http": http.client.HTTPConnection, "https": http.client.HTTPSConnection}
        wrong = ConfigError(f"--url must be like http://127.0.0.1:8080, not {url!r}.")
        try:
            parts = urlsplit(url)
            if parts.scheme not in kinds or not parts.hostname or parts.path.strip("/"):
                raise wrong
            parts.hostname.encode("idna")  # as connecting does
            connection = kinds[parts.scheme](parts.hostname, parts.port, timeout=TIMEOUT_S)
        except (ValueError, http.client.InvalidURL):
            raise wrong from None
        if key is not None and not (key.isascii() and key.isprintable()):
            raise ConfigError("--api-key must be printable ASCII text.")
        return cls(connection, url, key)

    def __enter__(self) -> ApiClient:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the connection."""
        self._connection.close()

    # --- sessions and segments ------------------------------------------------------------

    def sessions(self, limit: int, scope: str | None = None) -> list[Json]:
        """The sessions, most recently used first, each with its `footprint`."""
        return self._listed(limit=limit, scope=scope, footprint=1)

    def session(
        self, id: str, scope: str | None = None, *, text: bool = False, tokenizer: str = ""
    ) -> Json:
        """`session`, `turns`, `rows`, `text` (that of the current branch, or None) and `kept`: what
        is live of a chat with a budget, or None. tokenizer: "" for the served model's."""
        query = {"scope": scope, "text": int(text), "kept": int(self.has_model), "footprint": 1}
        query |= {"tokenizer": tokenizer} if tokenizer else {}
        shape = replies.WholeSessionShape
        found = self._of_session(id, scope, lambda path: self._get(path, shape, **query))
        return {"text": None, "kept": None, **found}

    def search(self, typed: str, limit: int, scope: str | None = None) -> Json:
        """`results`: for each conversation `session`, `turn`, `said` and `snippet`."""
        shape = ("results", list[replies.FoundSessionShape])
        return self._get(f"{OWN}/search", shape, q=typed, limit=limit, scope=scope)

    def delete_session(self, id: str, scope: str | None = None, tokenizer: str = "") -> bool:
        """Whether a copy in the shared tier may be left."""
        query = {"scope": scope} | ({"tokenizer": tokenizer} if tokenizer else {})
        found = self._ask("DELETE", _path(id), ("deleted", str), query=query)
        return bool(found.get("shared"))

    def freeze_session(self, id: str, scope: str | None = None) -> Json:
        """Freeze a session: `session`, and `changed`: it was not frozen yet."""
        return self._post_session(id, scope, "freeze")

    def thaw_session(self, id: str, scope: str | None = None) -> Json:
        """Thaw a frozen session: `session`, and `changed`: it was frozen."""
        return self._post_session(id, scope, "thaw")

    def recode_session(self, id: str, scope: str | None = None) -> Json:
        """Renew the coded form of a session: `session`, and `changed`: it has one."""
        return self._post_session(id, scope, "recode")

    def coded_sessions(self, after: int, limit: int, scope: str | None = None) -> list[Json]:
        """`pk`, `id` and `scope` of sessions that have a coded form, which follow row `after`."""
        shape = replies.CodedSessionShape
        return self._listed(shape, limit=limit, scope=scope, coded_after=after)

    def idle_sessions(self, idle_s: int, limit: int, scope: str | None = None) -> list[Json]:
        """Sessions that can be frozen and were unused for `idle_s`, least recently used first."""
        return self._listed(limit=limit, scope=scope, idle_s=idle_s)

    def whole_id(self, id: str, scope: str | None = None) -> str:
        """The id of the session that is named, maybe by the beginning of its id."""
        found = self._of_session(
            id, scope, lambda path: self._get(path, replies.WholeSessionShape, scope=scope)
        )
        return str(found["session"]["id"])

    def export_session(
        self, id: str, scope: str | None = None, *, with_media: bool = True
    ) -> tuple[bytes, dict[str, int]]:
        """The session as a `.tower` file; of its pictures and sounds, how many are `carried` or `left_out`."""
        asked = {"media": int(with_media)} | ({"scope": scope} if scope is not None else {})
        query = query_of(asked)
        data, told = self._of_session(id, scope, lambda path: self._file(f"{path}/export?{query}"))
        parts = (each.partition("=") for each in told.get(MEDIA_HEADER, "").split(", "))
        return data, {name: int(n) for name, _, n in parts if n.isdecimal()}

    def import_session(
        self, data: bytes, scope: str | None = None, *, with_media: bool = True
    ) -> Json:
        """Import the session of a `.tower` file: `session`, `added` (turns), `bases` and `media`."""
        path, query = f"{OWN}/sessions/import", {"scope": scope, "media": int(with_media)}
        return self._ask("POST", path, replies.ImportedShape, data, query, timeout_s=None)

    def shared_rm(self, what: Json) -> Json:
        """Delete a session or base from the shared tier: what it was, its `records`, and whether the daemon `puts_again`
        what it has."""
        shape = replies.SharedRemovedShape
        return self._ask("POST", f"{OWN}/shared/rm", shape, what, timeout_s=None)

    def shared_gc(self, older_than_days: float | None, dry_run: bool) -> Json:
        """Collect garbage of the shared tier: what was deleted, and what is garbage."""
        body = {"dry_run": dry_run, "older_than_days": older_than_days}
        shape = replies.SharedCollectedShape
        return self._ask("POST", f"{OWN}/shared/gc", shape, body, timeout_s=None)

    def shared(self, verb: str, what: Json) -> Json:
        """`push` or `pull` a session or a base: its `tokens`, and those with `rows` there or here."""
        return self._ask("POST", f"{OWN}/shared/{verb}", replies.PushedShape, what, timeout_s=None)

    def shared_listing(self, scope: str | None) -> Json:
        """The `sessions` and `bases` that a tenant can pull."""
        query = {"scope": scope}
        return self._ask("GET", f"{OWN}/shared", replies.SharedShape, query=query, timeout_s=None)

    def _post_session(self, id: str, scope: str | None, verb: str) -> Json:
        def post(path: str) -> Json:
            asked, shape = {"scope": scope}, replies.ChangedSessionShape
            return self._ask("POST", f"{path}/{verb}", shape, {}, asked, timeout_s=None)

        return self._of_session(id, scope, post)

    def _listed(self, shape: Any = replies.SessionShape, **query: Any) -> list[Json]:
        found: list[Json] = self._one("GET", f"{OWN}/sessions", "sessions", list[shape], query)
        return found

    def _of_session(self, id: str, scope: str | None, ask: Callable[[str], T]) -> T:
        """Ask for a session by its path; if there is none of this name, for the one whose id begins
        so. ConfigError if several do."""
        try:
            return ask(_path(id))
        except RemoteError as error:
            if error.status != NotFound.status or not _PREFIX.fullmatch(id):
                raise
            found = self._listed(begins=id, scope=scope, limit=3)
            ids = list(dict.fromkeys(each["id"] for each in found))
            if not ids:
                raise
        if len(ids) > 1:
            raise ConfigError(f"Several sessions begin with {id}: {', '.join(ids)}...; give more.")
        return ask(_path(ids[0]))

    def segments(self, sort: str, limit: int, offset: int = 0, scope: str | None = None) -> Json:
        """`segments`, sorted by used, tokens, hits or id, and `total`."""
        query = {"sort": sort, "limit": limit, "offset": offset, "scope": scope}
        return self._get(f"{OWN}/segments", replies.SegmentsShape, **query)

    def segment(self, id: int, *, text: bool = False, ids: bool = False) -> Json:
        """One segment with `path` and `children` ids; with `text` and `ids` if requested."""
        path, query = f"{OWN}/segments/{id}", {"text": int(text), "ids": int(ids)}
        found: Json = self._one("GET", path, "segment", replies.PlacedSegmentShape, query)
        if text and "text" not in found or ids and "ids" not in found:
            raise self._broken(
                "a segment without the text or the ids that were asked for; is it a towerd?"
            )
        return found

    def why(self, id: int) -> Json:
        """`segment`, and `why`: how the policies of the running daemon rank it."""
        return self._get(f"{OWN}/segments/{id}/why", replies.WhyShape)

    def why_request(self, id: str) -> Json:
        """`request`, `why` and `divergence`: why it did not find more of its prompt."""
        return self._get(f"{OWN}/requests/{part_of_url(id)}/why", replies.WhyRequestShape)

    def tree(self, root: int, depth: int, limit: int, scope: str | None = None) -> Json:
        """`root`, `trie` (segments with nested `children`), `segments` (how many), `truncated`."""
        shape = replies.TreeShape
        return self._get(f"{OWN}/trie", shape, root=root, depth=depth, limit=limit, scope=scope)

    # --- pins and bases -------------------------------------------------------------------

    def pins(self) -> list[Json]:
        found: list[Json] = self._one("GET", f"{OWN}/pins", "pins", list[replies.SegmentShape])
        return found

    def pin(self, segment: int) -> Json:
        body, shape = {"segment": segment}, replies.SegmentShape
        found: Json = self._one("POST", f"{OWN}/pins", "pinned", shape, body=body)
        return found

    def unpin(self, segment: int) -> None:
        self._ask("DELETE", f"{OWN}/pins/{segment}", ("unpinned", int))

    def bases(self) -> list[Json]:
        found: list[Json] = self._one("GET", f"{OWN}/bases", "bases", list[replies.BaseShape])
        return found

    def remove_base(self, name: str, scope: str) -> None:
        path = f"{OWN}/bases/{part_of_url(name)}"
        self._ask("DELETE", path, ("deleted", str), query={"scope": scope})

    # --- maintenance ----------------------------------------------------------------------

    def model_path(self) -> Path:
        """The file of the served model, if the daemon runs on this machine. Raises NotFound."""
        path = Path(self.stats()["model_path"])
        if not path.is_file():
            raise NotFound(
                f"The served model, {path}, is not on this machine: run this command on the daemon's machine."
            )
        return path

    def stats(self) -> Json:
        """All statistics; those that only a daemon has are None without one."""
        found = self._get(f"{OWN}/stats", replies.StatsShape)
        if found["engine"] is not None:
            self._checked(found, replies.DaemonStatsShape)
        return found

    def models(self) -> list[Json]:
        """The models, each with its `meta` if it is loaded."""
        found: list[Json] = self._one("GET", "/models", "data", list[replies.ModelShape])
        return found

    def routed(self) -> list[Json] | None:
        """The models of a router, each with its `status`; None if the daemon serves one model, which
        has none."""
        found = self.models()
        return found if all("status" in each for each in found) else None

    def load(self, model: str) -> None:
        """Let a router begin to load a model that is unloaded."""
        self._ask("POST", "/models/load", ("success", bool), {"model": model})

    def is_ready(self) -> bool:
        """Whether requests are answered; not while the model is being loaded."""
        reply = self._send("GET", "/health", None, TIMEOUT_S)
        data = self._read(reply)
        if reply.status == HTTPStatus.SERVICE_UNAVAILABLE:
            return False
        self._decode(reply, data)
        return True

    def address(self) -> Json:
        """`urls` at which clients find the daemon, and `needs_key`."""
        return self._get(f"{OWN}/address", replies.AddressShape)

    def processes(self) -> list[Json]:
        """The processes of a router, each with its `role`; none if the daemon serves one model."""
        reply = self._send("GET", f"{OWN}/processes", None, TIMEOUT_S)
        data = self._read(reply)
        if reply.status == HTTPStatus.NOT_FOUND:
            return []
        return list(self._decode(reply, data)["processes"])

    def slots(self, model: str) -> list[Json] | None:
        """What each slot of a model does; None if the daemon was told not to show it."""
        reply = self._send("GET", f"/slots?{query_of({'model': model})}", None, TIMEOUT_S)
        data = self._read(reply)
        if reply.status == HTTPStatus.NOT_IMPLEMENTED:
            return None
        if reply.status != HTTPStatus.OK:
            self._decode(reply, data)
        found: list[Json] = self._checked(json_of(data), list[replies.SlotShape])
        return found

    def verify(self, repair: bool, progress: OnBytes) -> Json:
        report: Json | None = None
        for event in self._events(f"{OWN}/verify", replies.VerifyEventShape, {"repair": repair}):
            report = event.get("verify", report)
            if "progress" in event:
                progress(event["progress"]["done"], event["progress"]["total"])
        if report is None:
            raise self._broken("it ended before the verification did; is it a towerd?")
        return report

    def gc(self, quarantine_days: float, dry_run: bool) -> Json:
        body = {"quarantine_days": quarantine_days, "dry_run": dry_run}
        shape = ("gc", replies.CollectedShape)
        report: Json = self._ask("POST", f"{OWN}/gc", shape, body, timeout_s=None)["gc"]
        return report

    def would_forget(self, chosen: Json) -> Json:
        """What `forget` would delete. chosen: `tenant` and `older_than_days`, or None for each"""
        shape = ("would_forget", replies.ForgettableShape)
        body = {**chosen, "dry_run": True}
        found: Json = self._ask("POST", f"{OWN}/forget", shape, body)["would_forget"]
        return found

    def forget(self, chosen: Json) -> Json:
        """Delete what is chosen, and destroy what is needed to read what was deleted."""
        shape = ("forgot", replies.ForgottenShape)
        found: Json = self._ask("POST", f"{OWN}/forget", shape, chosen, timeout_s=None)["forgot"]
        return found

    def calibration(self) -> Json:
        """The progress of the calibration, and its result (`calibration`, may be None)."""
        path, shape = f"{OWN}/calibration", replies.CalibrationStateShape
        found: Json = self._one("GET", path, "calibration", shape)
        return found

    # --- what needs the model -------------------------------------------------------------

    def tokenize(self, text: str, *, whole: bool = True) -> list[int]:
        """The ids of a text, in which special tokens are parsed. whole: a whole prompt, with
        BOS."""
        body = {"content": text, "add_special": whole, "parse_special": True}
        ids: list[int] = self._one("POST", "/tokenize", "tokens", list[int], body=body)
        return ids

    def calibrate(self, *, again: bool) -> Json:
        """Start a calibration unless there is a result (again: in any case); see `calibration`."""
        path, shape = f"{OWN}/calibration", replies.CalibrationStateShape
        found: Json = self._one("POST", path, "calibration", shape, body={"again": again})
        return found

    def apply_template(self, messages: Sequence[Mapping[str, str]]) -> str:
        """The prompt text of `messages`, without the generation prompt."""
        body = {"messages": list(messages), "add_generation_prompt": False}
        text: str = self._one("POST", "/apply-template", "prompt", str, body=body)
        return text

    def precache(
        self,
        name: str,
        ids: Sequence[int],
        *,
        level: int,
        public: bool,
        format: str | None = None,
        anywhere: bool = False,
        progress: Callable[[int, int], None],
    ) -> Json:
        """Evaluate, store and pin a base: `base`, `reuse`, `timings`. progress: called with
        (done, total) tokens. anywhere: it is a text that may stand anywhere in prompts."""
        body: Json = {
            "name": name,
            "prompt": list(ids),
            "level": level,
            "public": public,
            "format": format,
        }
        if anywhere:
            body["reuse"] = "anywhere"
        result: Json | None = None
        for event in self._events(f"{OWN}/precache", replies.PrecacheEventShape, body):
            if "base" in event:
                if "reuse" not in event:
                    raise self._broken("a base without its reuse; is it a towerd?")
                result = event
            if "progress" in event:
                progress(event["progress"]["processed"], event["progress"]["total"])
        if result is None:
            raise self._broken(f"it ended before {name} was evaluated; is it a towerd?")
        return result

    # --- HTTP -----------------------------------------------------------------------------

    def _get(self, path: str, shape: Any, **query: Any) -> Json:
        return self._ask("GET", path, shape, query=query)

    def _one(
        self,
        method: str,
        path: str,
        key: str,
        shape: Any,
        query: Mapping[str, Any] | None = None,
        body: Json | None = None,
    ) -> Any:
        """The value of `key` in the reply, which must have a shape of `replies`."""
        return self._ask(method, path, (key, shape), body, query)[key]

    def _ask(
        self,
        method: str,
        path: str,
        shape: Any,
        body: Json | bytes | None = None,
        query: Mapping[str, Any] | None = None,
        timeout_s: float | None = TIMEOUT_S,
    ) -> Json:
        """One request and its JSON object, which must have a shape of `replies`, or a key (key, shape)
        whose value has one."""
        asked = {key: value for key, value in (query or {}).items() if value is not None}
        target = f"{path}?{query_of(asked)}" if asked else path
        reply = self._send(method, target, body, timeout_s)
        found: Json = self._checked(self._decode(reply, self._read(reply)), shape)
        return found

    def _file(self, path: str) -> tuple[bytes, http.client.HTTPMessage]:
        """The bytes of a file, and the headers of the reply."""
        reply = self._send("GET", path, None, None)
        data = self._read(reply)
        if reply.headers.get_content_type() == "application/octet-stream":
            return data, reply.headers
        self._decode(reply, data)
        raise self._broken("it sent no file; is it a towerd?")

    def _read(self, reply: http.client.HTTPResponse) -> bytes:
        try:
            return reply.read()
        except (OSError, http.client.HTTPException) as error:
            raise self._broken(error) from error

    def _events(self, path: str, shape: Any, body: Json) -> Iterator[Json]:
        """The events of a streamed reply, each of which must have a shape of `replies`."""
        reply = self._send("POST", path, {**body, "stream": True}, None)
        try:
            if not reply.headers.get_content_type() == "text/event-stream":
                yield self._checked(self._decode(reply, reply.read()), shape)
                return
            for line in reply:
                if line.startswith(b"data: "):
                    event = json_of(line[len(b"data: ") :])
                    if not isinstance(event, dict):
                        raise self._broken("an event without a JSON object; is it a towerd?")
                    raise_if_error(event, reply.status)
                    yield self._checked(event, shape)
        except (OSError, http.client.HTTPException) as error:
            raise self._broken(error) from error
        finally:
            if not reply.isclosed():  # the rest of it would be read as the next reply
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
            with suppress(BrokenPipeError, ConnectionResetError):  # it may have answered before
                self._connection.request(method, target, data, self._headers)
            return self._connection.getresponse()
        except (OSError, http.client.HTTPException) as error:
            self._connection.close()
            if isinstance(error, BrokenPipeError | ConnectionResetError):
                raise TowerdError(f"The daemon at {self.where} has ended.") from error
            raise self._broken(error) from error

    def _decode(self, reply: http.client.HTTPResponse, data: bytes) -> Json:
        value = json_of(data)
        if not isinstance(value, dict):
            raise self._broken(f"status {reply.status} without a JSON object; is it a towerd?")
        raise_if_error(value, reply.status)
        if reply.status >= HTTPStatus.BAD_REQUEST:
            raise self._broken(f"status {reply.status} without an error object; is it a towerd?")
        return value

    def _checked(self, value: Any, shape: Any) -> Any:
        """The value, whole, if it has the shape."""
        try:
            msgspec.convert(value, _with_key(*shape) if isinstance(shape, tuple) else shape)
        except (msgspec.ValidationError, RecursionError) as error:
            raise self._broken(f"{error}; is it a towerd of this version?") from error
        return value

    def _broken(self, why: object) -> TowerdError:
        text = str(why) or type(why).__name__
        end = "" if text.endswith((".", "?")) else "."
        return TowerdError(f"The daemon at {self.where} does not answer properly: {text}{end}")


@functools.cache
def _with_key(key: str, shape: Any) -> Any:
    """The shape of an object with this key, and any others."""
    return msgspec.defstruct("Reply", [(key, shape)])


def _path(session: str) -> str:
    return f"{OWN}/sessions/{part_of_url(session)}"
