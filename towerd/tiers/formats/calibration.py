"""Calibration: the measured cost of stored formats above a model's noise floor, as the catalog keeps it.

Quantized weights amplify rounding, so that evaluating the same text in other batches moves the
next-token distributions, by 0.003 nats on a model of 135M parameters in 4 bits. Any disturbance
of the rows costs that much, however small. The cost of a format is therefore its excess over this
floor. `towerd.tiers.formats.format_search` decides by it, and
`towerd.engine.embedded.calibration.calibrate` runs the model.
"""

from __future__ import annotations

import hashlib
import itertools
import logging
import math
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, TypeAlias

import msgspec
import numpy as np

from towerd.drift import Drift, combined
from towerd.errors import DiskFull
from towerd.kernels import dispatch
from towerd.kernels.formats import FORMATS
from towerd.slots.errors import StateError
from towerd.slots.layout import NATIVE, KVLayout, stored_format
from towerd.slots.rows import KVRows
from towerd.store import Store
from towerd.tiers.shrink import DEFAULT_ENDS, NativeEnds

log = logging.getLogger(__name__)

LEVELS = 3
"""Platform, community and bot base; deeper levels take the last entry."""
BOUNDS: Mapping[str, float] = {"near": 0.002, "small": 0.02}
"""Fidelity -> the highest mean KL divergence of the next-token distribution over the floor, in
nats; see `bound_of`."""
CANDIDATES = ("q4h", "q4", "q4ah", "q5h", "q6h", "q6", "q8h", "q8")
"""In order of preference among equally large ones."""
SHARES = (0.4, 0.3, 0.3)
"""The parts of a measured prefix, from its start, that stand for the levels. Platform prompts are
usually the longest of the shared ones, so level 0 gets the largest part; the last part stands for
bots and for the conversation itself, the level whose rows are nearest to the query."""
REACHES = tuple(itertools.accumulate(SHARES))
"""Up to which share of a prompt each level's format was measured."""
VERSION = 4

Table: TypeAlias = tuple[str, ...]
"""A format name, or "native", for each level."""
ALL_NATIVE: Table = (NATIVE,) * LEVELS
_Z = 1.959964
"""The 97.5 % quantile of the normal distribution."""


def bound_of(fidelity: str, floor_kl: float) -> float:
    """The highest excess that `near` or `small` allows a model with this floor.

    `near` also allows a tenth of the floor: less cannot be told from noise."""
    bound = BOUNDS[fidelity]
    return max(bound, floor_kl / 10) if fidelity == "near" else bound


def allows(fidelity: str, drift: Drift) -> bool:
    """Whether a measured drift stays within what the fidelity promises; never under `exact`."""
    return fidelity in BOUNDS and drift.excess <= bound_of(fidelity, drift.floor_kl)


@dataclass(frozen=True, slots=True)
class DriftSample:
    """One continuation over disturbed rows or in another shape: means over its tokens."""

    kl: float
    """KL divergence of the next-token distribution from that over native rows, in nats."""
    top1: float
    """Share of positions at which the most likely token is the same."""
    nll: float
    """Negative log-probability of the token that follows in the text, in nats."""


@dataclass(frozen=True, slots=True)
class Floor:
    """The model's noise: the same tokens over the same native rows, evaluated in another shape."""

    kl: float
    """Mean KL divergence, in nats."""
    ci: float
    """Half-width of its 95 % interval."""
    top1: float
    """Share of positions at which the most likely token is the same."""
    shape: str
    """The shape that was compared: the one with the largest divergence."""
    shapes: Mapping[str, float]
    """Shape -> mean KL divergence on the few continuations by which `shape` was chosen."""
    n_tokens: int


