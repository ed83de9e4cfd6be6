"""changes.py OLD NEW: what a newer llama.cpp has that an older one has not, and what it lost: architectures, flags
and routes of llama-server, tests of its server. OLD and NEW are folders of whole sources, as fetch_source.sh fills
them. Prints Markdown."""

from __future__ import annotations

import re
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path

_ARCHITECTURES = re.compile(r"LLM_ARCH_NAMES = \{(.*?)\n\};", re.DOTALL)
_ARCHITECTURE = re.compile(r'\{\s*LLM_ARCH_\w+,\s*"([^"]+)"\s*\}')
_OPTION = re.compile(r"add_opt\(common_arg\(")
_NAMES = re.compile(r"(?:\s*//[^\n]*)*\s*((?:\{[^{}]*\},?\s*){1,2})")
_FLAG = re.compile(r'"(-[\w.-]+)"')
_EXAMPLES = re.compile(r"set_examples\(\{([^}]*)\}\)")
_ROUTE = re.compile(r'ctx_http\.(\w+)\s*\(\s*"([^"]+)"')
_TEST = re.compile(r"^(?:async )?def (test_\w+)", re.MULTILINE)


def architectures(source: Path) -> set[str]:
    """The names of `general.architecture` that it knows."""
    found = _ARCHITECTURES.search((source / "src" / "llama-arch.cpp").read_text())
    names = _ARCHITECTURE.findall(found[1]) if found else []
    return {name for name in names if name != "(unknown)"}


def flags(source: Path) -> set[str]:
    """What llama-server takes on its command line: options of no tool in particular, and its own."""
    found: set[str] = set()
    for option in _OPTION.split((source / "common" / "arg.cpp").read_text())[1:]:
        names, tools = _NAMES.match(option), _EXAMPLES.search(option)
        is_ours = tools is None or re.search(r"_(?:SERVER|COMMON)\b", tools[1])
        if names and is_ours:
            found.update(_FLAG.findall(names[1]))
    return found


def routes(source: Path) -> set[str]:
    """Methods and paths of llama-server."""
    text = (source / "tools" / "server" / "server.cpp").read_text()
    return {f"{method.upper()} {path}" for method, path in _ROUTE.findall(text)}


def tests(source: Path) -> Counter[str]:
    """How many test functions each file of its server's suite has."""
    files = sorted((source / "tools" / "server" / "tests" / "unit").glob("test_*.py"))
    return Counter({file.stem: len(_TEST.findall(file.read_text())) for file in files})


PARTS: dict[str, Callable[[Path], set[str]]] = {
    "architectures": architectures,
    "flags of llama-server": flags,
    "routes of llama-server": routes,
}


def changes(old: Path, new: Path) -> str:
    """All of it, one line for each kind of change. Raises ValueError if a source reads otherwise than we
    know."""
    lines: list[str] = []
    for what, read in PARTS.items():
        before, after = read(old), read(new)
        if not before or not after:
            raise ValueError(f"No {what} were found: llama.cpp writes them otherwise now.")
        lines.append(f"- {what}: {len(before)}, now {len(after)}")
        for verb, names in (("new", after - before), ("gone", before - after)):
            if names:
                lines.append(f"  - {verb}: {', '.join(f'`{name}`' for name in sorted(names))}")
    before, after = tests(old), tests(new)
    lines.append(f"- tests of its server: {before.total()}, now {after.total()}")
    for name in sorted(before | after):
        if before[name] != after[name]:
            lines.append(f"  - `{name}`: {before[name]}, now {after[name]}")
    return "\n".join(lines)


if __name__ == "__main__":
    print(changes(Path(sys.argv[1]), Path(sys.argv[2])))
