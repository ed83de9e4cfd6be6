"""Imports point one way: no circle among files, and folders import only what stands below them."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

ROOT = Path(__file__).parent.parent
LAYERS = (
    {"lab"},
    {"__main__"},
    {"cli"},
    {"router"},
    {"app"},
    {"service", "api"},
    {"sessions", "transfer"},
    {"search"},
    {"cold"},
    {"engine"},
    {"settings"},
    {"tiers", "tower_file"},
    {"store"},
    {"codec"},
    {"media_ids", "models", "policy", "retention", "slots", "wire"},
    {"drift", "errors", "kernels", "llama_library", "log", "system", "tokens"},
    {"llama_build"},
)  # fmt: skip
"""Folders and modules of the package, the top floor first; each imports lower floors alone."""
STORE_FLOORS = (
    "store",
    "maintenance",
    "sessions",
    "rows",
    "state",
    "catalog",
    "tree",
    "segments",
    "files",
)  # fmt: skip
"""Folders of `towerd/store` below its face, store.py, the top floor first."""
BELOW_ENGINE = {"engine.base", "engine.gguf_keys", "engine.model_file", "engine.rope"}
"""What lower floors know of engines: the protocol, and what a GGUF says."""


def modules() -> dict[str, Path]:
    """Module name, without the package's, -> its file."""
    found = {}
    for top in ("towerd", "codec", "kernels", "slots", "cli", "lab"):
        for path in (ROOT / top).rglob("*.py"):
            if any(parent.is_symlink() for parent in (path, *path.parents)):
                continue
            parts = path.relative_to(ROOT).with_suffix("").parts
            parts = parts[1:] if top == "towerd" else parts
            parts = parts[:-1] if parts[-1] == "__init__" else parts
            if parts:
                found[".".join(parts)] = path
    return found


def imports(path: Path, known: dict[str, Path]) -> Iterator[str]:
    """The modules of ours that a file imports, wherever in it, for type checking too."""
    for node in ast.walk(ast.parse(path.read_text())):
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            inner = [f"{node.module}.{alias.name}" for alias in node.names]
            names = [
                name if name.removeprefix("towerd.") in known else node.module for name in inner
            ]
        for name in names:
            inner_name = name.removeprefix("towerd.")
            is_ours = name.startswith("towerd.") or name.split(".")[0] == "lab"
            if is_ours and inner_name in known:
                yield inner_name


def floor(module: str) -> int:
    """The place of a module in LAYERS; larger is lower."""
    return next(i for i, names in enumerate(LAYERS) if module.split(".")[0] in names)


def test_no_circle_among_files() -> None:
    known = modules()
    graph = {name: set(imports(path, known)) - {name} for name, path in known.items()}
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        raise AssertionError("these import each other: " + " <- ".join(error.args[1])) from None


def test_folders_import_lower_floors_alone() -> None:
    known = modules()
    upward = [
        f"{name} imports {other}"
        for name, path in known.items()
        for other in imports(path, known)
        if other.split(".")[0] != name.split(".")[0]
        and other not in BELOW_ENGINE
        and floor(name) >= floor(other)
    ]
    assert upward == []


def test_folders_of_the_store_import_lower_floors_alone() -> None:
    known = modules()
    inside = [name for name in known if name.split(".")[0] == "store"]
    floors = {name: STORE_FLOORS.index([*name.split("."), "store"][1]) for name in inside}
    upward = [
        f"{name} imports {other}"
        for name in inside
        for other in imports(known[name], known)
        if other in floors and floors[name] > floors[other]
    ]
    assert upward == []


def test_one_file_names_modules_of_the_laboratory() -> None:
    """No module imports it, not even by a string; only the tables of cli/lab.py name its modules."""
    naming = [
        name
        for name, path in modules().items()
        if name.split(".")[0] != "lab" and re.search(r"""["']lab[.]""", path.read_text())
    ]
    assert sorted(naming) == ["cli.lab"]
