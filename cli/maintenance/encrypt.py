"""`towerctl encrypt`: encrypt a store, or change what opens it."""

from __future__ import annotations

import os
import sys
import time
from contextlib import ExitStack
from pathlib import Path

import click

from towerd.cli.client.target import Target
from towerd.errors import ConfigError


@click.command()
@click.argument("source", metavar="keyring|passphrase|file:PATH")
@click.option("--store-dir", help="The store; default: the one that towerd serve uses.")
def encrypt(source: str, store_dir: str | None) -> None:
    """Encrypt the store with a key from SOURCE; if it is encrypted, let that open it from now on, and nothing else.

    No daemon may have it open. A new passphrase is asked for, or comes from TOWERD_NEW_PASSPHRASE."""
    config = Target(store_dir=store_dir).config()
    root = config.store_dir
    if not root.is_dir():
        raise ConfigError(f"There is no store at {root}: name one with --store-dir.")
    from towerd.store.encryption.opening import is_encrypted

    if is_encrypted(root):
        _change(root, source)
        click.echo(f"{root} is opened by {source} now; the earlier key no longer opens it.")
    else:
        _encrypt(root, source)
        click.echo(f"{root} is encrypted, and opened by {source}; keep a copy of that key.")


def _encrypt(root: Path, source: str) -> None:
    from towerd.store.catalog.owner import own_store

    with ExitStack() as undo:
        own_store(root, time.time, source, undo)


def _change(root: Path, source: str) -> None:
    from towerd.store.encryption.opening import own_directory

    with ExitStack() as undo:
        opened = own_directory(root, time.time, None, undo)
        from towerd.store.encryption.key_source import PASSPHRASE_VARIABLE, KeySource
        from towerd.store.files import durable

        assert opened.vault is not None
        if sys.stdin is not None and sys.stdin.isatty():
            os.environ.pop(PASSPHRASE_VARIABLE, None)  # so that the new one is asked for
        with durable.store_errors("the keys of the store cannot be written"):
            opened.vault.change_source(KeySource.parse(source))
