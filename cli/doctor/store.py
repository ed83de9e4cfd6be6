"""Checks of the store and the daemon, which disturb neither."""

from __future__ import annotations

import fcntl
import os
import shutil
import sqlite3
from contextlib import closing
from pathlib import Path

from towerd.cli.client.target import listens
from towerd.cli.doctor.check import Check, Finding, fail, ok, warn
from towerd.cli.doctor.machine import existing
from towerd.cli.output import size
from towerd.errors import TowerdError
from towerd.settings.config import Config
from towerd.store.catalog.database import CatalogFile
from towerd.store.catalog.schema import APPLICATION_ID, VERSION
from towerd.store.encryption.opening import opened_vault
from towerd.store.state.probes import CHANGED, RENEWING

NOT_YET = "not there yet; the first start makes it"
RESTORE = "Put a backup in its place, or move the store directory away to begin with an empty one."
RECODE = (
    "The daemon codes conversations again while nothing else runs; those without token ids are read as "
    "text with towerctl sessions show, and get them when a client sends them."
)
REBUILD = "The next start, or towerctl verify without a daemon, rebuilds it from its journal."


def daemon(config: Config) -> Finding:
    """Whether a daemon is running."""
    from towerd.cli.client.api_client import ApiClient

    assert config.socket is not None
    if not listens(config.socket):
        return ok(f"none listens on {config.socket}")
    with ApiClient.at_socket(config.socket) as backend:
        if (models := backend.routed()) is not None:
            n = sum(model["status"]["value"] == "loaded" for model in models)
            broker = next(each["pid"] for each in backend.processes() if each["is_broker"])
            return ok(
                f"a router at {config.socket}, {n} of {len(models)} models are loaded; process {broker} "
                "has the catalog for all of them"
            )
        stats = backend.stats()
    engine = stats["engine"]
    found = f"serves {stats['model']} at {config.socket}"
    if not engine.get("can_slice", True):
        return warn(found, f"Stored reuse is off for this model: {engine['why_not_sliceable']}.")
    return ok(found)


def directory(config: Config) -> Finding:
    """The access rights of the store directory."""
    root = config.store_dir
    if not os.path.exists(root):
        above = existing(root)
        if not os.access(above, os.W_OK | os.X_OK):
            return fail(f"{above} cannot be written", "Choose another place with --store-dir.")
        return ok(f"{root}, {NOT_YET}")
    if not root.is_dir():
        return fail(f"{root} is not a directory", "Choose another place with --store-dir.")
    info = root.stat()
    if info.st_uid != os.getuid():
        return fail(f"{root} belongs to another user", "Choose another place with --store-dir.")
    if not os.access(root, os.W_OK | os.X_OK):
        return fail(f"{root} cannot be written", f"Run `chmod 700 {root}`.")
    mode = info.st_mode & 0o777
    if mode & 0o077:
        return warn(
            f"{root} is open to other users (mode {mode:o})",
            f"Conversations are in it: run `chmod 700 {root}`.",
        )
    return ok(f"{root}, mode {mode:o}")


def lock(config: Config) -> Finding:
    """Which process has the store open."""
    path = config.store_dir / "lock"
    if not path.exists():
        return ok("free")
    fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        owner = os.pread(fd, 32, 0).decode("ascii", "replace").strip()
        if config.socket is not None and listens(config.socket):
            return ok(f"held by process {owner}, the daemon")
        return warn(
            f"held by process {owner}, which does not listen on {config.socket}",
            "Ask it with --socket or --url, or stop it.",
        )
    finally:
        os.close(fd)
    return ok("free")


