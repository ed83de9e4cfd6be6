"""Ids of M to text and back, exactly, whatever the ids are.

Ids become runs of valid UTF-8 between *marks*: control tokens, and tokens whose bytes are not
valid UTF-8 where they stand (a lone byte of a character). A mark is one of the bytes 0xF8 to 0xFF,
which valid UTF-8 never has: 0xF8 + k is the k-th kind of mark of this text, 0xFF one that the side
information names each time. The runs are tokenized again on the way back; where the result is not
what the ids were (models do not always write what their tokenizer would), an exception lists the
ids that stand there. No id can be lost: a run that does not align is an exception as a whole.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from towerd.codec import varint
from towerd.codec.base import TokenVocabulary
from towerd.codec.errors import Damaged, other_ids
from towerd.tokens import Ids

MARK_FIRST, MARK_OTHER = 0xF8, 0xFF
KINDS_MAX = MARK_OTHER - MARK_FIRST
_MARKS = re.compile(rb"([\xf8-\xff])")
_ROUNDS = 8
_IDS_END = 1 << 31

KIND_NAMES: tuple[tuple[bytes, ...], ...] = (
    (
        b"<|im_start|>",
        b"<|start_header_id|>",
        b"<start_of_turn>",
        b"<|turn>",
        b"<|start|>",
        b"[INST]",
    ),
    (b"<|im_end|>", b"<|eot_id|>", b"<end_of_turn>", b"<turn|>", b"<|end|>", b"</s>"),
    (b"<|end_header_id|>", b"[/INST]", b"<|message|>"),
    (b"<s>", b"<bos>", b"<|begin_of_text|>", b"<|endoftext|>", b"<|startoftext|>"),
)
"""Marks whose meaning templates share have a fixed kind, so that a text model can learn them:
start of a message, its end, end of a message's header, start of the text."""


@dataclass(frozen=True)
class Patch:
    """`n` ids of the tokenized runs, from `start` on, are really `ids`."""

    start: int
    n: int
    ids: tuple[int, ...]


@dataclass(frozen=True)
class Text:
    """`text` is UTF-8 and marks. `kinds`: the id of each kind of mark (-1: unused); `others`: the
    ids of the 0xFF marks in order. `strip`: tokenizing a run adds the space that it starts with."""

    text: bytes
    kinds: tuple[int, ...] = ()
    others: tuple[int, ...] = ()
    exceptions: tuple[Patch, ...] = ()
    strip: bool = False

    def side(self) -> bytes:
        """The side information: everything but the text, as bytes."""
        numbers = [int(self.strip), len(self.kinds), *(i + 1 for i in self.kinds)]
        numbers += [len(self.others), *self.others, len(self.exceptions)]
        at = 0
        for each in self.exceptions:
            numbers += [each.start - at, each.n, len(each.ids), *each.ids]
            at = each.start + each.n
        return varint.put_all(numbers)


def parse(text: bytes, side: bytes) -> Text:
    """The Text of a text and its `side()`. Damaged if they do not fit together, or the text is not valid:
    llama.cpp's tokenizers end the process at some bytes."""
    reader = varint.VarintReader(side)
    strip = bool(reader.number(2))
    kinds = tuple(i - 1 for i in reader.numbers(reader.number(KINDS_MAX + 1), _IDS_END + 1))
    others = tuple(reader.numbers(reader.number(), _IDS_END))
    exceptions, at = [], 0
    for _ in range(reader.number(len(side))):
        start = at + reader.number()
        n = reader.number()
        ids = tuple(reader.numbers(reader.number(), _IDS_END))
        exceptions.append(Patch(start, n, ids))
        at = start + n
    reader.end()
    try:
        _MARKS.sub(b"\0", text).decode()  # a mark is no part of a character, as 0 is none
    except UnicodeDecodeError as error:
        raise Damaged("The blob is damaged: its text is not valid UTF-8.") from error
    return Text(text, kinds, others, tuple(exceptions), strip)


def from_ids(ids: Ids, vocabulary: TokenVocabulary) -> Text:
    """The text of ids that are all in the vocabulary."""
    pieces = vocabulary.pieces
    listed: list[int] = ids.tolist()
    marked = _marked(listed, pieces)
    kinds = kinds_of([listed[i] for i in np.flatnonzero(marked)], vocabulary.names)
    out, others = bytearray(), []
    runs: list[list[int]] = [[]]
    for token, is_mark in zip(listed, marked.tolist(), strict=True):
        if not is_mark:
            out += pieces[token]
            runs[-1].append(token)
            continue
        kind = kinds.index(token) if token in kinds else KINDS_MAX
        others += [token] if kind == KINDS_MAX else []
        out.append(MARK_FIRST + kind)
        runs.append([])
    exceptions, strip = _best_exceptions([run for run in runs if run], vocabulary)
    return Text(bytes(out), tuple(kinds), tuple(others), exceptions, strip)