@dataclass(frozen=True, slots=True)
class FormatCost:
    """The cost of rows in a table's formats against native rows, evaluated in the same shape."""

    kl: float
    """Mean KL(native || stored) of the next-token distribution, in nats."""
    excess: float
    """`kl` less the floor on the same tokens; below 0 by chance only. 0 for native rows."""
    ci: float
    """Half-width of the excess's 95 % interval; each continuation is one cluster."""
    top1: float
    """Share of positions at which the most likely token is the same."""
    ppl: float
    """Perplexity of the measured continuation with these rows."""
    n_tokens: int
    """Next-token distributions that were compared."""

    @property
    def floor_kl(self) -> float:
        """The floor on the same tokens."""
        return self.kl - self.excess

    @property
    def excess_max(self) -> float:
        """The upper end of the excess's interval."""
        return self.excess + self.ci

    def is_within(self, bound: float) -> bool:
        """Whether the excess is at most `bound`, up to the end of its interval. A measure whose interval is
        as wide as the bound cannot tell, however small its mean: then it is not."""
        return self.ci < bound and self.excess_max <= bound


def format_cost(
    samples: Sequence[DriftSample], floor: Sequence[DriftSample], n_each: int
) -> FormatCost:
    """The cost of a table, from its samples and the floor's on the same continuations of
    `n_each` tokens; without a floor, the cost of undisturbed rows.

    Differences are paired, which removes the difficulty of each text."""
    excess, ci = 0.0, 0.0
    if floor:
        excess, ci = interval([a.kl - b.kl for a, b in zip(samples, floor, strict=True)])
    return FormatCost(
        kl=float(np.mean([sample.kl for sample in samples])),
        excess=excess,
        ci=ci,
        top1=float(np.mean([sample.top1 for sample in samples])),
        ppl=float(np.exp(np.mean([sample.nll for sample in samples]))),
        n_tokens=n_each * len(samples),
    )


@dataclass(frozen=True, slots=True)
class FormatChoice:
    """The table of one fidelity, its cost measured as a whole, and its size."""

    levels: Table
    cost: FormatCost
    bits: float
    """Mean bits of a stored value, with scales, without sinks and last rows."""
    bound: float
    """The bound that the excess had to stay within."""
    ends: NativeEnds = DEFAULT_ENDS
    """What stays native of chats that no other shares."""
    whole: FormatCost | None = None
    """The cost of short chats that are wholly in the last level's format, or that of the deepest level
    that is not native; None: all are."""


@dataclass(frozen=True, slots=True)
class Grid:
    """The measurements that the search starts from."""

    native: FormatCost
    uniform: Mapping[str, FormatCost]
    """Format -> cost if all levels take it."""
    weights: tuple[float, ...]
    """Each level's share of the excess of a format that all levels take."""


class Calibration(msgspec.Struct, frozen=True):
    """A finished calibration of one row identity."""

    row_identity: str = msgspec.field(name="fingerprint")
    """Digest of the row identity, hex."""
    formats: str
    """`formats_digest()` of the table of formats that was measured."""
    ids: str
    """BLAKE2b of the measured token ids, hex: the same text and tokenizer give the same."""
    made_unix: float
    bits: Mapping[str, float]
    """Format -> bits of a value of this model's rows; `native` included."""
    floor: Floor
    grid: Grid
    choices: Mapping[str, FormatChoice]
    """Fidelity (`near`, `small`) -> the formats chosen for it."""

    @property
    def n_tokens(self) -> int:
        """Next-token distributions behind the floor, which is the most precise figure."""
        return self.floor.n_tokens

    def to_json(self) -> dict[str, Any]:
        """A dict of JSON values; `from_json` takes it back."""
        return {"version": VERSION, **msgspec.to_builtins(self)}

    @classmethod
    def from_json(cls, value: object) -> Calibration:
        """ValueError if `value` is not what `to_json` gives, or from another version."""
        if not isinstance(value, Mapping) or value.get("version") != VERSION:
            raise ValueError("not a calibration of this version")
        body = {key: item for key, item in value.items() if key != "version"}
        try:
            found = msgspec.convert(body, cls)
        except msgspec.ValidationError as error:
            raise ValueError(f"not a calibration: {error}") from error
        for choice in found.choices.values():
            check_table(choice.levels)
        return found


