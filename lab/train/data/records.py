"""Folders of chat records, split into training and evaluation data."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Collection
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from lab.texts.chat_records import SUFFIX, ChatRecord, read_records
from lab.train.data.manifest import TextSource
from lab.train.errors import TrainError

TRAIN, DEV = f"train{SUFFIX}", f"dev{SUFFIX}"
DEV_SHARE = 0.02
FIRST_SENTENCE = re.compile(r".+?(?:[.!?](?=\s)|\n|\Z)", re.DOTALL)


@dataclass(frozen=True)
class Dataset:
    """Records of both splits, by source."""

    train: dict[str, list[ChatRecord]] = field(default_factory=dict)
    dev: dict[str, list[ChatRecord]] = field(default_factory=dict)
    digests: dict[str, str] = field(default_factory=dict)
    """File name -> SHA-256 of the file."""
    left_out: tuple[str, ...] = ()
    """Sources that the files have and this text has not."""

    @property
    def fingerprint(self) -> str:
        """Changes with any byte of any file, and with the sources that were left out."""
        left_out = {"without": ",".join(self.left_out)} if self.left_out else {}
        text = msgspec.json.encode(self.digests | left_out, order="sorted")
        return hashlib.blake2b(text, digest_size=16).hexdigest()

    def without(self, left_out: Collection[str]) -> Dataset:
        """This text without the sources `left_out`. Raises TrainError for one that is not there."""
        if unknown := sorted(set(left_out) - self.train.keys()):
            raise TrainError(f"There is no source {unknown[0]}; there are {', '.join(self.train)}.")
        train = {name: of for name, of in self.train.items() if name not in left_out}
        dev = {name: of for name, of in self.dev.items() if name not in left_out}
        if not train or not dev:
            raise TrainError("Leave at least one source with records of both splits.")
        return Dataset(train, dev, self.digests, tuple(sorted(left_out)))


def read_dataset(folder: Path, manifest: dict[str, TextSource]) -> Dataset:
    """Read every *.jsonl.zst of `folder`: files named train and dev as such, the others are split.

    Raises TrainError for an empty folder or a source without a licence, ConfigError for a damaged
    file or unknown fields.
    """
    paths = sorted(folder.glob(f"*{SUFFIX}")) if folder.is_dir() else []
    if not paths:
        raise TrainError(f"{folder} holds no *{SUFFIX} files: name a folder of chat records.")
    found = Dataset()
    for path in paths:
        found.digests[path.name] = hashlib.sha256(path.read_bytes()).hexdigest()
        for record in read_records(path):
            if record.source not in manifest:
                raise TrainError(
                    f"{path} has records of {record.source!r}, which the manifest does not list: "
                    "add its origin, licence and weight there first."
                )
            is_dev = path.name == DEV or (path.name != TRAIN and in_dev(record))
            split = found.dev if is_dev else found.train
            split.setdefault(record.source, []).append(record)
    if not found.train or not found.dev:
        raise TrainError(
            f"{folder} needs records for training and for evaluation ({TRAIN}, {DEV})."
        )
    return found


def in_dev(record: ChatRecord) -> bool:
    """Whether a record of a file without splits is kept for evaluation. Its first sentence decides,
    so that answers which begin alike stay on one side."""
    first = FIRST_SENTENCE.match(record.messages[0].content)
    text = first[0].strip() if first else ""
    digest = hashlib.blake2b(text.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >= (1 - DEV_SHARE) * 2**64
