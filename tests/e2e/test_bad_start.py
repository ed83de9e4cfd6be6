"""A start that cannot work ends with one clear sentence, and the store is as it was."""

from __future__ import annotations

import os
import re
import socket
import sqlite3
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from daemon import Daemon, run_towerd
from gguf import GGUFWriter

from towerd.errors import StoreError
from towerd.models.bundled import bundled_model
from towerd.store import Store, latest_row_identity
from towerd.store.catalog.schema import VERSION

SESSION = "kept"
MakeDaemon = Callable[..., Daemon]
Done = subprocess.CompletedProcess[str]


@pytest.fixture(scope="module")
def kept(tmp_path_factory: pytest.TempPathFactory) -> tuple[Daemon, list[int]]:
    """A stopped daemon whose store has one session, and that session's tokens."""
    daemon = Daemon(tmp_path_factory.mktemp("kept"))
    with daemon:
        headers = {"X-Towerd-Session": SESSION}
        body = {"prompt": "One day", "n_predict": 8}
        daemon.post("/completion", body, headers=headers)
        ids = daemon.session_ids(SESSION)
        assert daemon.stop() == 0
    return daemon, ids


@pytest.fixture
def fails(kept: tuple[Daemon, list[int]]) -> Callable[..., str]:
    """`fails(flag, ...)`: serve on the kept store, which has to fail; what it says. The store
    is checked afterwards."""
    daemon, ids = kept

    def run(*flags: str, status: int = 1, **env: str) -> str:
        done = serve(daemon, *flags, **env)
        said = last_words(done, status)
        with daemon.stored() as store:
            assert store.session_ids(SESSION).tolist() == ids
        return said

    return run


def serve(daemon: Daemon, *flags: str, **env: str) -> Done:
    return run_towerd(
        daemon.root,
        "serve",
        "--port",
        "0",
        "--store-dir",
        str(daemon.store_dir),
        "--socket",
        str(daemon.root / "second.sock"),
        *flags,
        **env,
    )


def last_words(done: Done, status: int = 1) -> str:
    """The one sentence on stderr after the log lines; no traceback, no other status."""
    assert done.returncode == status, done.stderr
    assert "Traceback" not in done.stderr
    said = [line for line in done.stderr.splitlines() if line.startswith("Error: ")]
    assert len(said) == 1, done.stderr
    assert done.stderr.rstrip().endswith(said[0]), "it is the last thing said"
    return said[0]


@pytest.mark.parametrize("share", [0.002, 0.01, 0.5, 0.99])
def test_truncated_gguf(fails: Callable[..., str], tmp_path: Path, share: float) -> None:
    """Cut in the header, in the metadata, in the tensors."""
    data = bundled_model().read_bytes()
    path = tmp_path / "cut.gguf"
    path.write_bytes(data[: int(len(data) * share)])
    said = fails("-m", str(path))
    assert str(path) in said
    assert re.search("download (it|the file) again", said)


@pytest.mark.parametrize("content", [b"", b"GG", b"%PDF-1.7 " * 500, os.urandom(10_000)])
def test_foreign_file(fails: Callable[..., str], tmp_path: Path, content: bytes) -> None:
    """A file of another kind."""
    path = tmp_path / "picture.gguf"
    path.write_bytes(content)
    assert f"{path} is not a GGUF file" in fails("-m", str(path))


def test_foreign_architecture(fails: Callable[..., str], tmp_path: Path) -> None:
    """A well-formed GGUF that this llama.cpp cannot run."""
    path = tmp_path / "strange.gguf"
    writer = GGUFWriter(path, "clockwork")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    said = fails("-m", str(path))
    assert str(path) in said
    assert "clockwork" in said


def test_a_header_that_is_cut_short(fails: Callable[..., str], tmp_path: Path) -> None:
    path = tmp_path / "part.gguf"
    path.write_bytes(bundled_model().read_bytes()[:3000])
    said = fails("-m", str(path))
    assert f"Error: {path} is damaged, its header cannot be read; download it again." in said


def test_a_version_of_tomorrow(fails: Callable[..., str], tmp_path: Path) -> None:
    """The file is whole: to download it again would not help."""
    path = tmp_path / "new.gguf"
    content = bundled_model().read_bytes()
    path.write_bytes(content[:4] + (99).to_bytes(4, "little") + content[8:])
    said = fails("-m", str(path))
    assert "is damaged" not in said
    assert "only supports up to version" in said


def test_missing_model(fails: Callable[..., str], tmp_path: Path) -> None:
    """A path that leads nowhere, and names that no model of this machine has."""
    assert f"There is no model at {tmp_path / 'no.gguf'}" in fails("-m", str(tmp_path / "no.gguf"))
    assert "There is no model no.gguf on this machine" in fails("-m", "no.gguf")
    assert "towerd serve -hf owner/no fetches it" in fails("-m", "owner/no")
    assert "run towerd models get owner/no once" in fails("-hf", "owner/no", "--offline")


