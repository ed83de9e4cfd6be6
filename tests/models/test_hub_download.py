"""Fetching from a server that speaks the Hub's API: resuming, tokens, no network, damage."""

from __future__ import annotations

import logging
import os
import shutil
from collections import namedtuple
from collections.abc import Iterator
from pathlib import Path

import pytest
from hub_server import HubServer, hub_server

from towerd.errors import ModelError
from towerd.models.hub.cache import HubModel
from towerd.models.hub.choice import RepoName
from towerd.models.hub.download import Watcher, fetch

REPO = "owner/tiny-GGUF"
MODEL = os.urandom(3 << 20)
FILES = {
    "README.md": b"#",
    "tiny-Q4_K_M.gguf": MODEL,
    "tiny-Q8_0.gguf": MODEL[::-1],
    "tiny-F16-00001-of-00002.gguf": b"one",
    "tiny-F16-00002-of-00002.gguf": b"two",
    "mmproj-tiny-F16.gguf": b"eyes",
}


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[HubServer]:
    """The Hub, with an empty cache on this side."""
    with hub_server() as server:
        server.repos[REPO] = dict(FILES)
        monkeypatch.setenv("HF_ENDPOINT", server.url)
        monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "cache"))
        for name in ("HF_TOKEN", "HF_HUB_OFFLINE"):
            monkeypatch.delenv(name, raising=False)
        yield server


def get(wanted: str = REPO, **options: object) -> HubModel:
    return fetch(RepoName.parse(wanted), **options)  # type: ignore[arg-type]


def test_what_is_needed_is_fetched_once(hub: HubServer) -> None:
    """The chosen model and its projector, with the progress told, and nothing the second time."""
    said: list[tuple[str, int]] = []
    counted: list[int] = []
    found = get(watcher=Watcher(lambda *args: said.append(args), counted.append))
    assert found.name == f"{REPO}:Q4_K_M"
    assert found.path.read_bytes() == MODEL
    assert found.projector is not None
    assert found.projector.read_bytes() == b"eyes"
    assert sorted(name for name, _ in hub.downloads) == ["mmproj-tiny-F16.gguf", "tiny-Q4_K_M.gguf"]
    assert said == [(REPO, len(MODEL) + 4)]
    assert sum(counted) == len(MODEL) + 4
    hub.downloads.clear()
    assert get() == found
    assert hub.downloads == []


def test_a_cache_that_is_only_read(hub: HubServer, tmp_path: Path) -> None:
    """A model that is here needs no write; nor does it fail if the commit cannot be noted."""
    found = get()
    (refs,) = (tmp_path / "cache").rglob("refs")
    before = (refs / "main").stat().st_ino
    get()
    assert (refs / "main").stat().st_ino == before
    shutil.rmtree(refs)
    refs.write_text("no folder can be made here")
    assert get() == found
    shutil.rmtree(found.path.parent)
    with pytest.raises(ModelError, match=f"Cannot write {REPO}"):
        get()


def test_split_files_come_together(hub: HubServer) -> None:
    found = get(f"{REPO}:F16", with_projector=False)
    assert found.projector is None
    second = found.path.with_name("tiny-F16-00002-of-00002.gguf")
    assert found.path.read_bytes() + second.read_bytes() == b"onetwo"


