"""The slot directory: private, single-use names, nothing left behind, no links followed."""

from __future__ import annotations

import shutil
import stat
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from towerd.engine.llama_server.slot_files.slotdir import PREFIX, SlotDir
from towerd.errors import ConfigError, DiskFull


@pytest.fixture
def slotdir(tmp_path: Path) -> SlotDir:
    return SlotDir.private(tmp_path)


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def files(slotdir: SlotDir) -> set[str]:
    return {path.name for path in slotdir.path.iterdir()} - {"lock"}


def write(slotdir: SlotDir, data: bytes) -> str:
    name = slotdir.new_name()
    with slotdir.writing(name, len(data)) as out:
        out[:] = np.frombuffer(data, np.uint8)
    return name


def test_only_we_can_read_it(slotdir: SlotDir) -> None:
    """The directory is 0700, its files 0600."""
    name = write(slotdir, b"state")
    assert mode(slotdir.path) == 0o700
    assert mode(slotdir.path / name) == 0o600
    assert (slotdir.path / name).read_bytes()[:5] == b"state"


def test_names_are_for_one_use(slotdir: SlotDir) -> None:
    """No two are the same, and taking a file takes its name away."""
    names = {slotdir.new_name() for _ in range(100)}
    assert len(names) == 100
    assert all(name.startswith(PREFIX) and len(name) >= 32 for name in names)
    name = write(slotdir, b"state")
    (slotdir.path / "saved").write_bytes(b"saved")
    taken = slotdir.take("saved")
    slotdir.remove(name)
    assert not {name, "saved"} & files(slotdir)
    assert taken.tobytes() == b"saved"
    with pytest.raises(FileNotFoundError):
        slotdir.take("saved")


def test_pages_are_used_again(slotdir: SlotDir) -> None:
    """A file that was read is kept under another name, and taken for the next one that fits."""
    first = write(slotdir, b"x" * 3000)
    inode = (slotdir.path / first).stat().st_ino
    slotdir.remove(first)
    second = write(slotdir, b"y" * 2000)
    assert second != first
    assert (slotdir.path / second).stat().st_ino == inode
    assert (slotdir.path / second).read_bytes()[:2000] == b"y" * 2000
    slotdir.remove(second)
    write(slotdir, b"z" * (2 << 20))
    assert len(files(slotdir)) == 1  # the small one made way
    for _ in range(5):
        slotdir.remove(write(slotdir, b"1"))
    assert len(files(slotdir)) <= 3


def test_an_interrupted_file_leaves_nothing(slotdir: SlotDir) -> None:
    """Neither under its name nor under another."""
    with pytest.raises(ValueError, match="broadcast"), slotdir.writing("x", 100) as out:
        out[:] = np.zeros(50, np.uint8)
    assert not files(slotdir)


def test_a_full_directory_is_an_error(slotdir: SlotDir) -> None:
    """Not a killed process, as writing to a sparse file on a full RAM disk would be."""
    size = shutil.disk_usage(slotdir.path).free + (1 << 34)
    with pytest.raises(DiskFull), slotdir.writing(slotdir.new_name(), size):
        pytest.fail("there cannot be so much room")
    assert not files(slotdir)


def test_links_are_not_followed(slotdir: SlotDir, tmp_path: Path) -> None:
    """A name that another process made into a link or a directory is refused."""
    secret = tmp_path / "secret"
    secret.write_bytes(b"secret")
    name = slotdir.new_name()
    (slotdir.path / name).symlink_to(secret)
    with pytest.raises(OSError, match="symbolic"):
        slotdir.take(name)
    (slotdir.path / name).unlink(missing_ok=True)
    (slotdir.path / name).mkdir()
    with pytest.raises(OSError, match="regular"):
        slotdir.take(name)
    assert secret.read_bytes() == b"secret"


def test_it_goes_with_us(slotdir: SlotDir) -> None:
    """A directory of our own is removed, a shared one is only emptied of our files."""
    write(slotdir, b"state")
    slotdir.close()
    assert not slotdir.path.exists()


def test_what_a_killed_daemon_left(tmp_path: Path) -> None:
    """Its directory is removed by the next one; that of a living one is not touched."""
    living = SlotDir.private(tmp_path)
    code = "import sys, os, pathlib; from towerd.engine.llama_server.slot_files.slotdir import SlotDir\n"
    code += (
        "made = SlotDir.private(pathlib.Path(sys.argv[1])); (made.path / made.new_name()).touch()"
    )
    subprocess.run([sys.executable, "-c", code + "; os._exit(9)", tmp_path], check=False)
    assert len(list(tmp_path.iterdir())) == 2
    third = SlotDir.private(tmp_path)
    assert {path for path in tmp_path.iterdir() if path.is_dir()} == {living.path, third.path}


def test_a_shared_directory(tmp_path: Path) -> None:
    """What an earlier daemon left is removed, what is not ours stays."""
    path = tmp_path / "shared"
    path.mkdir(mode=0o700)
    (path / "theirs").write_bytes(b"x")
    (path / (PREFIX + "old")).write_bytes(b"x")
    shared = SlotDir.shared(path)
    assert shared.sweep() == 1
    write(shared, b"state")
    shared.close()
    assert [each.name for each in path.iterdir()] == ["theirs"]


def test_bad_shared_directories(tmp_path: Path) -> None:
    """Missing, a file, or open to others: each says what to do."""
    with pytest.raises(ConfigError, match="No such file"):
        SlotDir.shared(tmp_path / "missing")
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(ConfigError, match="not a directory"):
        SlotDir.shared(tmp_path / "file")
    (tmp_path / "open").mkdir(mode=0o755)
    (tmp_path / "open").chmod(0o755)
    with pytest.raises(ConfigError, match="chmod 700"):
        SlotDir.shared(tmp_path / "open")
    with pytest.raises(ConfigError, match="--slot-dir"):
        SlotDir.private(tmp_path / "missing")


def test_the_default_is_in_ram() -> None:
    """Where the machine has a RAM disk with room; a disk is reported."""
    slotdir = SlotDir.private()
    try:
        ram = Path("/dev/shm")
        roomy = ram.is_dir() and shutil.disk_usage(ram).free >= 1 << 30
        assert slotdir.in_ram or not roomy
    finally:
        slotdir.close()
