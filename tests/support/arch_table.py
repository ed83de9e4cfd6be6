"""The table of docs/models.md that says of each architecture how it resumes: `make architectures` writes
it from what `arch_trials` finds, and tests/engine/test_every_arch.py reads it."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TypeAlias

from arch_trials import Outcome
from architectures import llama_architectures

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "models.md"
BEGIN, END = "<!-- written by make architectures -->", "<!-- end -->"
KEPT = {
    "dense": "a row for each token",
    "window": "a row for each token, of what slid out of a window, too",
    "hybrid": "rows, and states of recurrent layers",
    "recurrent": "states of recurrent layers",
    "whole": "the state as a whole, which llama.cpp does not let us take apart",
}
"""What is kept of a conversation, by the kind of the memory."""
FROM = {
    "any token": "any token",
    "checkpoints": "state checkpoints",
    "whole": "the end of a stored turn",
}
GOOD = "yes"
Trial: TypeAlias = subprocess.Popen[str]


@contextmanager
def trials() -> Iterator[Trial]:
    """The program of `arch_trials`."""
    command = [sys.executable, str(Path(__file__).with_name("arch_trials.py"))]
    with subprocess.Popen(
        command, cwd=ROOT, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as program:
        yield program
        assert program.stdin is not None
        program.stdin.close()


def outcome(program: Trial, arch: str) -> Outcome:
    """What becomes of this architecture."""
    assert program.stdin is not None
    assert program.stdout is not None
    program.stdin.write(f"{arch}\n")
    program.stdin.flush()
    return Outcome(**json.loads(program.stdout.readline()))


def table(outcomes: Iterable[Outcome]) -> str:
    """What stands between BEGIN and END. Raises ValueError if a model went wrong."""
    served: dict[str, list[str]] = {}
    heads: dict[str, list[str]] = {}
    refused: dict[str, list[str]] = {}
    for each in outcomes:
        if each.resumes == "refused":
            refused.setdefault(each.why, []).append(each.arch)
        elif each.resumes in FROM:
            cells = f"{FROM[each.resumes]} | {KEPT[each.why]}"
            served.setdefault(cells, []).append(each.arch)
        else:
            raise ValueError(f"{each.arch}: {each.resumes}: {each.why}")
        if each.drafts:
            heads.setdefault(each.drafts, []).append(each.arch)
    parts = (
        ("resumes from | what is kept", served),
        ("drafts with its head", heads),
        ("refused", refused),
    )
    return "\n\n".join(_rows(head, rows) for head, rows in parts)


def _rows(head: str, rows: dict[str, list[str]]) -> str:
    lines = [f"| {head} | architectures |", "|---" * (head.count("|") + 2) + "|"]
    for cells, archs in sorted(rows.items()):
        lines.append(f"| {cells} | {', '.join(f'`{arch}`' for arch in sorted(archs))} |")
    return "\n".join(lines)


def known(page: str) -> dict[str, Outcome]:
    """The outcomes that the page tells, by architecture."""
    text = page.partition(BEGIN)[2].partition(END)[0]
    resumes, refused, heads = [], [], {}
    head = ""
    for line in (line for line in text.splitlines() if line.startswith("| ")):
        *cells, names = line.strip("| ").split(" | ")
        if names == "architectures":
            head = cells[0]
            continue
        for arch in re.findall(r"`([^`]+)`", names):
            if head == "refused":
                refused.append(Outcome(arch, "refused", cells[0]))
            elif head == "resumes from":
                resumes.append(Outcome(arch, _key(FROM, cells[0]), _key(KEPT, cells[1])))
            else:
                heads[arch] = cells[0]
    served = [Outcome(e.arch, e.resumes, e.why, heads.get(e.arch, "")) for e in resumes]
    return {each.arch: each for each in served + refused}


def _key(words: dict[str, str], text: str) -> str:
    return next(key for key, word in words.items() if word == text)


def write_page() -> None:
    """Try all architectures, and write the table."""
    found = []
    with trials() as program:
        for arch in llama_architectures():
            found.append(outcome(program, arch))
            print(f"{arch}: {found[-1].resumes}", file=sys.stderr)
    page = PAGE.read_text()
    before, _, rest = page.partition(BEGIN)
    after = rest.partition(END)[2]
    PAGE.write_text(f"{before}{BEGIN}\n\n{table(found)}\n\n{END}{after}")


if __name__ == "__main__":
    write_page()
