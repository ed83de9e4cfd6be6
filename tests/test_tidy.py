"""Style that is worth a test: sizes, stray names, leftovers."""

from __future__ import annotations

import ast
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = ("towerd", "codec", "kernels", "slots", "cli", "lab", "tests")
LINKED = frozenset(("codec", "kernels", "slots", "cli"))
FILE_LINES_MAX = 600
FUNCTION_LINES_MAX = 70
LEFTOVER = re.compile(r"\b(?:TO" r"DO|FIX" r"ME|XX" r"X|HA" r"CK)\b")
CONFLICT = re.compile(rb"^(?:<<<<<<<|>>>>>>>) ", re.MULTILINE)
MACHINE_PATH = re.compile(r"/(?:home|Users|root|wo" r"rk|fa" r"rm)/[A-Za-z0-9_.-]+/")
PRIVATE = re.compile(r"(?:.*[.])?_[a-z]\w*", re.IGNORECASE)
NOT_OURS = {
    "asyncio.events.Handle._run": "how long a step of a loop takes is told nowhere else",
    "llama_cpp._lib": "the library that ggml's functions are in",
    "llama_cpp._lib._name": "and where it is",
    "os._exit": "the end of a process that is killed; a public name",
    "towerd.kernels._native": "the compiled kernels; a module that stubs describe",
}
"""What tests touch although its name begins with an underscore, and why."""
TEXTS = (".py", ".pyi", ".cpp", ".h", ".sh", ".md", ".toml", ".service", ".plist", ".json", ".html")


def sources() -> list[Path]:
    """Every Python file once: the links inside towerd/ lead to folders listed by themselves."""
    found: list[Path] = []
    for folder in FOLDERS:
        for path in (ROOT / folder).rglob("*.py"):
            inner = path.relative_to(ROOT).parts
            if inner[0] == "towerd" and inner[1] in LINKED:
                continue
            found.append(path)
    return sorted(found)


def texts() -> list[Path]:
    """Every text file of the tree that people write."""
    named = [ROOT / "Makefile", ROOT / "CMakeLists.txt", ROOT / ".ci" / "run"]
    named += [path for path in ROOT.iterdir() if path.suffix in TEXTS]
    for folder in (*FOLDERS, "deploy"):
        named += [path for path in (ROOT / folder).rglob("*") if path.suffix in TEXTS]
    return sorted({path.resolve() for path in named if path.is_file()})


def name_of(path: Path) -> str:
    return str(path.relative_to(ROOT))


@pytest.mark.parametrize("path", sources(), ids=name_of)
def test_python_file(path: Path) -> None:
    """A file fits in 600 lines, its functions in 70, and it imports only towerd.<name>."""
    text = path.read_text()
    tree = ast.parse(text)
    assert len(text.splitlines()) <= FILE_LINES_MAX
    assert not list(long_functions(tree))
    assert not LINKED.intersection(imported(tree)), "import towerd.<name> instead"


@pytest.mark.parametrize("path", texts(), ids=name_of)
def test_text_file(path: Path) -> None:
    """Nothing is left undone, and nothing names the machine it was written on."""
    for number, line in enumerate(path.read_text().splitlines(), start=1):
        assert not LEFTOVER.search(line), f"line {number}: {line.strip()}"
        assert not MACHINE_PATH.search(line), f"line {number}: {line.strip()}"


def test_folders_are_linked_into_the_package() -> None:
    for name in LINKED:
        link = ROOT / "towerd" / name
        assert link.is_symlink()
        assert link.resolve() == ROOT / name


def test_tests_are_no_packages_and_have_unique_names() -> None:
    """importlib mode: no __init__.py, and two files of one name would shadow each other."""
    files = [path for path in (ROOT / "tests").rglob("*.py") if path.name != "conftest.py"]
    names = [path.name for path in files]
    assert "__init__.py" not in names
    assert len(names) == len(set(names))


@pytest.mark.parametrize(
    "path", [path for path in sources() if name_of(path).startswith("tests/")], ids=name_of
)
def test_tests_touch_nothing_private(path: Path) -> None:
    """They see behaviour: no attribute of another object that begins with an underscore is read,
    replaced or imported."""
    assert not set(private_touches(ast.parse(path.read_text()))) - NOT_OURS.keys()


def test_a_class_name_occurs_once() -> None:
    """One word, one thing: no two classes of what ships, or of the laboratory, share a name."""
    places: dict[str, list[str]] = {}
    for path in sources():
        if not name_of(path).startswith("tests/"):
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.ClassDef):
                    places.setdefault(node.name, []).append(name_of(path))
    assert {name: found for name, found in places.items() if len(found) > 1} == {}


def test_only_engine_model_and_wire_call_llama_cpp() -> None:
    product = [
        p for p in sources() if name_of(p).startswith(("towerd/", "kernels/", "slots/", "cli/"))
    ]
    loaders = {name_of(p) for p in product if "llama_cpp" in imported(ast.parse(p.read_text()))}
    assert loaders == {"towerd/llama_library.py"}
    users = {name_of(p) for p in product if "from towerd.llama_library import" in p.read_text()}
    rooms = ("towerd/engine/", "towerd/model/", "towerd/wire/")
    assert all(user.startswith(rooms) for user in users), users


def private_touches(tree: ast.AST) -> Iterator[str]:
    """What is touched of other objects: by attribute, by the name of one in a string, by import."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and PRIVATE.fullmatch(node.attr):
            if ast.unparse(node.value) not in ("self", "cls", "super()"):
                yield ast.unparse(node)
        elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith("attr"):
            for name in (each.value for each in node.args[:2] if isinstance(each, ast.Constant)):
                if isinstance(name, str) and PRIVATE.fullmatch(name):
                    yield f"{ast.unparse(node.args[0])}.{name}"
        elif isinstance(node, ast.ImportFrom) and node.module:
            for alias in node.names:
                if PRIVATE.fullmatch(alias.name):
                    yield f"{node.module}.{alias.name}"


def long_functions(tree: ast.AST) -> Iterator[str]:
    """`name:lines` of every function over the limit."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            lines = (node.end_lineno or node.lineno) - node.lineno + 1
            if lines > FUNCTION_LINES_MAX:
                yield f"{node.name}:{lines}"


def imported(tree: ast.AST) -> set[str]:
    """Top-level names of everything that is imported."""
    names: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and node.level == 0:
            names.add(node.module.split(".")[0])
    return names


def test_no_merge_is_unfinished() -> None:
    """No tracked text file has a conflict marker."""
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=False)
    if listed.returncode:
        pytest.skip("not a git checkout")
    names = [name for name in listed.stdout.decode().split("\0") if name]
    paths = [ROOT / name for name in names if (ROOT / name).is_file()]
    texts = [(path, path.read_bytes()) for path in paths if not path.is_symlink()]
    found = [name_of(path) for path, data in texts if b"\0" not in data and CONFLICT.search(data)]
    assert not found
