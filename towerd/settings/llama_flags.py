"""llama-server's own flags as the daemon reads them.

llama.cpp's code parses those of sampling, chat and loading itself (`towerd.wire`); flags that are settings of
the daemon are in `towerd.settings.config`; what becomes of each is in `towerd.settings.llama_flag_table`, so that a
llama-server command line works unchanged. The llama-server engine accepts all of them.
"""

from __future__ import annotations

import difflib
import json
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from towerd.errors import ConfigError
from towerd.settings.llama_flag_table import LlamaFlag, Use, by_name

F32_MIN, F32_MAX = 2.0**-126, (2 - 2.0**-23) * 2.0**127
"""The smallest and the largest number that llama.cpp reads into a float."""
_NEAR = 0.75
"""How alike an unknown flag and one that is suggested must be, from 0 to 1."""


@dataclass(frozen=True, slots=True)
class AdapterFile:
    """A LoRA adapter to load, and its scale."""

    path: str
    scale: float


def adapter_files(args: Sequence[str]) -> tuple[list[AdapterFile], bool]:
    """The LoRA adapters of a llama-server command line, in their order, and whether they are
    applied from the start. Raises ConfigError."""
    files: list[AdapterFile] = []
    applied = True
    for flag, words in _split(args):
        if words[0] == "--lora-init-without-apply":
            applied = False
        elif flag.use == "lora":
            files += [_adapter_file(words[0], text) for text in words[1].split(",") if text]
    return files, applied


def _adapter_file(name: str, text: str) -> AdapterFile:
    if name == "--lora":
        return AdapterFile(text, 1.0)
    path, _, scale = text.rpartition(":")
    try:
        value = float(scale)
    except ValueError:
        value = math.nan
    if not path or not math.isfinite(value):
        raise ConfigError(f"--lora-scaled takes FILE:SCALE, not {text!r}.")
    return AdapterFile(path, value)


def check_flags(args: Sequence[str], own: Mapping[str, str]) -> None:
    """Check a llama-server command line for the embedded engine. own: towerd's flag -> its setting.

    Raises ConfigError that names the first flag that this engine does not accept."""
    for flag, words in _split(args, own):
        if flag.use == "refused":
            raise refusal(words[0], flag.why)
        if flag.use == "setting":
            same = " ".join(own_words(flag, words))
            raise ConfigError(f"{' '.join(words)} is {same} in towerd: write it before --.")
        _check_number(flag.takes, *words)
    adapter_files(args)


def _check_number(kind: str, name: str, value: str = "") -> None:
    """Raises ConfigError for a value that is not of this kind; empty: any will do. llama.cpp reads the digits that a value begins with, passes over the rest, and ends where a number
    does not fit."""
    if not kind or (_is_int(value) if kind == "int" else _is_float(value)):
        return
    number = "whole number" if kind == "int" else "number"
    raise ConfigError(f"{name} takes a {number}, not {value!r}.")


def _is_int(value: str) -> bool:
    plain = re.fullmatch(r"\s*[+-]?\d+\s*", value, re.ASCII) is not None
    return plain and -(2**31) <= int(value) < 2**32


def _is_float(value: str) -> bool:
    try:
        number = abs(float(value))
    except ValueError:
        return False
    fits = number == 0 or not math.isfinite(number) or F32_MIN <= number <= F32_MAX
    typed = value.strip().lower().lstrip("+-")
    return fits and "_" not in value and (math.isfinite(number) or typed[:3] in ("inf", "nan"))


def words_of(args: Sequence[str], use: Use, *, of_any: bool = False) -> list[str]:
    """The words of the flags of this use in a llama-server command line. of_any: it is that of any
    llama-server, whose other flags may be unknown here."""
    split = _split(args, skips_unknown=of_any)
    return [word for flag, words in split if flag.use == use for word in words]


def without_effect(args: Sequence[str]) -> list[tuple[str, str]]:
    """The flags in a llama-server command line that have no effect here, and why."""
    return [(words[0], flag.why) for flag, words in _split(args) if flag.use == "ignored"]


def own_words(flag: LlamaFlag, words: Sequence[str]) -> list[str]:
    """The flags of towerd that say what `words`, the flag and its values, say; empty if there are
    none. Raises ConfigError for a value that the flag does not have."""
    value = words[1] if flag.n_values else ""
    same = flag.words.get(value, flag.words.get("*"))
    if same is not None:
        return [word.replace("{}", value) for word in same]
    if not flag.words:
        return []
    raise ConfigError(f"{words[0]} takes {', '.join(flag.words)}, not {value!r}.")


@dataclass(frozen=True, slots=True)
class MediaFlags:
    """The media options of a command line."""

    path: str = ""
    """Path of the projector; empty: there is none."""
    offload: bool = True
    image_min_tokens: int = -1
    image_max_tokens: int = -1
    warmup: bool = True


