"""Models of this machine by name: all that are found, and the one that a name means."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Iterator, Sequence

from towerd.errors import ModelError
from towerd.models.hub.choice import PREFERRED_QUANTS, REPO
from towerd.models.local.folders import READERS, FoundModel, places

LATEST = ":latest"
NEAREST_MAX = 3
SIMILARITY_MIN = 0.6


def found_models() -> list[FoundModel]:
    """Every model that some program keeps on this machine. A file that two of them share is there
    once; where a name occurs twice, `find_named` takes the first."""
    seen: set[tuple[int, int]] = set()
    models = []
    for model in _everywhere():
        try:
            stat = model.path.stat()
        except OSError:
            continue
        if (file := (stat.st_dev, stat.st_ino)) not in seen:
            seen.add(file)
            models.append(model)
    return models


def _everywhere() -> Iterator[FoundModel]:
    known = places()
    for source, readers in READERS.items():
        for folder in known[source]:
            for read in readers:
                yield from read(folder, source)


def find_named(text: str, models: Sequence[FoundModel], others: Iterable[str] = ()) -> FoundModel:
    """The model that `text` means: a name, one without its tag, or words of one name alone. Raises
    ModelError, which says the nearest names, those of `others` among them.

    What ends in `.gguf` is a whole name: it may be meant as a file that is not there."""
    wanted = text.lower()
    for exact in (wanted, wanted + LATEST):
        for model in models:
            if model.name.lower() == exact:
                return model
    words = re.compile(r"(?<![a-z0-9])" + re.escape(wanted))
    shortened = [] if wanted.endswith(".gguf") else models
    within = _first_of_each_name(m for m in shortened if words.search(m.name.lower()))
    same_base = [model for model in within if model.base.lower() == wanted]
    for quant in PREFERRED_QUANTS:
        for model in same_base:
            if model.name.endswith(":" + quant):
                return model
    if len(within) == 1:
        return within[0]
    if within:
        raise ModelError(f"{text} could be {_either(within)}: give more of the name.")
    raise ModelError(_unknown(text, [*others, *(model.name for model in models)]))


def _first_of_each_name(models: Iterable[FoundModel]) -> list[FoundModel]:
    by_name: dict[str, FoundModel] = {}
    for model in models:
        by_name.setdefault(model.name, model)
    return list(by_name.values())


def _either(models: Sequence[FoundModel]) -> str:
    names = [model.name for model in models]
    if len(names) > NEAREST_MAX:
        return f"{', '.join(names[:NEAREST_MAX])} or {len(names) - NEAREST_MAX} others"
    return " or ".join(names)


def _unknown(text: str, names: Sequence[str]) -> str:
    likeness = {name: _likeness(text.lower(), name.lower()) for name in names}
    near = [name for name, value in likeness.items() if value >= SIMILARITY_MIN]
    near = sorted(near, key=lambda name: -likeness[name])[:NEAREST_MAX]
    said = f"There is no model {text} on this machine"
    if near:
        said += f"; nearest {'is' if len(near) == 1 else 'are'} {', '.join(near)}"
    if REPO.fullmatch(text.partition(":")[0]):
        return f"{said}: towerd serve -hf {text} fetches it from Hugging Face."
    return f"{said}: towerd models lists all."


def _likeness(text: str, name: str) -> float:
    """0 to 1: how much `text` is like the name, or like the part that people remember of it."""
    file = name.rpartition("/")[2]
    model = re.sub(r"[-.]gguf$", "", file.partition(":")[0])
    return max(difflib.SequenceMatcher(None, text, part).ratio() for part in (name, file, model))
