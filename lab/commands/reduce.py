"""`towerctl lab reduce`: base prompts without what a model finds nearly impossible."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from towerd.cli.client.target import json_option
from towerd.cli.client.transport import Json
from towerd.cli.precache.spec import LEVELS, Prompt, SpecError
from towerd.errors import ConfigError, TowerdError
from towerd.store.sessions.turn import ANYWHERE

if TYPE_CHECKING:
    import yaml

    from towerd.codec import Codec


@dataclass(frozen=True, slots=True)
class Reduction:
    """The result for a base's own text, without the bases above it; `bytes`: of its coded form."""

    p_min: float
    symbols: int
    symbols_lost: int
    tokens_before: int
    tokens: int
    bytes_before: int
    bytes: int

    def as_json(self) -> Json:
        return asdict(self)

    def __str__(self) -> str:
        return (
            f"{self.symbols_lost:,} of {self.symbols:,} symbols left out (p_min {self.p_min:g}): "
            f"{self.tokens_before:,} -> {self.tokens:,} tokens of its own, "
            f"{self.bytes_before:,} -> {self.bytes:,} bytes as coded text"
        )


@click.command()
@click.argument("spec", type=click.Path(dir_okay=False, path_type=Path))
@click.option(
    "--p-min",
    "given",
    multiple=True,
    required=True,
    metavar="NAME=P",
    help="Leave symbols less likely than P out of the base NAME.",
)
@click.option(
    "--out",
    required=True,
    type=click.Path(dir_okay=False, path_type=Path),
    help="Write the prompts with their remaining text to this file.",
)
@click.option(
    "--model",
    "-m",
    type=click.Path(path_type=Path),
    help="GGUF whose tokens are counted; default: the default model.",
)
@json_option
def reduce(
    spec: Path, given: tuple[str, ...], out: Path, model: Path | None, as_json: bool
) -> None:
    """Leave out text that a small model finds nearly impossible from base prompts in the YAML file
    SPEC.

    This changes what the model reads. Precache OUT, and send prompts that begin with its texts.
    """
    from towerd.cli.output import echo_json
    from towerd.cli.precache.spec import load_spec
    from towerd.models.bundled import find_model

    root = load_spec(spec)
    root, less = reduce_tree(find_model(model), root, p_mins(given, root, spec), spec)
    write(out, root)
    if as_json:
        echo_json({name: each.as_json() for name, each in less.items()})
        return
    for name, each in less.items():
        click.echo(f"{name}: {each}.")
    click.echo(f"Prompts must begin with the texts in {out} from now on.")


def p_mins(given: Sequence[str], root: Prompt, spec: Path) -> dict[str, float]:
    """Name of the base -> p_min, of `NAME=P`. Raises ConfigError."""
    names = [prompt.name for prompt in root.walk()]
    found: dict[str, float] = {}
    for each in given:
        name, sign, number = each.rpartition("=")
        if not sign or name not in names:
            wanted = f"no base {name!r}" if sign else "no '='"
            raise ConfigError(
                f"--p-min {each!r} has {wanted}: give NAME=P, where NAME is one of those in "
                f"{spec}: {', '.join(names)}."
            )
        if name in found:
            raise ConfigError(f"--p-min names {name!r} twice: give it one probability.")
        try:
            found[name] = float(number)
        except ValueError:
            found[name] = -1
        if not 0 < found[name] < 1:
            raise ConfigError(
                f"--p-min {each!r}: {number!r} is not a probability over 0 and under 1, "
                "such as 0.0001."
            )
    return found


def reduce_tree(
    model: Path, root: Prompt, asked: Mapping[str, float], spec: Path
) -> tuple[Prompt, dict[str, Reduction]]:
    """The tree with the remaining text of the bases in `asked`, and the reduction of each of them.

    Raises TowerdError; SpecError if nothing is left."""
    from towerd.codec import Codec, CodecError
    from towerd.codec.vocabulary import GgufVocabulary
    from towerd.model.llama_model import init_backend

    init_backend()  # its log becomes ours
    try:
        with GgufVocabulary(model) as vocabulary:
            reducer = _Reducer(Codec(vocabulary), asked, spec)
            return reducer.tree(root, ""), reducer.done
    except CodecError as error:
        raise TowerdError(str(error)) from error


