"""`towerctl export`, `import` and `read`: sessions as `.tower` files."""

from __future__ import annotations

import os
import re
import tempfile
from contextlib import suppress
from dataclasses import replace
from http import HTTPStatus
from pathlib import Path
from types import ModuleType
from typing import Any

import click

from towerd.cli.client.target import Target, connect, json_option, setting_option, target_options
from towerd.cli.client.transport import Json, RemoteError
from towerd.errors import ConfigError, TowerdError

SUFFIX = ".tower"
BOXED = b"TOWERX"
"""How encrypted files begin."""
NAME_CHARS_MAX = 100
_UNUSUAL = re.compile(r"[^A-Za-z0-9._-]")


@click.command()
@click.argument("session")
@click.option(
    "--output",
    "-o",
    type=click.Path(path_type=Path),
    help="The file to write; default: the session's id with .tower after it.",
)
@click.option(
    "--encrypt",
    is_flag=True,
    help="Seal the file with a passphrase, from TOWERD_FILE_PASSPHRASE or the terminal.",
)
@click.option("--no-media", is_flag=True, help="Leave its pictures and sounds out.")
@click.option("--force", is_flag=True, help="Overwrite an existing file.")
@click.option("--scope", metavar="TENANT", help="Whose, if several tenants have one of this name.")
@setting_option("model")
@json_option
@target_options
def export(
    session: str,
    output: Path | None,
    encrypt: bool,
    no_media: bool,
    force: bool,
    scope: str | None,
    model: str | None,
    as_json: bool,
    target: Target,
) -> None:
    """Write the whole history of SESSION to a file that another machine can import."""
    from towerd.cli.output import echo_json, size

    with connect(replace(target, model=model)) as backend:
        session = backend.whole_id(session, scope)
        path = output if output is not None else Path(file_name(session))
        _check_place(path, force)
        data, media = backend.export_session(session, scope, with_media=not no_media)
    if encrypt:
        data = _boxes().boxed(data, path.name)
    _write(path, data, force)
    if as_json:
        echo_json({"session": session, "file": str(path), "bytes": len(data), "media": media})
        return
    n, n_left = media.get("carried", 0), media.get("left_out", 0)
    carried = f", with {_media(n)}" if n else ""
    click.echo(f"Wrote {path} ({size(len(data))}{carried}); towerctl import reads it.")
    if n_left:
        click.echo(
            f"Left out {_media(n_left)}: damaged here, which towerctl verify tells, or more than a file carries."
        )


def file_name(session: str) -> str:
    """The default name of a session's file: its id, without characters that need quoting."""
    name = _UNUSUAL.sub("_", session)[:NAME_CHARS_MAX]
    return (name if not name.startswith((".", "-")) else f"_{name[1:]}") + SUFFIX


def _check_place(path: Path, force: bool) -> None:
    """Raises ConfigError if the file must not be written, before anything is requested."""
    if path.is_dir():
        raise ConfigError(f"{path} is a directory: name a file with -o.")
    if not path.parent.is_dir():
        raise ConfigError(f"There is no directory {path.parent}: make it, or name another with -o.")
    if os.path.lexists(path) and not force:
        raise ConfigError(f"{path} exists: overwrite it with --force, or name another with -o.")