def check_table(table: Sequence[str]) -> None:
    """ValueError unless `table` has one stored format or "native" for each level."""
    if len(table) != LEVELS:
        raise ValueError(f"levels: expected {LEVELS} formats, found {len(table)}")
    for name in table:
        if name != NATIVE:
            try:
                stored_format(name)
            except StateError as error:
                raise ValueError(f"levels: {error}") from error


def formats_digest() -> str:
    """Changes when a stored format is added, removed or laid out differently."""
    rows = [f"{f.name}:{f.type_id}:{f.block_elements}:{f.block_bytes}" for f in FORMATS]
    return hashlib.blake2b("\n".join(sorted(rows)).encode(), digest_size=16).hexdigest()


def sizes(layout: KVLayout) -> dict[str, float]:
    """Bits of a value in each candidate that is smaller than the native rows, smallest first and
    then by preference, and `native` last."""
    n_values = sum(plane.n_elements for plane in layout.planes)

    def bits(name: str) -> float:
        planes = layout.stored_as(name).planes
        return 8 * sum(plane.row_bytes for plane in planes) / n_values

    native = bits(NATIVE)
    smaller = [name for name in CANDIDATES if bits(name) < native]
    return {name: bits(name) for name in (*sorted(smaller, key=bits), NATIVE)}


def bits_of(table: Table, bits: Mapping[str, float]) -> float:
    """Mean bits of a value over the levels' shares. `bits` as `sizes` gives them."""
    return sum(share * bits[name] for share, name in zip(SHARES, table, strict=True))


def interval(means: Sequence[float]) -> tuple[float, float]:
    """The mean of independent clusters' means, and the half-width of its 95 % interval.

    Tokens of one continuation are correlated, so each continuation is one cluster, and only the
    spread between clusters determines the interval. It is infinite for a single cluster."""
    n = len(means)
    if n < 2:
        return float(np.mean(means)), math.inf
    error = float(np.std(means, ddof=1)) / math.sqrt(n)
    return float(np.mean(means)), t_quantile(n - 1) * error


def t_quantile(df: int) -> float:
    """The 97.5 % quantile of Student's t (Abramowitz and Stegun 26.7.5).

    Accurate to 1 % from three degrees of freedom on; too small for fewer."""
    z = _Z
    return (
        z
        + (z**3 + z) / (4 * df)
        + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * df**2)
        + (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / (384 * df**3)
        + (79 * z**9 + 776 * z**7 + 1482 * z**5 - 1920 * z**3 - 945 * z) / (92160 * df**4)
    )


def load_calibration(store: Store, row_identity: str) -> Calibration | None:
    """The calibration of a row identity (its digest in hex); None if there is none, or if it was
    made with other stored formats than this towerd has. Raises StoreError."""
    text = store.get_meta(_key(row_identity))
    if text is None:
        return None
    try:
        found = Calibration.from_json(msgspec.json.decode(text))
    except (ValueError, msgspec.DecodeError) as error:
        log.warning("a stored calibration cannot be read", extra={"error": str(error)})
        return None
    return found if found.formats == formats_digest() else None


def save_calibration(store: Store, found: Calibration) -> None:
    """Store a calibration durably in place of an earlier one. Raises DiskFull or StoreError."""
    store.set_meta(_key(found.row_identity), msgspec.json.encode(found.to_json()).decode())


def _key(row_identity: str) -> str:
    return f"calibration:{row_identity}"


@dataclass(frozen=True, slots=True)
class SqueezedFormat:
    """A stored format, and the drift of rows that were in the formats of their levels before."""

    name: str
    drift: Drift