class _Reducer:
    """Walks a tree; the model reads each base after the remaining text of those above it."""

    def __init__(self, codec: Codec, asked: Mapping[str, float], spec: Path) -> None:
        self._codec, self._asked, self._spec = codec, asked, spec
        self.done: dict[str, Reduction] = {}

    def tree(self, prompt: Prompt, above: str) -> Prompt:
        if prompt.anywhere:
            above = ""  # it stands by itself
        if prompt.name in self._asked:
            prompt = self._one(prompt, above)
        above += _said(prompt)
        return replace(prompt, children=tuple(self.tree(child, above) for child in prompt.children))

    def _one(self, prompt: Prompt, above: str) -> Prompt:
        from lab.codec import lossy

        p_min, n_lost, n_symbols, parts = self._asked[prompt.name], 0, 0, []
        names, before = self._codec.vocabulary.names, above
        for text in [message["content"] for message in prompt.messages] or [prompt.text]:
            loss = lossy.reduce(text, p_min, names, before)
            if text and not loss.text:
                raise SpecError(
                    f"{self._spec}:{prompt.line}: '{prompt.name}': nothing is left of it with "
                    f"p_min {p_min:g}; take a smaller one"
                )
            parts.append(loss.text)
            before += loss.text
            n_lost, n_symbols = n_lost + loss.n_lost, n_symbols + loss.n_symbols
        messages = tuple(
            {**message, "content": text}
            for message, text in zip(prompt.messages, parts, strict=False)
        )
        less = replace(prompt, messages=messages, text="" if messages else parts[0])
        sizes = [self._size(each) for each in (prompt, less)]
        self.done[prompt.name] = Reduction(
            p_min, n_symbols, n_lost, sizes[0][0], sizes[1][0], sizes[0][1], sizes[1][1]
        )
        return less

    def _size(self, prompt: Prompt) -> tuple[int, int]:
        """(tokens, bytes of the blob) of its own text."""
        ids = self._codec.vocabulary.tokenize(_said(prompt).encode())
        return len(ids), len(self._codec.encode(ids))


def _said(prompt: Prompt) -> str:
    return prompt.text or "".join(message["content"] for message in prompt.messages)


def write(path: Path, root: Prompt) -> None:
    """Write a tree as a file that `load_spec` reads. ConfigError if there is another file."""
    import yaml

    tree = {"platform": _node(root, "")}
    options: dict[str, Any] = {"allow_unicode": True, "sort_keys": False, "width": 1 << 16}
    data = yaml.dump(tree, Dumper=_dumper(), **options).encode()
    try:
        with open(path, "xb", opener=_private) as file:
            try:
                file.write(data)
                file.flush()
            except OSError:
                path.unlink(missing_ok=True)
                raise
    except FileExistsError as error:
        if not _holds(path, data):
            raise ConfigError(
                f"{path} exists and is not what --out would write: remove it or name another."
            ) from error
    except OSError as error:
        raise ConfigError(f"{path} cannot be written: {error.strerror or error}.") from error


def _dumper() -> type[yaml.SafeDumper]:
    """Escapes what is not printable: PyYAML writes some line ends as they are, and reads spaces."""
    import yaml

    class Dumper(yaml.SafeDumper):
        pass

    def text(dumper: yaml.SafeDumper, value: str) -> yaml.ScalarNode:
        style = None if value.isprintable() else '"'
        return dumper.represent_scalar("tag:yaml.org,2002:str", value, style=style)

    Dumper.add_representer(str, text)
    return Dumper


def _holds(path: Path, data: bytes) -> bool:
    try:
        return path.is_file() and path.read_bytes() == data
    except OSError:
        return False


def _private(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)


def _node(prompt: Prompt, above: str) -> dict[str, Any]:
    """A prompt as the file has it."""
    node: dict[str, Any] = {"name": prompt.name.removeprefix(above), "public": prompt.public}
    if prompt.format is not None:
        node["format"] = prompt.format
    if prompt.anywhere:
        node["reuse"] = ANYWHERE
    if prompt.messages:
        node["messages"] = [dict(message) for message in prompt.messages]
    else:
        node["text"] = prompt.text
    if prompt.children:
        key = LEVELS[prompt.level + 1]
        node[key] = [_node(child, f"{prompt.name}/") for child in prompt.children]
    return node
