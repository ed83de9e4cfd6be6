"""Bucket: the objects below a URL, through the package `obstore`.

Objects are made by a conditional put and never changed. Who may delete which is the protocol's: see `deleting/collector.py`.
"""

from __future__ import annotations

import os
import re
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import unquote, urlsplit

import obstore
from obstore.exceptions import AlreadyExistsError, BaseError, PreconditionError
from obstore.store import LocalStore, ObjectStore, from_url

from towerd.errors import ConfigError, TowerdError

T = TypeVar("T")

LIMIT_S = 30.0
"""Whoever asks waits no longer, whatever the other side does."""
LISTED_MAX = 10_000
"""Objects of one listing, unless more are asked for."""
UNANSWERED_MAX = 8
"""Abandoned requests that were not answered yet; with so many nothing more is asked."""
TIMEOUT_S = 15
"""For one request over a network, from its start to its last byte."""
CONNECT_S = 5
RETRY_S = 10
RETRIES_MAX = 2
_QUERY = re.compile(r"\?\S*")
_BODY = re.compile(r"<.*", re.DOTALL)


class BucketError(TowerdError):
    """The object store does not do what was asked (502)."""

    status = 502
    stands_for = "The shared tier failed: the daemon's log says how."


class ObjectMissing(BucketError):
    """There is no such object."""


class ObjectDamaged(BucketError):
    """An object is not what it should be."""


@dataclass(frozen=True, slots=True)
class Listed:
    """An object of a listing."""

    place: str
    modified: datetime
    n_bytes: int = 0


class Bucket:
    """Thread-safe. Every method raises BucketError, within half a minute, and at once when the bucket is closed.

    Each request has a thread of its own, which is abandoned when its limit has passed: a server can
    keep one for ever."""

    def __init__(self, store: ObjectStore) -> None:
        """Use `open_bucket`."""
        self._store = store
        self._lock = threading.Lock()
        self._is_closed = False
        self._waited_for: set[Future[Any]] = set()
        self._n_unanswered = 0

    def close(self) -> None:
        """Refuse every request from now on, and those that run. One to put may still do so."""
        with self._lock:
            self._is_closed = True
            for each in self._waited_for:
                each.set_exception(TimeoutError("the daemon stops"))
            self._n_unanswered += len(self._waited_for)
            self._waited_for.clear()

    def put(self, place: str, data: bytes) -> bool:
        """Make an object; False if there is one, which stays."""

        def put(_: Future[bool]) -> bool:
            try:
                obstore.put(self._store, place, data, mode="create")
            except (AlreadyExistsError, PreconditionError):
                return False
            return True

        return self._ask(f"cannot take {place}", put)

    def get(self, place: str, bytes_max: int) -> memoryview:
        """A whole object. Raises ObjectMissing; ObjectDamaged for one of more than `bytes_max`."""

        def get(_: Future[memoryview]) -> memoryview:
            found = obstore.get(self._store, place)
            n_bytes = found.meta["size"]
            if n_bytes > bytes_max:
                raise ObjectDamaged(
                    f"The object {place} has {n_bytes} bytes; up to {bytes_max} fit."
                )
            return memoryview(found.bytes())

        return self._ask(f"cannot give {place}", get)

    def has(self, place: str) -> bool:
        """Whether there is an object."""

        def has(_: Future[bool]) -> bool:
            obstore.head(self._store, place)
            return True

        try:
            return self._ask(f"cannot tell of {place}", has)
        except ObjectMissing:
            return False

    def has_each(self, places: Sequence[str]) -> list[bool]:
        """Whether there is an object at each; all are asked for at once."""
        with ThreadPoolExecutor(max(1, len(places)), "towerd-marks") as threads:
            return list(threads.map(self.has, places))

    def start_of(self, place: str, n_bytes: int) -> bytes:
        """The first bytes of an object, all of a shorter one. Raises ObjectMissing."""

        def get(_: Future[bytes]) -> bytes:
            return bytes(obstore.get_range(self._store, place, start=0, length=n_bytes))

        return self._ask(f"cannot give {place}", get)

    def modified(self, place: str) -> datetime:
        """When an object was put, by the store's clock. Raises ObjectMissing."""

        def head(_: Future[datetime]) -> datetime:
            return obstore.head(self._store, place)["last_modified"]

        return self._ask(f"cannot tell of {place}", head)

    def delete(self, place: str) -> None:
        """Delete an object, if there is one."""

        def delete(_: Future[None]) -> None:
            with suppress(FileNotFoundError):
                obstore.delete(self._store, place)

        self._ask(f"cannot delete {place}", delete)

    def listing(self, folder: str, most: int = LISTED_MAX) -> list[Listed]:
        """The objects right in a folder and below it, in no order, up to `most`."""

        def listing(answer: Future[list[Listed]]) -> list[Listed]:
            found: list[Listed] = []
            for chunk in obstore.list(self._store, folder):
                found += [
                    Listed(each["path"], each["last_modified"], each["size"]) for each in chunk
                ]
                if answer.done():
                    break  # nobody waits for it
                if len(found) > most:
                    raise BucketError(f"The shared tier has more than {most} objects in {folder}.")
            return found

        return self._ask(f"cannot list {folder}", listing)

    def _ask(self, what: str, work: Callable[[Future[T]], T]) -> T:
        """What `work` returns on a thread of its own; it is given what is waited for."""
        answer: Future[T] = Future()
        with self._errors(what):
            with self._lock:
                if self._is_closed:
                    raise TimeoutError("the daemon stops")
                if self._n_unanswered >= UNANSWERED_MAX:
                    raise TimeoutError("it did not answer what it was asked before")
                self._waited_for.add(answer)
            run = threading.Thread(
                target=self._run, args=(work, answer), name="towerd-bucket", daemon=True
            )
            try:
                run.start()
                return answer.result(LIMIT_S)
            except TimeoutError:
                with self._lock:
                    if answer in self._waited_for:
                        self._waited_for.remove(answer)
                        self._n_unanswered += 1
                        answer.cancel()
                if not answer.cancelled():
                    return answer.result()  # it came just now, or is what failed
                raise TimeoutError(f"no answer within {LIMIT_S:.0f} s") from None

    def _run(self, work: Callable[[Future[T]], T], answer: Future[T]) -> None:
        """On the thread of a request."""
        result: T | None = None
        problem: Exception | None = None
        try:
            result = work(answer)
        except Exception as error:
            problem = error
        with self._lock:
            if answer not in self._waited_for:
                self._n_unanswered -= 1
            elif problem is not None:
                self._waited_for.remove(answer)
                answer.set_exception(problem)
            else:
                self._waited_for.remove(answer)
                answer.set_result(result)  # type: ignore[arg-type]

    @contextmanager
    def _errors(self, what: str) -> Iterator[None]:
        """Turn the errors of obstore into BucketError, whose message begins with `what` and names no key."""
        try:
            yield
        except FileNotFoundError as error:
            raise ObjectMissing(f"The shared tier {what}: there is no such object.") from error
        except (BaseError, OSError) as error:
            raise BucketError(f"The shared tier {what}: {_said(error)}.") from error


