"""The documents keep up with the program: every command, option and setting has its place."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import TypeGuard

import click
import pytest
from settings_page import PAGE, written

from towerd.cli.main import towerctl, towerd
from towerd.settings.config import settings

ROOT = Path(__file__).resolve().parent.parent
DOCS = ROOT / "docs"
COMMANDS = DOCS / "commands.md"
LABORATORY = ROOT / "lab" / "README.md"
README_LINES_MAX = 120
CHAT_FILES_MAX = 15
CODE = ("towerd", "codec", "kernels", "slots", "cli", "lab", "deploy", "tests")


def commands(
    command: click.Command, path: tuple[str, ...] = ()
) -> Iterator[tuple[str, click.Command]]:
    """(full name, command) of `command` and everything below it."""
    path = (*path, str(command.name))
    yield " ".join(path), command
    if isinstance(command, click.Group):
        context = click.Context(command)
        for name in command.list_commands(context):
            child = command.get_command(context, name)
            assert child is not None
            yield from commands(child, path)


ALL = [*commands(towerd), *commands(towerctl)]
LEAVES = [(name, command) for name, command in ALL if not isinstance(command, click.Group)]


def section(heading: str) -> str:
    """The text under `heading` of docs/commands.md, or lab/README.md, up to the next heading."""
    heading = re.sub(r"^towerctl train ", "towerctl lab train ", heading)  # an alias
    document = LABORATORY if heading.startswith("towerctl lab ") else COMMANDS
    pattern = rf"^#+ `{re.escape(heading)}[^`]*`\n(.*?)(?=^#|\Z)"
    found = re.search(pattern, document.read_text(), re.MULTILINE | re.DOTALL)
    assert found, f"{document} has no heading `{heading} ...`"
    return found[1]


def _is_ours(parameter: click.Parameter) -> TypeGuard[click.Option]:
    """llama-server's own flags are hidden, and documented by it."""
    return isinstance(parameter, click.Option) and not parameter.hidden


@pytest.mark.parametrize(("name", "command"), LEAVES, ids=[name for name, _ in LEAVES])
def test_command_is_documented(name: str, command: click.Command) -> None:
    """Each command has its heading, and each of its options stands under it."""
    text = section(name)
    for parameter in command.params:
        if _is_ours(parameter) and parameter.name not in settings():
            assert f"`{parameter.opts[0]}" in text or f"`{parameter.opts[-1]}" in text, (
                parameter.name
            )


@pytest.mark.parametrize(("name", "command"), ALL, ids=[name for name, _ in ALL])
def test_command_says_what_it_does(name: str, command: click.Command) -> None:
    """--help is never empty, for commands and for their options."""
    assert command.help
    for parameter in command.params:
        if _is_ours(parameter):
            assert parameter.help, parameter.name


def test_documented_commands_exist() -> None:
    """No heading is left of a command that went away."""
    text = COMMANDS.read_text() + LABORATORY.read_text()
    headings = re.findall(r"^#+ `((?:towerd|towerctl)[^`]*)`$", text, re.MULTILINE)
    known = {name for name, _ in ALL}
    for heading in headings:
        words = [word for word in heading.split() if re.fullmatch(r"[a-z0-9-]+", word)]
        assert any(" ".join(words[:n]) in known for n in range(len(words), 1, -1)), heading


def test_settings_page_is_as_generated() -> None:
    """docs/settings.md says what the settings say of themselves; `make docs` writes it."""
    assert PAGE.read_text() == written(PAGE.read_text())


def test_readme_is_short() -> None:
    assert len((ROOT / "README.md").read_text().splitlines()) <= README_LINES_MAX


def pages() -> list[Path]:
    """README.md, what stands in docs/, and the pages beside code."""
    beside = [path for top in CODE for path in (ROOT / top).rglob("*.md")]
    found = [ROOT / "README.md", *DOCS.glob("*.md"), *beside]
    return sorted({path.resolve() for path in found})


def name_of(path: Path) -> str:
    return str(path.relative_to(ROOT))


@pytest.mark.parametrize("path", pages(), ids=name_of)
def test_links_resolve(path: Path) -> None:
    """Each relative link leads to a file, and to a heading of it where it names one."""
    for target, anchor in re.findall(r"\]\(([^)#\s]*)#?([^)\s]*)\)", _prose(path)):
        if re.match(r"[a-z]+:", target):
            continue
        file = (path.parent / target).resolve() if target else path
        assert file.exists(), f"{path.name} links to {target}"
        if anchor and file.suffix == ".md":
            assert anchor in anchors(file), f"{path.name} links to {target}#{anchor}"


def anchors(path: Path) -> set[str]:
    """The anchors that GitHub gives to the headings of a page."""
    headings = re.findall(r"^#+ (.*)$", _prose(path), re.MULTILINE)
    plain = (re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", heading).lower() for heading in headings)
    return {re.sub(r"[^\w\- ]", "", heading).replace(" ", "-") for heading in plain}


def _prose(path: Path) -> str:
    """The text without its fenced and indented code."""
    text = re.sub(r"^```.*?^```", "", path.read_text(), flags=re.MULTILINE | re.DOTALL)
    return re.sub(r"^ {4}.*$", "", text, flags=re.MULTILINE)


def test_images_are_there() -> None:
    """The README's picture is a file of this tree."""
    for source in re.findall(r'<img [^>]*src="([^"]+)"', (ROOT / "README.md").read_text()):
        assert (ROOT / source).is_file()


def test_the_drawing_of_a_chat_names_files() -> None:
    """docs/anatomy-of-a-request.md names the files of a chat in order: at most fifteen, which exist."""
    text = (DOCS / "anatomy-of-a-request.md").read_text()
    way = re.findall(r"^\| (\d+) \| `([^`]+)`", text, re.MULTILINE)
    assert [int(number) for number, _ in way] == list(range(1, len(way) + 1))
    assert 0 < len(way) <= CHAT_FILES_MAX


@pytest.mark.parametrize("page", ["architecture", "anatomy-of-a-request", "anatomy-of-an-endpoint"])
def test_named_files_exist(page: str) -> None:
    """What a page about the code names is there."""
    text = (DOCS / f"{page}.md").read_text()
    for name in re.findall(r"`((?:towerd|codec|kernels|slots|cli|lab|tests|docs)/[\w/.-]+)`", text):
        assert (ROOT / name).exists(), name


def test_benchmarks_are_commands() -> None:
    """Each command of docs/benchmarks.md exists."""
    known = {name for name, _ in ALL}
    text = (DOCS / "benchmarks.md").read_text()
    named = re.findall(r"^\| `(towerctl [a-z ]*[a-z])", text, re.MULTILINE)
    assert named
    assert {name.strip() for name in named} <= known