def catalog(config: Config) -> Finding:
    """The catalog's schema version, and SQLite's quick check of it."""
    path = config.store_dir / "catalog.sqlite"
    if not path.exists():
        return _missing_catalog(config.store_dir)
    advice = REBUILD if _bytes_in(config.store_dir / "journal") else RESTORE
    # Without a WAL there is no writer; a plain read-only connection would leave side files behind.
    how = "mode=ro" if path.with_name(path.name + "-wal").exists() else "immutable=1"
    try:
        vault = opened_vault(config.store_dir, config.encrypt)
    except TowerdError as error:
        return warn("it is encrypted, and was not checked", error.message)
    if vault is not None and vault.is_encrypting:
        return warn("it is being encrypted", "The next start of the daemon continues.")
    try:
        with closing(CatalogFile(path, vault).connect_reader(how)) as db:
            owner = int(db.execute("PRAGMA application_id").fetchone()[0])
            version = int(db.execute("PRAGMA user_version").fetchone()[0])
            if owner != APPLICATION_ID:
                return fail(f"{path} is not a towerd catalog", "Choose another --store-dir.")
            if version > VERSION:
                return fail(
                    f"schema version {version}, this towerd knows up to {VERSION}",
                    "Use a newer towerd, or another store with --store-dir.",
                )
            changed = _tokenizers_changed(db)
            said = [str(row[0]) for row in db.execute("PRAGMA quick_check(5)")]
    except sqlite3.Error as error:
        return fail(f"{path}: {error}", advice)
    if said != ["ok"]:
        return fail("; ".join(said), advice)
    if changed:
        return warn(f"schema version {version}, quick_check ok; {changed}", RECODE)
    return ok(f"schema version {version}, quick_check ok, {size(path.stat().st_size)}")


def _tokenizers_changed(db: sqlite3.Connection) -> str:
    """What is left of coded conversations since another llama.cpp cut text into other tokens; empty
    if nothing is."""
    rows = db.execute(
        "SELECT value FROM meta WHERE key >= ? AND key < ? || '~' AND value != '0'",
        (CHANGED, CHANGED),
    )
    values = [str(row[0]) for row in rows]
    if RENEWING in values:
        return "this llama.cpp cuts text into other tokens than an earlier one"
    n_text = sum(int(value) for value in values if value.isdecimal())
    if n_text:
        return f"llama.cpp changed, and {n_text} coded conversations have no token ids here"
    return ""


def _missing_catalog(root: Path) -> Finding:
    if _bytes_in(root / "journal"):
        return warn(f"{root / 'catalog.sqlite'} is missing", REBUILD)
    if _bytes_in(root / "segments"):
        return fail(f"{root / 'catalog.sqlite'} is missing beside segment files", RESTORE)
    return ok(NOT_YET)


def space(config: Config) -> Finding:
    """Whether the budget for rows on disk fits the disk."""
    folder = config.store_dir / "segments"
    used = _bytes_in(folder)
    free = shutil.disk_usage(existing(config.store_dir)).free
    found = f"{size(used)} of --warm-bytes {size(config.warm_bytes)} used, {size(free)} free"
    if config.warm_bytes > used + free:
        most = max(0, used + free // 2)
        return warn(found, f"The disk is full before the budget is: set --warm-bytes {size(most)}.")
    return ok(found)


def quarantine(config: Config) -> Finding:
    """Damaged files that were quarantined."""
    folder = config.store_dir / "quarantine"
    n = len(list(folder.iterdir())) if folder.is_dir() else 0
    if n:
        return warn(
            f"{n} damaged files were set aside",
            "Nothing is lost, their tokens are evaluated again; but check this disk and its RAM.",
        )
    return ok("empty")


def _bytes_in(folder: Path) -> int:
    if not folder.is_dir():
        return 0
    with os.scandir(folder) as entries:
        return sum(entry.stat(follow_symlinks=False).st_size for entry in entries)


CHECKS = (
    Check("store", "daemon", daemon),
    Check("store", "directory", directory),
    Check("store", "lock", lock),
    Check("store", "catalog", catalog),
    Check("store", "space", space),
    Check("store", "quarantine", quarantine),
)
