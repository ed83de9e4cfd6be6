"""Bucket: the objects below a URL, through the package `obstore`.

A conditional put is the only write: an object is made once and never changed or deleted here.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any
from urllib.parse import unquote, urlsplit

import obstore
from obstore.exceptions import AlreadyExistsError, BaseError, PreconditionError
from obstore.store import LocalStore, ObjectStore, from_url

from towerd.errors import ConfigError, TowerdError

TIMEOUT_S = 15
"""For one request, from its start to its last byte."""
CONNECT_S = 5
RETRY_S = 10
RETRIES_MAX = 2
_QUERY = re.compile(r"\?\S*")


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


class Bucket:
    """Thread-safe. Every method raises BucketError, over a network within half a minute; a folder takes as long as
    its file system."""

    def __init__(self, store: ObjectStore) -> None:
        """Use `open_bucket`."""
        self._store = store
        self._is_closed = False

    def close(self) -> None:
        """Refuse every request from now on; the one that runs is answered."""
        self._is_closed = True

    def put(self, place: str, data: bytes) -> bool:
        """Make an object; False if there is one, which stays."""
        with self._errors(f"cannot take {place}"):
            try:
                obstore.put(self._store, place, data, mode="create")
            except (AlreadyExistsError, PreconditionError):
                return False
        return True

    def get(self, place: str, bytes_max: int) -> bytes:
        """A whole object. Raises ObjectMissing; BucketError also for one of more than `bytes_max`."""
        with self._errors(f"cannot give {place}"):
            found = obstore.get(self._store, place)
            n_bytes = found.meta["size"]
            if n_bytes > bytes_max:
                raise BucketError(f"The object {place} has {n_bytes} bytes; up to {bytes_max} fit.")
            return bytes(found.bytes())

    def has(self, place: str) -> bool:
        """Whether there is an object."""
        try:
            with self._errors(f"cannot tell of {place}"):
                obstore.head(self._store, place)
        except ObjectMissing:
            return False
        return True

    def listing(self, folder: str) -> list[Listed]:
        """The objects right in a folder and below it, in no order."""
        with self._errors(f"cannot list {folder}"):
            found = obstore.list(self._store, folder).collect()
        return [Listed(each["path"], each["last_modified"]) for each in found]

    @contextmanager
    def _errors(self, what: str) -> Iterator[None]:
        """Turn the errors of obstore into BucketError, whose message begins with `what` and names no key."""
        if self._is_closed:
            raise BucketError(f"The shared tier {what}: the daemon stops.")
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
            return Bucket(LocalStore(unquote(parts.path), mkdir=True))
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
    """The first line of an error, without what a URL has behind its question mark: that may be a secret."""
    return _QUERY.sub("", str(error).partition("\n")[0]).rstrip(".")
