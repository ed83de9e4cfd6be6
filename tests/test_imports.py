"""Imports point one way: no circle among files, and folders import only what stands below them."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
LAYERS = (
    {"lab"},
    {"__main__"},
    {"cli"},
    {"router"},
    {"app"},
    {"service", "api"},
    {"roaming"},
    {"sessions", "transfer"},
    {"search"},
    {"cold"},
    {"connectors", "engine"},
    {"model"},
    {"settings"},
    {"tiers", "tower_file"},
    {"store"},
    {"codec"},
    {"media_ids", "models", "policy", "retention", "slots", "wire"},
    {"drift", "errors", "kernels", "llama_library", "log", "system", "tokens"},
    {"llama_build"},
)  # fmt: skip
"""Folders and modules of the package, the top floor first; each imports lower floors alone."""
BELOW_ALL = {"model.gguf_keys"}
"""What lower floors know of models: how to read the metadata of a GGUF."""
INNER_LAYERS = {
    "api": (
        {"admin", "relay"},
        {"ollama"},
        {"llama"},
        {"responses"},
        {"http"},
    ),
    "cli": (
        {"main"},
        {"bench", "doctor", "launch", "maintenance", "precache", "segments", "serve"},
        {"sessions"},
        {"client", "lab", "options"},
        {"models"},
        {"lazy", "output"},
        {"progress"},
    ),
    "codec": (
        {"codec"},
        {"kept"},
        {"forms"},
        {"models", "prior", "rows"},
        {"text", "vocabulary"},
        {"container", "media"},
        {"base"},
        {"varint"},
        {"errors"},
    ),
    "engine": (
        {"embedded", "llama_server"},
        {"moving"},
        {"checkpoint_positions"},
        {"anchors", "base", "live_index"},
        {"served"},
    ),
    "engine.embedded": (
        {"opening"},
        {"engine"},
        {"parts"},
        {"calibration"},
        {"run"},
        {"longchat"},
        {"restore"},
        {"live"},
        {"context"},
    ),
    "models": (
        {"listing"},
        {"bundled", "fetch"},
        {"known", "local"},
        {"header"},
        {"hub"},
    ),
    "policy": (
        {"factory"},
        {"foresight", "pbkv"},
        {"visits", "workflow_tree"},
        {"bases"},
        {"predict"},
        {"base"},
    ),
    "router": (
        {"router"},
        {"http"},
        {"loading"},
    ),
    "lab": (
        {"bench", "commands", "prior"},
        {"scale"},
        {"replay", "train"},
        {"latem"},
        {"codec", "policies", "predict", "reference", "texts"},
        {"models"},
    ),
    "lab.train": (
        {"retrieval"},
        {"job"},
        {"loop"},
        {"evaluation"},
        {"objectives"},
        {"data", "model"},
        {"errors"},
    ),
    "roaming": (
        {"roaming"},
        {"shared_bases", "shared_sessions"},
        {"shared_records"},
    ),
    "tiers.shared": (
        {"fetcher", "leaving"},
        {"tier"},
        {"checkpoints", "heads", "marks"},
        {"objects"},
        {"deleting"},
        {"counters", "measured_speed", "naming", "records"},
        {"bucket", "sealing"},
    ),
    "tiers.shared.deleting": (
        {"collector"},
        {"superseded"},
        {"survey"},
        {"free_place"},
        {"leases"},
        {"condemned"},
    ),
    "engine.llama_server": (
        {"opening"},
        {"engine"},
        {"generation"},
        {"availability"},
        {"upstream_weights"},
        {"slots"},
        {"process"},
        {"slot_files"},
    ),
    "sessions": (
        {"slot_saves"},
        {"sessions"},
        {"anticipation", "divergence_finder", "recorder", "reevaluation"},
        {"divergence", "habits"},
        {"traffic"},
        {"trace_recorder", "workflows"},
    ),
    "store": (
        {"store"},
        {"maintenance"},
        {"sessions"},
        {"rows"},
        {"state"},
        {"catalog"},
        {"tree"},
        {"segments"},
        {"encryption"},
        {"files"},
    ),
}
"""The same inside folders."""
CIRCLES: set[str] = set()
"""Folders whose inner folders still import each other."""


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
    for module, names in import_statements(path):
        for name in names:
            inner_name = f"{module}.{name}" if module else name
            found = inner_name if inner_name.removeprefix("towerd.") in known else module
            is_ours = found.startswith("towerd.") or found.split(".")[0] == "lab"
            if is_ours and found.removeprefix("towerd.") in known:
                yield found.removeprefix("towerd.")


@cache
def import_statements(path: Path) -> tuple[tuple[str, tuple[str, ...]], ...]:
    """(module, names) of each `from module import names`; module is "" for `import names`."""
    found: list[tuple[str, tuple[str, ...]]] = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found.append(("", tuple(alias.name for alias in node.names)))
        elif isinstance(node, ast.ImportFrom) and node.module:
            found.append((node.module, tuple(alias.name for alias in node.names)))
    return tuple(found)


def floor(part: str, layers: tuple[set[str], ...]) -> int:
    """The place of a folder or module in `layers`; larger is lower."""
    return next(i for i, names in enumerate(layers) if part in names)


def inner_imports(folder: str, known: dict[str, Path]) -> Iterator[tuple[str, str]]:
    """(importer, imported) of modules in different parts of a folder; "" is the whole package."""
    within = f"{folder}." if folder else ""
    for name, path in known.items():
        if name.startswith(within):
            for other in imports(path, known):
                if other.startswith(within) and part(folder, name) != part(folder, other):
                    yield name, other


def part(folder: str, module: str) -> str:
    """The inner folder, or the file, of `folder` that a module is in."""
    return module.removeprefix(f"{folder}.").split(".")[0]


def test_no_circle_among_files() -> None:
    known = modules()
    graph = {name: set(imports(path, known)) - {name} for name, path in known.items()}
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        raise AssertionError("these import each other: " + " <- ".join(error.args[1])) from None


@pytest.mark.parametrize(("folder", "layers"), [("", LAYERS), *INNER_LAYERS.items()])
def test_folders_import_lower_floors_alone(folder: str, layers: tuple[set[str], ...]) -> None:
    upward = [
        f"{name} imports {other}"
        for name, other in inner_imports(folder, modules())
        if other not in BELOW_ALL
        and floor(part(folder, name), layers) >= floor(part(folder, other), layers)
    ]
    assert upward == []


def test_no_two_folders_import_each_other() -> None:
    known = modules()
    parents = [name.split(".")[:-1] for name in known]
    folders = {".".join(parent[:n]) for parent in parents for n in range(1, len(parent) + 1)}
    assert {folder for folder in folders if has_circle(folder, known)} == CIRCLES


def has_circle(folder: str, known: dict[str, Path]) -> bool:
    """Whether folders inside of `folder` import each other, straight or by others' way."""
    graph: dict[str, set[str]] = {}
    n_names = folder.count(".") + 3  # of a module in an inner folder, at least
    for name, other in inner_imports(folder, known):
        if min(name.count("."), other.count(".")) >= n_names - 1:
            graph.setdefault(part(folder, name), set()).add(part(folder, other))
    try:
        TopologicalSorter(graph).prepare()
    except CycleError:
        return True
    return False


def test_one_file_names_modules_of_the_laboratory() -> None:
    """No module imports it, not even by a string; only the tables of cli/lab.py name its modules."""
    naming = [
        name
        for name, path in modules().items()
        if name.split(".")[0] != "lab" and re.search(r"""["']lab[.]""", path.read_text())
    ]
    assert sorted(naming) == ["cli.lab"]
