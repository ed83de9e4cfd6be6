"""What the name of a GGUF says, read as llama.cpp does (`common/download.cpp`)."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

_SPLIT = re.compile(r"(.+)-(\d{5})-of-(\d{5})", re.DOTALL)
_QUANT = re.compile(r"[-.]([A-Za-z0-9_]+)$")
_SIDECARS = ("mmproj", "imatrix", "mtp-", "eagle3-", "dflash-", "dspark-")
"""Parts of the names of files that belong to a model but are none."""


@dataclass(frozen=True, slots=True)
class FileName:
    """A GGUF's path inside its repository, taken apart."""

    path: str
    stem: str
    """The path without its number and `.gguf`; the quantization is its end."""
    quant: str
    """Upper case, such as Q4_K_M; empty if the name has no such end."""
    index: int
    """1 for the first file of a split model, and for one that is not split."""
    count: int

    @classmethod
    def parse(cls, path: str) -> FileName | None:
        """None for a file that is not a GGUF."""
        if not path.endswith(".gguf"):
            return None
        stem, index, count = path.removesuffix(".gguf"), 1, 1
        if split := _SPLIT.fullmatch(stem):
            stem, index, count = split[1], int(split[2]), int(split[3])
        quant = _QUANT.search(stem)
        return cls(path, stem, quant[1].upper() if quant else "", index, count)

    @property
    def bits(self) -> int:
        """The first number of the quantization: 4 of Q4_K_M; 0 if there is none."""
        return bits_of(self.quant)

    @property
    def is_model(self) -> bool:
        """Whether it is a whole model or the first file of one, not a projector or other sidecar."""
        name = self.path.rpartition("/")[2]
        return self.index == 1 and not any(word in name for word in _SIDECARS)

    @property
    def is_projector(self) -> bool:
        """Whether it encodes pictures or sounds for a model."""
        return "mmproj" in self.path

    def parts(self) -> list[str]:
        """The paths of all files of the model."""
        if self.count <= 1:
            return [self.path]
        numbers = range(1, self.count + 1)
        return [f"{self.stem}-{number:05}-of-{self.count:05}.gguf" for number in numbers]


def bits_of(quant: str) -> int:
    """The first number in the name of a quantization; 0 if there is none."""
    number = re.search(r"\d+", quant)
    return int(number[0]) if number else 0


def parts_of(path: Path) -> list[Path]:
    """The files of the model whose first file is `path`."""
    name = FileName.parse(path.name)
    return [path] if name is None else [path.with_name(part) for part in name.parts()]
