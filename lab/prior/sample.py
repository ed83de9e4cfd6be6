"""Builds the bundled sample of chat (`towerd.codec.prior.sample`).

`python -m lab.prior.sample DATA OUT` builds it from a folder of chat data (`train.jsonl.zst` and
`assistant_wildbench.jsonl.zst`; the licences are in NOTICE).
"""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Iterator
from pathlib import Path

import zstandard

SHARES: dict[str, int] = {
    "wildbench": 130_000,
    "gpteacher": 90_000,
    "self-dialogue": 60_000,
    "ubuntu-irc": 40_000,
    "taskmaster": 30_000,
    "gsm8k": 20_000,
    "natinst": 20_000,
    "md": 50_000,
    "python": 40_000,
}
"""Bytes of text from each set."""
_RECORD_BYTES_MAX = 6_000


def build(data: Path) -> bytes:
    """The sample of the chat data in `data`: whole short records, chosen by their hash.

    The sets that matter most come last, where references into a zstd dictionary are cheapest."""
    chosen: dict[str, list[tuple[bytes, str]]] = {name: [] for name in SHARES}
    for file in ("train.jsonl.zst", "assistant_wildbench.jsonl.zst"):
        for line in _lines(data / file):
            record = json.loads(line)
            text = "\n".join(message["content"] for message in record["messages"])
            source = record["src"].split("/")[0]
            if source in chosen and len(text.encode()) <= _RECORD_BYTES_MAX:
                digest = hashlib.blake2b(text.encode(), digest_size=8).digest()
                chosen[source].append((digest, text))
    parts: list[str] = []
    for source, texts in reversed(chosen.items()):
        left = SHARES[source]
        for _, text in sorted(texts):
            if left <= 0:
                break
            parts.append(text)
            left -= len(text.encode())
    return "\f".join(parts).encode()


def _lines(path: Path) -> Iterator[str]:
    with path.open("rb") as file, zstandard.ZstdDecompressor().stream_reader(file) as stream:
        yield from stream.read().decode().split("\n")[:-1]


def main() -> None:
    """Write the sample; arguments: the folder of the data, the file to write."""
    text = build(Path(sys.argv[1]))
    packed = zstandard.ZstdCompressor(level=22, threads=0).compress(text)
    Path(sys.argv[2]).write_bytes(packed)
    print(f"{len(text):,} bytes of text, {len(packed):,} bytes packed")


if __name__ == "__main__":
    main()