@pytest.mark.parametrize("is_another_start", [False, True])
def test_a_cut_download_is_resumed(
    hub: HubServer, is_another_start: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From the byte where it ended, not from the first: at once, or when the Hub is back."""
    monkeypatch.setattr("huggingface_hub.constants.DOWNLOAD_CHUNK_SIZE", 1 << 16)
    hub.cut_at, hub.is_down_when_cut = 1 << 20, is_another_start
    if is_another_start:
        with pytest.raises(ModelError, match="it answered 503"):
            get(with_projector=False)
        hub.is_down = False
    counted: list[int] = []
    found = get(with_projector=False, watcher=Watcher(add=counted.append))
    assert found.path.read_bytes() == MODEL
    assert sum(counted) == len(MODEL)
    ranges = [asked for name, asked in hub.downloads if name == "tiny-Q4_K_M.gguf"]
    assert ranges[0] == ""
    assert 0 < int(ranges[-1].removeprefix("bytes=").rstrip("-")) <= 1 << 20


def test_what_is_here_takes_no_more_space(
    hub: HubServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither the beginning of a cut download, nor what an earlier commit has, too."""
    monkeypatch.setattr("huggingface_hub.constants.DOWNLOAD_CHUNK_SIZE", 1 << 16)
    hub.cut_at, hub.is_down_when_cut = 1 << 20, True
    with pytest.raises(ModelError, match="it answered 503"):
        get(with_projector=False)
    hub.is_down = False
    (part,) = (tmp_path / "cache").rglob("*.part")
    rest = len(MODEL) - part.stat().st_size
    assert rest < len(MODEL)
    usage = namedtuple("usage", "free")
    monkeypatch.setattr("shutil.disk_usage", lambda path: usage(rest - 1))
    with pytest.raises(ModelError, match="takes 2 MiB in .* are free"):
        get(with_projector=False)
    monkeypatch.setattr("shutil.disk_usage", lambda path: usage(rest))
    get(with_projector=False)
    hub.commit = "3" * 40
    hub.downloads.clear()
    monkeypatch.setattr("shutil.disk_usage", lambda path: usage(0))
    assert get(with_projector=False).path.read_bytes() == MODEL
    assert hub.downloads == []


def test_damage_on_the_way_is_found(hub: HubServer, tmp_path: Path) -> None:
    hub.spoils = True
    with pytest.raises(ModelError, match="arrived damaged"):
        get(with_projector=False)
    hub.spoils = False
    assert get(with_projector=False).path.read_bytes() == MODEL


def test_a_repository_that_needs_a_token(hub: HubServer) -> None:
    hub.gated.add(REPO)
    with pytest.raises(
        ModelError, match="accept them at .*give a token with --hf-token or HF_TOKEN"
    ):
        get()
    assert get(token=hub.token).path.read_bytes() == MODEL


def test_no_such_repository(hub: HubServer) -> None:
    with pytest.raises(ModelError, match="has no repository owner/other that you may read"):
        get("owner/other")


def test_offline_takes_what_is_here(hub: HubServer, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(
        ModelError, match=f"offline nothing is fetched: run towerd models get {REPO}"
    ):
        get(offline=True)
    found = get()
    hub.downloads.clear()
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert get() == get(offline=True) == found
    with pytest.raises(ModelError, match="Q8_0 is not on this machine"):
        get(f"{REPO}:Q8_0")
    assert hub.downloads == []


@pytest.mark.parametrize(
    "how", ["down", "gone", "<html>", "[]", '{"sha": 5}', '{"id": "a", "sha": "b"}']
)
def test_a_hub_that_does_not_answer(
    hub: HubServer, how: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """What was fetched is served with a warning; what was not is one sentence."""
    found = get()
    hub.is_down = how == "down"
    hub.page = how.encode() if how[0] in "<[{" else None
    if how == "gone":
        monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:1")
    with caplog.at_level(logging.WARNING, "towerd"):
        assert get() == found
    assert "as it was fetched" in caplog.text
    with pytest.raises(ModelError, match="Cannot reach http://127.0.0.1.* check the network"):
        get("owner/other")


def test_a_newer_commit_replaces_the_model_when_it_is_whole(hub: HubServer) -> None:
    """Without a network the old one is served until the new one was fetched."""
    old = get(with_projector=False)
    hub.commit = "3" * 40
    hub.repos[REPO]["tiny-Q4_K_M.gguf"] = MODEL[1:]
    hub.spoils = True
    with pytest.raises(ModelError):
        get(with_projector=False)
    assert get(offline=True, with_projector=False) == old
    hub.spoils = False
    assert get(with_projector=False).path.read_bytes() == MODEL[1:]