def test_store_from_the_future(make_daemon: MakeDaemon) -> None:
    """A later schema is refused and not touched; going back to it finds everything."""
    daemon = make_daemon()
    with daemon:
        daemon.complete("One day")
        assert daemon.stop() == 0
    catalog = daemon.store_dir / "catalog.sqlite"
    set_version(catalog, VERSION + 1)
    before = catalog.read_bytes()
    said = last_words(serve(daemon))
    assert f"schema version {VERSION + 1}" in said
    assert "use a newer towerd" in said
    assert catalog.read_bytes() == before
    with pytest.raises(StoreError, match="schema version"):
        Store.open(daemon.store_dir, latest_row_identity)
    set_version(catalog, VERSION)
    with daemon.stored() as store:
        assert len(store.sessions()) == 1


def set_version(catalog: Path, version: int) -> None:
    db = sqlite3.connect(catalog)
    db.execute(f"PRAGMA user_version = {version}")
    db.commit()
    db.close()


def test_foreign_catalog(tmp_path: Path) -> None:
    """Another program's database, and a file that is not one, under the catalog's name."""
    daemon = Daemon(tmp_path)
    daemon.store_dir.mkdir()
    catalog = daemon.store_dir / "catalog.sqlite"
    db = sqlite3.connect(catalog)
    db.execute("CREATE TABLE recipes (name TEXT)")
    db.commit()
    db.close()
    assert "is not a towerd catalog" in last_words(serve(daemon))
    catalog.write_bytes(b"no database at all " * 500)
    assert str(catalog) in last_words(serve(daemon))
    assert catalog.read_bytes() == b"no database at all " * 500


def test_two_daemons(make_daemon: MakeDaemon) -> None:
    """The second is told who the first is; the first continues."""
    with make_daemon() as first:
        first.complete("One day")
        said = last_words(serve(first))
        assert f"process {first.pid}" in said
        assert str(first.store_dir) in said
        assert first.complete("One day")["timings"]["cache_n"] > 0
        assert first.stop() == 0
    with first.stored() as store:
        assert len(store.sessions()) == 1


def test_port_in_use(fails: Callable[..., str]) -> None:
    """The port is named, and what to do."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        said = fails("--port", str(port))
    assert f"Port {port} on 127.0.0.1 is in use" in said
    assert "--port" in said


def test_socket_in_use(make_daemon: MakeDaemon, tmp_path: Path) -> None:
    """A live daemon's socket is not taken over, another file under its name not replaced; what
    a killed daemon left is."""
    first, second = make_daemon(), make_daemon(name="second")
    with first:
        said = last_words(serve(second, "--socket", str(first.socket)))
        assert str(first.socket) in said
        assert "another daemon" in said
        first.kill()
        first.start()
    note = tmp_path / "note"
    note.write_text("mine")
    assert str(note) in last_words(serve(second, "--socket", str(note)))
    assert note.read_text() == "mine"


@pytest.mark.parametrize("below", ["", "inner"])
def test_store_directory_is_a_file(tmp_path: Path, below: str) -> None:
    """Neither it nor anything below it can hold a store."""
    path = tmp_path / "file"
    path.write_text("mine")
    done = serve(Daemon(tmp_path), "--store-dir", str(path / below))
    assert str(path / below) in last_words(done)
    assert path.read_text() == "mine"


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_store_directory_of_others(tmp_path: Path) -> None:
    """A directory without the right to write."""
    path = tmp_path / "theirs"
    path.mkdir(mode=0o500)
    assert "Permission denied" in last_words(serve(Daemon(tmp_path), "--store-dir", str(path)))


def test_unknown_flag(fails: Callable[..., str]) -> None:
    """With the nearest known one."""
    said = fails("--contxt-size", "4", status=2)
    assert "--contxt-size" in said
    assert "--ctx-size" in said


def test_unknown_choice(fails: Callable[..., str]) -> None:
    """With all that there are."""
    said = fails("--cache-type-k", "q3", status=2)
    assert "'q3' is not one of 'f32', 'f16'" in said
    said = fails(TOWERD_CACHE_TYPE_K="q3")
    assert "TOWERD_CACHE_TYPE_K must be one of f32, f16" in said


def test_unknown_setting(fails: Callable[..., str], tmp_path: Path) -> None:
    """In the file and in the environment, with its place and the nearest known one."""
    path = tmp_path / "towerd.toml"
    path.write_text("ctx_siz = 4\n")
    said = fails("--config", str(path))
    assert re.search(r"ctx_siz in .*towerd\.toml: did you mean ctx_size\?", said)
    said = fails(TOWERD_CTX_SIZ="4")
    assert "TOWERD_CTX_SIZ in the environment: did you mean TOWERD_CTX_SIZE?" in said


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (("--ctx-size", "many"), "--ctx-size must be a whole number"),
        (("--port", "70000"), "--port must be at most 65535"),
        (("--hot-bytes", "8 apples"), "--hot-bytes must be a size"),
        (("--host", "0.0.0.0"), "--api-key"),
        (("--live-tokens", "256", "--ctx-size", "512"), "--live-tokens"),
    ],
)
def test_wrong_value(fails: Callable[..., str], flags: tuple[str, ...], words: str) -> None:
    """Values that cannot be meant, alone or together."""
    assert words in fails(*flags)


def test_wrong_variable(fails: Callable[..., str]) -> None:
    """The variable is named, not the flag."""
    assert "TOWERD_PARALLEL must be a whole number" in fails(TOWERD_PARALLEL="two")