def to_ids(text: Text, vocabulary: TokenVocabulary) -> list[int]:
    """The ids again. Damaged if the parts contradict each other or the vocabulary."""
    out: list[int] = []
    patches, others = _Patches(text.exceptions), iter(text.others)
    for part in _MARKS.split(text.text):
        if len(part) == 1 and part[0] >= MARK_FIRST:
            out.append(_token(part[0] - MARK_FIRST, text.kinds, others))
        elif part:
            patches.apply(_tokenize(part, vocabulary, text.strip), out)
    patches.end()
    return out


def spell(text: Text, vocabulary: TokenVocabulary) -> bytes:
    """The bytes that the ids stand for, control tokens as they are written; nothing is tokenized.
    Damaged if a mark has no meaning."""
    pieces, names = vocabulary.pieces, vocabulary.names
    others, out = iter(text.others), bytearray()
    for part in _MARKS.split(text.text):
        if len(part) == 1 and part[0] >= MARK_FIRST:
            token = _token(part[0] - MARK_FIRST, text.kinds, others)
            if token >= len(pieces):
                raise Damaged("The blob is damaged: it has a token that the vocabulary lacks.")
            out += pieces[token] or names[token]
        else:
            out += part
    return bytes(out)


def _token(kind: int, kinds: Sequence[int], others: Iterator[int]) -> int:
    """The id of a mark."""
    token = next(others, -1) if kind == KINDS_MAX else (*kinds, *[-1] * KINDS_MAX)[kind]
    if token < 0:
        raise Damaged("The blob is damaged: its text has a mark that nothing explains.")
    return token


def as_context(ids: Ids, kinds: Sequence[int], vocabulary: TokenVocabulary) -> bytes:
    """Text for a model to attend to: only the marks for `kinds` are exact."""
    marks = {token: bytes((MARK_FIRST + kind,)) for kind, token in enumerate(kinds) if token >= 0}
    pieces = vocabulary.pieces
    parts = _MARKS.split(b"".join([marks.get(i) or pieces[i] for i in ids.tolist()]))
    return b"".join(
        part if len(part) == 1 and part[0] >= MARK_FIRST else part.decode(errors="ignore").encode()
        for part in parts
    )


def split(text: bytes) -> list[bytes]:
    """Runs of text and single marks, alternating; runs may be empty."""
    return _MARKS.split(text)


class _Patches:
    """Replaces ids of the tokenized runs, which come one after the other.

    A run of n ids takes n + 1 positions, which tells an exception at its end from one at the
    start of the next run."""

    def __init__(self, exceptions: Sequence[Patch]) -> None:
        self.left, self.start = list(reversed(exceptions)), 0

    def apply(self, run: Ids, out: list[int]) -> None:
        """Append the run, patched, to `out`."""
        at, end = 0, len(run)
        while self.left and self.left[-1].start <= self.start + end:
            patch = self.left.pop()
            first = patch.start - self.start
            if first < at or first + patch.n > end:
                raise other_ids()
            out += run[at:first].tolist()
            out += patch.ids
            at = first + patch.n
        out += run[at:].tolist()
        self.start += end + 1

    def end(self) -> None:
        if self.left:
            raise other_ids()


def _tokenize(run: bytes, vocabulary: TokenVocabulary, strip: bool) -> Ids:
    stripped = run[1:] if strip and run[:1] == b" " else run
    return np.asarray(vocabulary.tokenize(stripped), np.int32)


def kinds_of(marks: list[int], names: Sequence[bytes]) -> list[int]:
    """The id of each kind: those with a known meaning first, then by how often they occur."""
    counts = Counter(marks)
    kinds = [next((t for t in counts if names[t] in known), -1) for known in KIND_NAMES]
    rest = sorted((t for t in counts if t not in kinds), key=lambda t: -counts[t])
    kinds += rest[: KINDS_MAX - len(kinds)]
    while kinds and kinds[-1] < 0:
        kinds.pop()
    return kinds