def open_bucket(url: str) -> Bucket:
    """The bucket of a URL `s3://BUCKET/PREFIX`, `gs://...`, `az://...` or `file:///FOLDER`, with the credentials
    of the environment; nothing is asked of it yet. Raises ConfigError."""
    parts = urlsplit(url)
    try:
        if parts.scheme == "file":
            folder = Path(unquote(parts.path))
            if not folder.parent.is_dir():  # maybe nothing is mounted: the local disk would fill
                raise ConfigError(
                    f"--shared {url} cannot be used: there is no folder {folder.parent}."
                )
            return Bucket(LocalStore(folder, automatic_cleanup=True, mkdir=True))
        client = {"timeout": f"{TIMEOUT_S}s", "connect_timeout": f"{CONNECT_S}s"}
        limits: dict[str, Any] = {
            # options of ours hide this one of the environment
            "client_options": client | {"allow_http": _allows_http(os.environ)},
            "retry_config": {
                "max_retries": RETRIES_MAX,
                "retry_timeout": timedelta(seconds=RETRY_S),
            },
        }
        return Bucket(from_url(url, **limits))
    except (BaseError, OSError, ValueError) as error:
        raise ConfigError(f"--shared {url} cannot be used: {_said(error)}.") from error


def _allows_http(environment: Mapping[str, str]) -> bool:
    """Whether an endpoint without TLS may be used, as obstore's own variables say."""
    names = (f"{cloud}_ALLOW_HTTP" for cloud in ("AWS", "AZURE", "GOOGLE"))
    return any(environment.get(name, "").lower() in ("1", "true", "yes", "on") for name in names)


def _said(error: Exception) -> str:
    """The first line of an error, without what a URL has behind its question mark, which may be a secret, and
    without the page that a server sent."""
    line = _BODY.sub("", str(error).partition("\n")[0])
    return _QUERY.sub("", line).rstrip(" .:") or type(error).__name__
