"""Fetches a model of the Hugging Face Hub, through huggingface_hub: its API, its cache, its token
and its variables (HF_ENDPOINT, HF_HUB_OFFLINE, HF_TOKEN...)."""

from __future__ import annotations

import fcntl
import hashlib
import logging
import os
import re
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import httpx2
from huggingface_hub import HfApi, get_hf_file_metadata, get_token, hf_hub_download, hf_hub_url
from huggingface_hub.constants import MAX_HTTP_DOWNLOAD_SIZE
from huggingface_hub.errors import (
    GatedRepoError,
    HfHubHTTPError,
    LocalEntryNotFoundError,
    RepositoryNotFoundError,
)
from huggingface_hub.file_download import http_get
from huggingface_hub.hf_api import RepoFile
from huggingface_hub.utils.tqdm import tqdm as HubBar

from towerd.errors import ModelError
from towerd.models.hub.cache import HubModel, hub_cache, kept, repo_folder, set_main, snapshots_of
from towerd.models.hub.choice import Choice, RepoName, choose

log = logging.getLogger(__name__)

DEFAULT_ENDPOINT = "https://huggingface.co"


@dataclass(frozen=True, slots=True)
class Watcher:
    """Whom to tell about a download."""

    begin: Callable[[str, int], None] = lambda name, n_bytes: None
    """Called once, with the name of the model and the bytes to fetch, if there are any."""
    add: Callable[[int], None] = lambda n_bytes: None
    """Called with the bytes that arrived since the last call, or negative if some are fetched
    again."""


class _Unreachable(Exception):
    """The Hub did not answer; the message is why."""


def fetch(
    wanted: RepoName,
    *,
    file: str = "",
    with_projector: bool = True,
    token: str | None = None,
    offline: bool = False,
    watcher: Watcher = Watcher(),  # frozen
) -> HubModel:
    """The model that `choose` finds in a repository; its files are fetched unless they are here.

    Where the Hub cannot be reached, or may not be (`offline`), what is here is taken. Raises
    ModelError."""
    take = partial(choose, wanted, file=file, with_projector=with_projector)
    hub = _Hub(wanted, token, watcher)
    if offline or is_offline():
        if (model := kept(wanted, take)) is not None:
            return model
        raise ModelError(
            f"{wanted} is not on this machine, and offline nothing is fetched: run towerd models "
            f"get {wanted} once with a network, or name a model that towerd models lists with -m."
        )
    try:
        return hub.fetch(take)
    except _Unreachable as error:
        if (model := kept(wanted, take)) is None:
            raise ModelError(
                f"Cannot reach {endpoint()} for {wanted} ({error}): check the network, or name a "
                "model that towerd models lists with -m."
            ) from error
        log.warning(f"cannot reach {endpoint()}, serving {model.name} as it was fetched: {error}")
        return model


def endpoint() -> str:
    """The URL of the Hub."""
    return os.environ.get("HF_ENDPOINT", "").rstrip("/") or DEFAULT_ENDPOINT