def _write(path: Path, data: bytes, force: bool) -> None:
    """Write the file atomically, readable by its owner only. Raises TowerdError."""
    try:
        fd, name = tempfile.mkstemp(SUFFIX, f".{path.name[:NAME_CHARS_MAX]}.", path.parent)
        try:
            with os.fdopen(fd, "wb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            _check_place(path, force)  # it may have appeared since
            os.replace(name, path)
        except BaseException:
            with suppress(OSError):
                os.unlink(name)
            raise
    except OSError as error:
        raise TowerdError(f"{path} cannot be written: {error.strerror or error}.") from error


@click.command("import")
@click.argument(
    "files", metavar="FILE...", nargs=-1, required=True, type=click.Path(path_type=Path)
)
@click.option("--no-media", is_flag=True, help="Leave their pictures and sounds out.")
@click.option("--scope", metavar="TENANT", help="For this tenant; default: the caller's.")
@setting_option("model")
@json_option
@target_options
def import_(
    files: tuple[Path, ...],
    no_media: bool,
    scope: str | None,
    model: str | None,
    as_json: bool,
    target: Target,
) -> None:
    """Import the session of each FILE that towerctl export wrote."""
    from towerd.cli.output import echo_json, progress_lines

    imported: list[Json] = []
    with connect(replace(target, model=model)) as backend, progress_lines(quiet=as_json) as lines:
        task = lines.add_task("importing", total=len(files))
        for path in files:
            data = _read(path)
            if no_media:
                from towerd import tower_file

                data = tower_file.without_media(data)
            try:
                found = backend.import_session(data, scope, with_media=not no_media)
            except TowerdError as error:
                without = "" if no_media else _without_media(error)
                message = error.message.rstrip(".") if without else error.message
                raise TowerdError(f"{path}: {message}{without}") from error
            imported.append({"file": str(path), **found})
            lines.advance(task)
            if not as_json:
                click.echo(_said(imported[-1]))
                for line in [] if no_media else _said_of_media(found["media"]):
                    click.echo(line)
    if as_json:
        echo_json({"imported": imported})


@click.command()
@click.argument("file", type=click.Path(path_type=Path))
@json_option
def read(file: Path, as_json: bool) -> None:
    """Print the conversation in FILE, which towerctl export wrote, as text. It needs no daemon, no store
    and no model."""
    from towerd import tower_file
    from towerd.cli.output import clean, echo_json

    try:
        found = tower_file.read(_read(file))
        text = found.text()
    except tower_file.TowerFileError as error:
        raise TowerdError(f"{file}: {error.message}") from error
    history = found.history
    if as_json:
        turns = len(history.turns)
        about = {"session": history.id, "title": history.title, "model": found.source.name}
        times = {"created": history.created, "updated": history.updated, "turns": turns}
        echo_json({"file": str(file), **about, **times, "text": text})
    else:
        click.echo(clean(text, lines=True))


def _read(path: Path) -> bytes:
    try:
        data = path.read_bytes()
    except OSError as error:
        raise TowerdError(f"{path} cannot be read: {error.strerror or error}.") from error
    if not data.startswith(BOXED):
        return data
    try:
        opened: bytes = _boxes().unboxed(data, path.name)
        return opened
    except ConfigError as error:
        raise ConfigError(f"{path}: {error.message}") from error


def _boxes() -> ModuleType:
    """What seals files. Raises ConfigError if its packages are missing."""
    try:
        from towerd.store.encryption import passphrase_box
    except ImportError as error:
        raise ConfigError(
            "Encrypted files need packages: pip install 'towerd[encrypt]'."
        ) from error
    return passphrase_box


def _said(found: Json) -> str:
    """A line that describes the result of one import."""
    from towerd.cli.output import clean

    session, added = found["session"], found["added"]
    if added and session["tokenizer"]:
        return (
            f"Imported {_count(added, 'turn')} of session {session['id']}, which another tokenizer cut: "
            "it is read as text here."
        )
    if not added:
        what = ", with all its turns" if found["media"]["kept"] else "; nothing was changed"
        return f"Session {session['id']} is here already{what}."
    line = f"Imported {_count(added, 'turn')} of session {session['id']}"
    missing: list[Any] = [clean(base["name"]) for base in found["bases"] if not base["here"]]
    if missing:
        line += f"; towerctl precache makes its bases quick here, too: {', '.join(missing)}"
    return line + "."


def _said_of_media(media: Json) -> list[str]:
    """Lines about the pictures and sounds of one import."""
    lines = []
    if media["kept"]:
        lines.append(f"Kept {_media(media['kept'])}.")
    if media["damaged"]:
        lines.append(
            f"Left out {_media(media['damaged'])}, damaged in the file: import another copy of it to have them."
        )
    if media["not_kept"]:
        lines.append(
            f"Left out {_media(media['not_kept'])}: the store has no room for them, or its towerd runs with "
            "--no-keep-media."
        )
    return lines


def _without_media(error: TowerdError) -> str:
    """What helps if a file is too large: for the body's limit, or for RAM, whose limit the daemon names."""
    if not isinstance(error, RemoteError) or error.status != HTTPStatus.REQUEST_ENTITY_TOO_LARGE:
        return ""
    is_body = "request body" in error.message
    return ": import it with --no-media" + (", or raise --request-bytes-max." if is_body else ".")


def _media(n: int) -> str:
    return _count(n, "picture or sound") if n == 1 else f"{n} pictures and sounds"


def _count(n: int, noun: str) -> str:
    return f"1 {noun}" if n == 1 else f"{n} {noun}s"
