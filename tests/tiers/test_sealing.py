"""Keys, sealed objects, and the bucket's errors in one sentence."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF
from hypothesis import given
from hypothesis import strategies as st

from towerd.errors import ConfigError
from towerd.settings.config import Config
from towerd.slots.errors import StateError
from towerd.tiers.shared.bucket import BucketError, ObjectMissing, open_bucket
from towerd.tiers.shared.naming import behind_naming
from towerd.tiers.shared.sealing import SEAL_BYTES, TenantKeys, master_key

MASTER = bytes(range(32))
KEYS = TenantKeys.of(MASTER, "local")


@given(data=st.binary(max_size=200), at=st.integers(0, 10**6), bit=st.integers(0, 7))
def test_a_sealed_object_is_whole_or_refused(data: bytes, at: int, bit: int) -> None:
    """It opens at its own place with its tenant's key alone, and no bit of it can change."""
    sealed = KEYS.seal("a/b", data)
    assert len(sealed) == len(data) + SEAL_BYTES
    assert KEYS.unseal("a/b", sealed) == data
    assert KEYS.seal("a/b", data) != sealed
    changed = bytearray(sealed)
    changed[at % len(sealed)] ^= 1 << bit
    other = TenantKeys.of(MASTER, "other")
    for keys, place, bad in (
        (KEYS, "a/b", bytes(changed)),
        (KEYS, "a/b", sealed[: at % len(sealed)]),
        (KEYS, "a/b", sealed + b"\0"),
        (KEYS, "a/c", sealed),
        (other, "a/b", sealed),
    ):
        with pytest.raises(StateError):
            keys.unseal(place, bad)


def test_what_is_sealed_is_what_the_protocol_says() -> None:
    """docs/shared.md, by the library alone: whoever has the key file can read the objects without towerd."""

    def derived(key: bytes, salt: bytes, info: bytes) -> bytes:
        return HKDF(SHA256(), 32, salt, info).derive(key)

    sealed = KEYS.seal("place", b"text")
    own = derived(MASTER, b"seals", b"towerd shared local")
    key = derived(own, sealed[5:37], b"towerd shared object")
    assert sealed[:5] == b"TWRX\x01"
    assert AESGCM(key).decrypt(bytes(12), sealed[37:], b"place") == b"text"


def test_names_tell_nothing() -> None:
    """The same for the same, another for anything else; parts cannot pass for others."""
    names = {
        keys.name(*parts)
        for keys in (KEYS, TenantKeys.of(MASTER, "other"), TenantKeys.of(bytes(32), "local"))
        for parts in (("a", b"b", b"c"), ("a", b"bc"), ("a", b"bc", b""), ("ab", b"c"))
    }
    assert len(names) == 12
    assert KEYS.name("a", b"b") == TenantKeys.of(MASTER, "local").name("a", b"b")