def is_offline() -> bool:
    """Whether the Hub's own variables forbid to fetch."""
    words = (os.environ.get(name, "") for name in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE"))
    return any(word.upper() in ("1", "ON", "YES", "TRUE") for word in words)


class _Hub:
    """One attempt to fetch a model."""

    def __init__(self, wanted: RepoName, token: str | None, watcher: Watcher) -> None:
        self._wanted = wanted
        self._token = token or get_token()
        self._watcher = watcher
        self._cache = hub_cache()
        # What matters of its warnings is said here.
        logging.getLogger("huggingface_hub").setLevel(logging.ERROR)

    def fetch(self, take: Callable[..., Choice]) -> HubModel:
        """Raises _Unreachable and ModelError."""
        with self._explained():
            api = HfApi(endpoint=endpoint(), token=self._token)
            commit = str(api.repo_info(self._wanted.repo).sha)  # at once, or not: without retries
            tree = api.list_repo_tree(self._wanted.repo, recursive=True, revision=commit)
            files = {each.path: each for each in tree if isinstance(each, RepoFile)}
            choice = take(files)
            missing = [file for file in choice.files if file not in self._files_of(commit)]
            blobs = {self._blob(files[file]): files[file].size for file in missing}
            to_fetch = {blob: size for blob, size in blobs.items() if not blob.exists()}
            if to_fetch:
                self._check_space(to_fetch)
                self._watcher.begin(str(self._wanted), sum(to_fetch.values()))
            paths = [self._get(file, commit, is_new=file in missing) for file in choice.files]
            # A model that is here is served from a cache that cannot be written, too.
            with nullcontext() if missing else suppress(OSError):
                set_main(self._cache, self._wanted.repo, commit)
        folder = paths[0].parents[choice.model.path.count("/")]
        return HubModel.of(self._wanted, choice, folder)

    def _files_of(self, commit: str) -> tuple[str, ...]:
        found = snapshots_of(self._cache, self._wanted.repo)
        return next((each.files for each in found if each.folder.name == commit), ())

    def _get(self, file: str, commit: str, *, is_new: bool) -> Path:
        """The path of a file, which is fetched unless it is here."""
        repo, hub = self._wanted.repo, endpoint()
        if is_new:
            self._get_large(file, hf_hub_url(repo, file, revision=commit, endpoint=hub))
        path = hf_hub_download(
            repo,
            file,
            revision=commit,
            cache_dir=self._cache,
            endpoint=hub,
            token=self._token,
            tqdm_class=_bar_class(self._watcher.add),
        )
        return Path(path)

    def _get_large(self, file: str, url: str) -> None:
        """Fetch a file that the Hub names by its SHA-256 to its place in the cache, where
        `hf_hub_download` finds it. That one begins anew at each start, and checks the size alone."""
        about = get_hf_file_metadata(url, token=self._token)
        name, size = about.etag or "", about.size or 0
        if not re.fullmatch(r"[0-9a-f]{64}", name) or size > MAX_HTTP_DOWNLOAD_SIZE:
            return
        blob = self._blobs / name
        blob.parent.mkdir(parents=True, exist_ok=True)
        part = _part(blob)
        with part.open("ab") as out:
            fcntl.flock(out, fcntl.LOCK_EX)  # another process may be fetching it
            if blob.exists():
                return
            if out.seek(0, os.SEEK_END) > size:
                out.truncate(0)
            http_get(
                url,
                out,
                resume_size=out.seek(0, os.SEEK_END),
                headers={"Authorization": f"Bearer {self._token}"} if self._token else {},
                expected_size=size,
                displayed_filename=file,
                tqdm_class=_bar_class(self._watcher.add),
            )
            out.flush()
            os.fsync(out.fileno())
            if _sha256(part) != name:
                part.unlink()
                raise ModelError(
                    f"{file} of {self._wanted.repo} arrived damaged (its SHA-256 differs) and was "
                    "deleted: start again."
                )
            part.replace(blob)

    @property
    def _blobs(self) -> Path:
        return repo_folder(self._cache, self._wanted.repo) / "blobs"

    def _blob(self, file: RepoFile) -> Path:
        """Where the content of a file is, or will be; another commit may have it, too."""
        return self._blobs / (file.lfs.sha256 if file.lfs else file.blob_id)

    def _check_space(self, to_fetch: Mapping[Path, int]) -> None:
        """Raises ModelError if the disk cannot hold blobs of these sizes, or the rest of those that
        an earlier start began."""
        n_bytes = sum(max(0, size - _size(_part(blob))) for blob, size in to_fetch.items())
        self._cache.mkdir(parents=True, exist_ok=True)
        free = shutil.disk_usage(self._cache).free
        if free < n_bytes:
            raise ModelError(
                f"{self._wanted} takes {n_bytes / 2**20:.0f} MiB in {self._cache}, where "
                f"{free / 2**20:.0f} MiB are free: free some, or set HF_HUB_CACHE to another disk."
            )

    @contextmanager
    def _explained(self) -> Iterator[None]:
        """Turns what huggingface_hub raises into _Unreachable, or ModelError with what to do."""
        repo = self._wanted.repo
        try:
            yield
        except GatedRepoError as error:
            raise ModelError(
                f"{repo} is given only to those who accepted its terms: accept them at "
                f"{endpoint()}/{repo}, and give a token with --hf-token or HF_TOKEN."
            ) from error
        except RepositoryNotFoundError as error:
            raise ModelError(
                f"{endpoint()} has no repository {repo} that you may read: check its name; a "
                "private one needs a token, by --hf-token or HF_TOKEN."
            ) from error
        except HfHubHTTPError as error:
            status = error.response.status_code
            if status >= 500:
                raise _Unreachable(f"it answered {status}") from error
            raise ModelError(
                f"{endpoint()} answered {status} for {repo}: check the name, the token and "
                "HF_ENDPOINT."
            ) from error
        except LocalEntryNotFoundError as error:
            raise _Unreachable(_reason(error.__cause__ or error)) from error
        except (httpx2.HTTPError, ConnectionError) as error:
            raise _Unreachable(_reason(error)) from error
        except (ValueError, TypeError, KeyError) as error:  # the log-in page of a network, say
            raise _Unreachable("what answers there is no Hub") from error
        except OSError as error:
            raise ModelError(
                f"Cannot write {repo} to {self._cache}: {error.strerror or _reason(error)}."
            ) from error


def _bar_class(add: Callable[[int], None]) -> type[HubBar]:
    """A progress bar that draws nothing and passes on what it counts."""

    class Counter(HubBar):
        def __init__(self, *args: Any, name: str | None = None, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs | {"disable": True})  # type: ignore[no-untyped-call]
            self._is_counted = not (name or "").endswith(".transfer")
            if self._is_counted and self.n:
                add(int(self.n))

        def update(self, n: float | None = 1) -> None:
            self.n += n or 0
            if self._is_counted:
                add(int(n or 0))

    return Counter


def _reason(error: BaseException) -> str:
    return (str(error) or type(error).__name__).splitlines()[0].rstrip(".")


def _part(blob: Path) -> Path:
    """What has arrived of a blob."""
    return blob.with_name(f"{blob.name}.part")


def _size(path: Path) -> int:
    """0 if there is no such file."""
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return 0


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
