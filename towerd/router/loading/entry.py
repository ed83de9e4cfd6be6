"""ModelEntry: a model that can be asked for; and finding them, as llama-server's router does."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal, TypeAlias

from towerd.errors import ConfigError
from towerd.settings.model_tables import ALL, FETCHED, ModelTables

log = logging.getLogger(__name__)

Source: TypeAlias = Literal["models_dir", "preset"]
FIRST_SHARD = "-00001-of-"
DRAFT_PREFIXES = ("mtp-", "dspark-", "dflash-")
SUFFIX = ".gguf"
OF_NAMES = frozenset(("alias", "tags", "model", *FETCHED))
"""What a table says of a model's name and of where its file is."""


@dataclass(frozen=True, slots=True)
class ModelEntry:
    """A model by its name, and the files that it consists of."""

    name: str
    source: Source
    path: Path | None = None
    """The file, or the first of its shards; None: the settings alone say."""
    projector: Path | None = None
    draft: Path | None = None
    aliases: tuple[str, ...] = ()
    tags: tuple[str, ...] = ()
    file_id: str = ""
    """Which file `path` is, whatever the names of that; "": it has none."""

    @property
    def server_args(self) -> tuple[str, ...]:
        """llama-server's flags for the files beside the model's own."""
        args: tuple[str, ...] = ()
        if self.projector is not None:
            args += ("--mmproj", str(self.projector))
        if self.draft is not None:
            args += ("--spec-draft-model", str(self.draft))
        return args

    def file_bytes(self) -> int:
        """Size of all its files; 0 if it has none here."""
        if self.path is None:
            return 0
        shards = [self.path]
        before, is_first, after = self.path.name.partition(FIRST_SHARD)
        if is_first:
            shards = list(self.path.parent.glob(f"{_literal(before)}-?????-of-{_literal(after)}"))
        files = (*shards, self.projector, self.draft)
        return sum(file.stat().st_size for file in files if file is not None and file.exists())


def find_entries(tables: ModelTables) -> dict[str, ModelEntry]:
    """The models of the directory and of the tables, by name, in the order of their names. Those of
    one file with equal settings are one, with the names of all. Raises ConfigError: the directory
    does not exist, or two models have one name."""
    folder = tables.config.models_dir
    found = {} if folder is None else {each.name: each for each in _in_folder(folder)}
    for name, table in tables.tables.items():
        if name == ALL:
            continue
        known = found.get(name, ModelEntry(name, "preset"))
        path = table.values.get("model") or known.path
        if path is None and "upstream" not in table.values:
            path = Path(name)
        aliases = tuple(part.strip() for part in table.values.get("alias", "").split(","))
        found[name] = ModelEntry(
            name,
            "preset",
            path,
            known.projector,
            known.draft,
            tuple(sorted({*aliases} - {"", name})),
            table.values.get("tags", ()),
        )
    entries = _joined(found.values(), tables)
    _check_names(entries)
    return {each.name: each for each in sorted(entries, key=lambda each: each.name)}


def _joined(entries: Iterable[ModelEntry], tables: ModelTables) -> list[ModelEntry]:
    """The entries, those of the same files and settings as one. Its name is one that a table has."""
    of_file: dict[str, list[ModelEntry]] = {}
    for entry in sorted(entries, key=lambda each: (each.source != "preset", each.name)):
        entry = replace(entry, file_id=_file_id(entry.path))
        known = of_file.setdefault(entry.file_id, [])
        for i, other in enumerate(known):
            if entry.file_id and _are_one(entry, other, tables):
                names = {*other.aliases, *entry.aliases, entry.name} - {other.name}
                tags = tuple(dict.fromkeys((*other.tags, *entry.tags)))
                known[i] = replace(other, aliases=tuple(sorted(names)), tags=tags)
                break
        else:
            known.append(entry)
    return [entry for some in of_file.values() for entry in some]


def _are_one(entry: ModelEntry, other: ModelEntry, tables: ModelTables) -> bool:
    if (entry.projector, entry.draft) != (other.projector, other.draft):
        return False
    one, two = (tables.table(each.name) for each in (entry, other))
    values = [
        {key: value for key, value in each.values.items() if key not in OF_NAMES}
        for each in (one, two)
    ]
    return values[0] == values[1] and (one.keep, one.idle_s) == (two.keep, two.idle_s)


def _file_id(path: Path | None) -> str:
    if path is None:
        return ""
    try:
        status = path.stat()
    except OSError:
        return str(path)
    return f"{status.st_dev}:{status.st_ino}"


def _in_folder(folder: Path) -> Iterator[ModelEntry]:
    """A model for each GGUF, and for each folder of GGUFs that belong together."""
    try:
        inner = sorted(folder.iterdir())
    except OSError as error:
        raise ConfigError(
            f"The models directory {folder} cannot be read: {error.strerror}."
        ) from error
    for path in inner:
        if os.path.isdir(path):
            yield from _of_parts(path)
        elif path.name.endswith(SUFFIX) and not _is_projector(path) and not _is_draft(path):
            yield ModelEntry(path.name.replace(SUFFIX, ""), "models_dir", path)


def _of_parts(folder: Path) -> Iterator[ModelEntry]:
    """The model of a folder: shards, or one file, with its projector and its draft model."""
    try:
        files = [each for each in sorted(folder.iterdir()) if each.name.endswith(SUFFIX)]
    except OSError as error:  # lost+found of a disk, say
        log.warning(f"passed over {folder}, which cannot be read: {error.strerror}")
        return
    projectors = [each for each in files if _is_projector(each)]
    drafts = [each for each in files if _is_draft(each) and each not in projectors]
    own = [each for each in files if each not in projectors and each not in drafts]
    first = [each for each in own if FIRST_SHARD in each.name] or own
    if first:
        yield ModelEntry(
            folder.name,
            "models_dir",
            first[-1],
            projectors[-1] if projectors else None,
            drafts[0] if drafts else None,
        )


def _is_projector(path: Path) -> bool:
    return "mmproj" in path.name


def _is_draft(path: Path) -> bool:
    return path.name.startswith(DRAFT_PREFIXES)


def _literal(text: str) -> str:
    """Text as part of a glob pattern."""
    return "".join(f"[{char}]" if char in "*?[" else char for char in text)


def _check_names(entries: Iterable[ModelEntry]) -> None:
    seen: dict[str, str] = {}
    for entry in entries:
        for name in (entry.name, *entry.aliases):
            if (other := seen.setdefault(name, entry.name)) != entry.name:
                raise ConfigError(f"Two models have the name {name}: {other} and {entry.name}.")