def squeezed_format(found: Calibration, fidelity: str) -> SqueezedFormat | None:
    """The smallest format that a conversation may be encoded in once more, after the format that
    `fidelity` chose for it; None if none is smaller.

    Errors of the two encodings add up, so both together must stay within the bound of `small`, up
    to the ends of their 95 % intervals."""
    first = found.choices[fidelity]
    candidates = [
        (found.choices["small"].levels[-1], found.choices["small"].cost),
        *found.grid.uniform.items(),
    ]
    for name, cost in sorted(candidates, key=lambda each: found.bits[each[0]]):
        excess = max(0.0, first.cost.excess_max) + max(0.0, cost.excess_max)
        is_sure = excess <= BOUNDS["small"] and cost.is_within(BOUNDS["small"])
        if found.bits[name] < found.bits[first.levels[-1]] and is_sure:
            both = [Drift(each.kl, each.floor_kl) for each in (first.cost, cost)]
            return SqueezedFormat(name, combined(both))
    return None


def remember_squeezed(store: Store, squeezed: SqueezedFormat | None) -> dict[str, Drift]:
    """The largest drift of each format that rows of this model were ever squeezed into, `squeezed`
    among them from now on: what was squeezed keeps its drift whatever is measured later."""
    key = f"squeezed:{store.state.digest.hex()}"
    found = msgspec.json.decode(store.get_meta(key) or "{}", type=dict[str, Drift])
    if squeezed is None:
        return found
    before = found.get(squeezed.name)
    if before is None or before.kl < squeezed.drift.kl:
        found[squeezed.name] = squeezed.drift
        with suppress(DiskFull):  # told until the next start all the same
            store.set_meta(key, msgspec.json.encode(found).decode())
    return found


def was_squeezed(store: Store) -> bool:
    """Whether any rows of this model were ever squeezed."""
    return store.get_meta(_squeezed_key(store)) is not None


def remember_that_it_squeezed(store: Store) -> None:
    """See `was_squeezed`."""
    with suppress(DiskFull):
        store.set_meta(_squeezed_key(store), "1")


def _squeezed_key(store: Store) -> str:
    return f"has_squeezed:{store.state.digest.hex()}"


def level_ranges(n: int, ends: NativeEnds = DEFAULT_ENDS) -> list[tuple[int, int]]:
    """[start, stop) of each level in a prefix of `n` tokens, without sinks and last rows; the
    ranges are empty if there is nothing between them."""
    first, last = ends.sinks, max(ends.sinks, n - ends.tail)
    stops = first + np.round(np.cumsum(SHARES) * (last - first)).astype(int)
    return list(zip([first, *stops[:-1].tolist()], stops.tolist(), strict=True))


def stored_parts(rows: KVRows, table: Table, ends: NativeEnds = DEFAULT_ENDS) -> list[KVRows]:
    """`rows` (native, positions [0, n)) as consecutive parts, each level in its format; encoded in
    those of deeper levels before, as rows are that come to be shared. Raises ValueError for an
    invalid table."""
    check_table(table)
    parts, at = [], 0
    for level, (start, stop) in enumerate(level_ranges(len(rows), ends)):
        if start == stop or table[level] == NATIVE:
            continue
        if at < start:
            parts.append(rows.slice(at, start))
        part = rows.slice(start, stop)
        for name, _ in itertools.groupby(reversed(table[level:])):
            if name != NATIVE:
                part = encoded(part, rows.layout.stored_as(name))
        parts.append(part)
        at = stop
    if at < len(rows):
        parts.append(rows.slice(at, len(rows)))
    return parts


def uniform(name: str) -> Table:
    """The table that gives every level the same format."""
    return (name,) * LEVELS


def stored(rows: KVRows, name: str) -> KVRows:
    """Native rows encoded as `name`, where that makes them smaller (`KVLayout.stored_as`)."""
    return encoded(rows, rows.layout.stored_as(name))


def encoded(rows: KVRows, layout: KVLayout) -> KVRows:
    """A copy of rows as rows of `layout`, which must describe the same values.
    `emit_blob(..., layout=rows.layout)` decodes them."""
    old = rows.layout.planes
    planes = tuple(
        dispatch.transcoded(plane, have.format.name, want.format.name)
        for plane, have, want in zip(rows.planes(), old, layout.planes, strict=True)
    )
    k, v = planes[: layout.n_layer], planes[layout.n_layer :]
    return KVRows(layout, rows.positions, k, v, rows.ext)