def test_key_file(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Made once, for its owner alone; copied to another machine it gives the same key. What is no key is
    refused in one sentence that shows nothing of it."""
    made = master_key(None, tmp_path)
    own = tmp_path / "shared.key"
    assert master_key(None, tmp_path) == made == bytes.fromhex(own.read_text())
    assert own.stat().st_mode & 0o777 == 0o600
    assert "a new key for the shared tier was made" in caplog.text
    assert made.hex() not in caplog.text
    assert list(tmp_path.iterdir()) == [own]
    assert "other users can read" not in caplog.text
    own.chmod(0o644)
    assert master_key(None, tmp_path) == made
    assert "other users can read the key of the shared tier: chmod 600" in caplog.text
    assert master_key(own, tmp_path / "elsewhere") == made
    with pytest.raises(ConfigError, match="cannot be read: No such file"):
        master_key(tmp_path / "none", tmp_path)
    for text in ("", "secret words", made.hex()[:-2], made.hex() + "00", "\xe9"):
        own.write_text(text)
        with pytest.raises(ConfigError, match="does not hold a key") as caught:
            master_key(None, tmp_path)
        assert not text or text not in caught.value.message


def test_a_folder_as_a_bucket(tmp_path: Path) -> None:
    """An object is made once; what there is not is said."""
    with pytest.raises(ConfigError, match="there is no folder"):
        open_bucket(f"file://{tmp_path}/a/b%20c")
    (tmp_path / "a").mkdir()
    bucket = open_bucket(f"file://{tmp_path}/a/b%20c")
    assert bucket.put("x/y", b"1") is True
    assert bucket.put("x/y", b"2") is False
    assert (tmp_path / "a" / "b c" / "x" / "y").read_bytes() == b"1"
    assert bytes(bucket.get("x/y", 1)) == b"1"
    assert (bucket.has("x/y"), bucket.has("x/z")) == (True, False)
    assert [each.place for each in bucket.listing("x")] == ["x/y"]
    assert bucket.listing("z") == []
    with pytest.raises(ObjectMissing, match="no such object"):
        bucket.get("x/z", 1)
    (tmp_path / "a" / "b c" / "x" / "y").write_bytes(b"12")
    with pytest.raises(BucketError, match="2 bytes; up to 1"):
        bucket.get("x/y", 1)


def test_a_store_that_cannot_be_reached(monkeypatch: pytest.MonkeyPatch) -> None:
    """One sentence, without the keys of the environment."""
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        port = closed.getsockname()[1]
        for name, value in {
            "AWS_ENDPOINT_URL": f"http://127.0.0.1:{port}",
            "AWS_ALLOW_HTTP": "true",
            "AWS_ACCESS_KEY_ID": "some-id",
            "AWS_SECRET_ACCESS_KEY": "a-secret",
            "AWS_REGION": "nowhere",
        }.items():
            monkeypatch.setenv(name, value)
        bucket = open_bucket("s3://bucket/prefix")
        for ask in (
            lambda: bucket.get("a", 1),
            lambda: bucket.has("a"),
            lambda: bucket.put("a", b""),
        ):
            with pytest.raises(BucketError) as caught:
                ask()
            said = caught.value.message
            assert "\n" not in said
            assert "a-secret" not in said
            assert "some-id" not in said


@pytest.mark.parametrize(
    ("url", "why"),
    [
        ("bucket", "takes a URL such as s3://"),
        ("ftp://bucket/a", "takes a URL such as s3://"),
        ("s3://", "takes a URL such as s3://"),
        ("file://folder", "takes an absolute path"),
        ("s3://key:secret@bucket/a", "without credentials"),
        ("az://account/container?sig=secret", "without credentials"),
    ],
)
def test_urls(url: str, why: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=why) as caught:
        Config(shared=url, store_dir=tmp_path, socket=tmp_path / "s")
    assert "secret" not in caught.value.message


def test_a_key_without_a_store(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="there is none"):
        Config(shared_key=tmp_path / "k", store_dir=tmp_path, socket=tmp_path / "s")


def test_nothing_of_it_is_imported_without_it() -> None:
    """Nor are the packages that it takes."""
    code = (
        "import sys, towerd.app.daemon, towerd.service, towerd.app.store_app, towerd.cli.sessions.shared\n"
        "found = [name for name in sys.modules if name.split('.')[0] in ('obstore', 'cryptography')"
        " or name.startswith(('towerd.tiers.shared', 'towerd.roaming'))]\n"
        "assert not found, found"
    )
    subprocess.run([sys.executable, "-c", code], check=True, env=os.environ)


def test_an_object_of_the_first_version_of_the_protocol() -> None:
    keys = TenantKeys.of(bytes(32), "local")
    assert behind_naming(keys, "sessions/a/b", keys.seal("sessions/a/b", b"text")) == b"text"
    with pytest.raises(StateError, match="damaged"):
        behind_naming(keys, "sessions/a/c", keys.seal("sessions/a/b", b"text"))