def _marked(ids: list[int], pieces: Sequence[bytes]) -> npt.NDArray[np.bool_]:
    """Which ids cannot be part of a run of valid UTF-8."""
    sizes = np.array([len(pieces[i]) for i in ids], np.int64)
    marked: npt.NDArray[np.bool_] = sizes == 0
    for _ in range(_ROUNDS):
        found = False
        for first, last in _runs(marked):
            run = b"".join([pieces[i] for i in ids[first:last]])
            bad = _invalid(run)
            if len(bad):
                ends = np.cumsum(sizes[first:last])
                marked[first + np.searchsorted(ends, bad, side="right")] = True
                found = True
        if not found:
            return marked
    for first, last in _runs(marked):
        if len(_invalid(b"".join([pieces[i] for i in ids[first:last]]))):
            marked[first:last] = True
    return marked


def _runs(marked: npt.NDArray[np.bool_]) -> list[tuple[int, int]]:
    """(first, last + 1) of each run of ids between marks."""
    edges = np.flatnonzero(np.diff(np.concatenate(([True], marked, [True])).astype(np.int8)))
    return list(zip(edges[::2].tolist(), edges[1::2].tolist(), strict=True))


def _invalid(data: bytes) -> npt.NDArray[np.int64]:
    """Where `data` is not valid UTF-8: int64[k] byte positions."""
    points = np.frombuffer(
        data.decode("utf-8", "surrogateescape").encode("utf-32-le", "surrogatepass"), "<u4"
    )
    escaped = (points >= 0xDC80) & (points <= 0xDCFF)
    if not escaped.any():
        return np.zeros(0, np.int64)
    sizes = 1 + (points >= 0x80).astype(np.int64) + (points >= 0x800) + (points >= 0x10000)
    sizes[escaped] = 1
    found: npt.NDArray[np.int64] = (np.cumsum(sizes) - sizes)[escaped]
    return found


def _best_exceptions(
    runs: list[list[int]], vocabulary: TokenVocabulary
) -> tuple[tuple[Patch, ...], bool]:
    """The exceptions, and whether to `strip`: whichever choice takes fewer bytes."""
    plain = _exceptions(runs, vocabulary, strip=False)
    if not plain or not any(vocabulary.pieces[run[0]][:1] == b" " for run in runs):
        return plain, False
    stripped = _exceptions(runs, vocabulary, strip=True)
    sizes = [len(Text(b"", exceptions=each).side()) for each in (plain, stripped)]
    return (plain, False) if sizes[0] <= sizes[1] else (stripped, True)


def _exceptions(
    runs: list[list[int]], vocabulary: TokenVocabulary, strip: bool
) -> tuple[Patch, ...]:
    found: list[Patch] = []
    start = 0
    for run in runs:
        text = b"".join([vocabulary.pieces[i] for i in run])
        canonical = _tokenize(text, vocabulary, strip)
        listed = canonical.tolist()
        if listed != run:
            found += _differences(run, listed, vocabulary.pieces, start)
        start += len(canonical) + 1
    return tuple(found)


def _differences(
    run: list[int], canonical: list[int], pieces: Sequence[bytes], start: int
) -> list[Patch]:
    """Where two tokenizations of one text differ, between byte positions at which both end a token;
    the whole run if the texts differ."""
    extra = sum(len(pieces[i]) for i in canonical) - sum(len(pieces[i]) for i in run)
    if extra not in (0, 1):  # 1: the tokenizer put a space in front
        return [Patch(start, len(canonical), tuple(run))]
    found: list[Patch] = []
    i = j = first = first_canonical = 0
    ahead = -extra  # bytes by which `canonical` is ahead of `run`
    while i < len(run) or j < len(canonical):
        if j < len(canonical) and (ahead <= 0 or i == len(run)):
            ahead += len(pieces[canonical[j]])
            j += 1
        else:
            ahead -= len(pieces[run[i]])
            i += 1
        if ahead == 0:
            if run[first:i] != canonical[first_canonical:j]:
                n = j - first_canonical
                _append(found, Patch(start + first_canonical, n, tuple(run[first:i])))
            first, first_canonical = i, j
    return found


def _append(found: list[Patch], patch: Patch) -> None:
    """Append a patch, merged with the last one if they touch."""
    if found and found[-1].start + found[-1].n == patch.start:
        last = found.pop()
        patch = Patch(last.start, last.n + patch.n, last.ids + patch.ids)
    found.append(patch)