def media_flags(args: Sequence[str]) -> MediaFlags:
    """The media options of a llama-server command line that `check_flags` accepts."""
    values: dict[str, str] = {}
    off: set[str] = set()
    for flag, words in _split(args):
        if flag.use == "media" and flag.n_values:
            values[flag.names[0]] = words[1]
        elif flag.use == "media":
            name = flag.names[0].replace("--no-", "--").removesuffix("-auto")
            if flag.names[0].startswith("--no-"):
                off.add(name)
            else:
                off.discard(name)
    return MediaFlags(
        path="" if "--mmproj" in off else values.get("--mmproj", ""),
        offload="--mmproj-offload" not in off,
        image_min_tokens=int(values.get("--image-min-tokens", -1)),
        image_max_tokens=int(values.get("--image-max-tokens", -1)),
        warmup="--warmup" not in off,
    )


def ui_settings(args: Sequence[str]) -> dict[str, Any]:
    """What a llama-server command line sets in the chat page. Raises ConfigError: what is given is no
    JSON object, or its file cannot be read."""
    settings: dict[str, Any] = {}
    for flag, words in _split(args):
        if flag.use == "ui":
            settings = _json_object(words[0], words[1], is_path=words[0].endswith("-file"))
    return settings


def _json_object(name: str, value: str, *, is_path: bool) -> dict[str, Any]:
    try:
        found = json.loads(Path(value).read_bytes() if is_path else value)
    except OSError as error:
        raise ConfigError(f"{name}: {value} cannot be read: {error.strerror}.") from error
    except ValueError as error:
        raise ConfigError(f"{name} takes JSON: {error}.") from error
    if not isinstance(found, dict):
        raise ConfigError(f"{name} takes a JSON object, the settings of the chat page by name.")
    return found


_DRAFT_FLAG = "--spec-draft-model"
_FILE_FLAGS = frozenset((_DRAFT_FLAG, "--grammar-file", "--json-schema-file"))


def named_files(args: Sequence[str]) -> Iterator[tuple[str, str]]:
    """The files that a checked llama-server command line needs to be there: flag and path."""
    for flag, words in _split(args):
        if _FILE_FLAGS.intersection(flag.names):
            yield words[0], words[1]
    if projector := media_flags(args).path:
        yield "--mmproj", projector
    for adapter in adapter_files(args)[0]:
        yield "--lora", adapter.path


def draft_model(args: Sequence[str]) -> str:
    """The path of the draft model that a checked llama-server command line names; "" for none."""
    found = ""
    for flag, words in _split(args):
        if _DRAFT_FLAG in flag.names:
            found = words[1]
    return found


def refusal(name: str, instead: str = "") -> ConfigError:
    """The error for a flag that the embedded engine does not accept. instead: what to do."""
    instead = instead or f"leave it out, or use --engine llama-server and put {name} after --"
    return ConfigError(f"{name} is not taken by the embedded engine: {instead}.")


def unknown_flag(word: str, own: Iterable[str]) -> ConfigError:
    """The error for a word that is no flag. own: towerd's flags."""
    if not word.startswith("-"):
        return ConfigError(f"{word!r} is not a flag; a model is named with -m.")
    name = canonical(word.partition("=")[0])
    long = [known for known in (*own, *by_name()) if known.startswith("--")]
    near = difflib.get_close_matches(name, long, n=1, cutoff=_NEAR)
    hint = f"did you mean {near[0]}?" if near else "towerd serve --help-all shows towerd's own."
    return ConfigError(f"There is no flag {name}: {hint}")


def canonical(name: str) -> str:
    """A flag as the tables spell it: like llama-server, towerd takes --top_k for --top-k."""
    return name.replace("_", "-") if name.startswith("--") else name


def take_values(name: str, n_values: int, words: Iterator[str]) -> list[str]:
    """The values of a flag, from the words after it. Raises ConfigError if they are too few."""
    values = [value for _, value in zip(range(n_values), words, strict=False)]
    if len(values) != n_values:
        raise ConfigError(f"{name} takes {'a value' if n_values == 1 else f'{n_values} values'}.")
    return values


def _split(
    args: Sequence[str], own: Mapping[str, str] | None = None, *, skips_unknown: bool = False
) -> Iterator[tuple[LlamaFlag, list[str]]]:
    words = iter(args)
    for word in words:
        given, is_joined, value = word.partition("=")
        name = canonical(given)
        if own is not None and name in own:
            raise ConfigError(f"{name} is towerd's own: write it before --, or set {own[name]}.")
        flag = by_name().get(name)
        if flag is None:
            if skips_unknown:
                continue
            raise unknown_flag(word, own or ())
        if skips_unknown:  # another build's flag of this name may take another number of values
            values = [value] if is_joined else list(islice(words, flag.n_values))
            yield flag, [name, *values]
            continue
        if is_joined and flag.n_values != 1:
            raise ConfigError(
                f"{name} takes {flag.n_values or 'no'} value{'s' * bool(flag.n_values)}."
            )
        yield flag, [name, *([value] if is_joined else take_values(name, flag.n_values, words))]
