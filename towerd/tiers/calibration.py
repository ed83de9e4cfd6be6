"""Calibration: which stored format each level of a tower may take, decided by measured costs.

Pure: the search asks a `measure` function, the result is a value with a JSON form. What runs the
model is `towerd.engine.embedded.calibrate`.
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, TypeAlias

import msgspec

from towerd.kernels.formats import FORMATS
from towerd.slots.errors import StateError
from towerd.slots.layout import NATIVE, KVLayout, stored_format

LEVELS = 3
"""Platform, community and bot base; whatever is deeper takes the last entry."""
BOUNDS: Mapping[str, float] = {"near": 0.002, "small": 0.02}
"""Fidelity -> the highest mean KL divergence of the next-token distribution, in nats."""
CANDIDATES = ("q4h", "q4", "q4ah", "q5h", "q6h", "q6", "q8h", "q8")
"""In order of preference among equally large ones."""
SHARES = (0.4, 0.3, 0.3)
"""The parts of a measured prefix, from its start, that stand for the levels. Platform prompts are
usually the longest of the shared ones, so level 0 gets the largest part; the last part stands for
bots and for the conversation itself, the level whose rows are nearest to the query."""
VERSION = 1

Table: TypeAlias = tuple[str, ...]
"""A format name, or "native", for each level."""


@dataclass(frozen=True, slots=True)
class Cost:
    """What rows in some table's formats cost against native rows."""

    kl: float
    """Mean KL(native || stored) of the next-token distribution, in nats."""
    top1: float
    """Share of positions at which the most likely token is the same."""
    ppl: float
    """Perplexity of the measured continuation with these rows."""


Measure: TypeAlias = Callable[[Sequence[Table]], Sequence[Cost]]
"""Costs of some tables, in their order. Deterministic up to rounding."""


@dataclass(frozen=True, slots=True)
class Choice:
    """The table of one fidelity, its cost measured as a whole, and its size."""

    levels: Table
    cost: Cost
    bits: float
    """Mean bits of a stored value, scales included, sinks and last rows not."""


@dataclass(frozen=True, slots=True)
class Grid:
    """The measurements that the search starts from."""

    native: Cost
    uniform: Mapping[str, Cost]
    """Format -> cost when all levels take it."""
    single: Mapping[str, tuple[Cost, ...]]
    """Format -> per level, the cost when that level alone takes it."""


@dataclass(frozen=True, slots=True)
class Calibration:
    """A finished calibration of one fingerprint."""

    fingerprint: str
    """Digest of the fingerprint, hex."""
    formats: str
    """`formats_digest()` of the table of formats that was measured."""
    ids: str
    """BLAKE2b of the measured token ids, hex: the same text and tokenizer give the same."""
    n_tokens: int
    """Next-token distributions that each cost is the mean of."""
    made_unix: float
    bits: Mapping[str, float]
    """Format -> bits of a value of this model's rows; `native` included."""
    grid: Grid
    choices: Mapping[str, Choice]
    """Fidelity (`near`, `small`) -> what it may take."""

    def to_json(self) -> dict[str, Any]:
        """A dict of JSON values; `from_json` takes it back."""
        return {"version": VERSION, **asdict(self)}

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
    then by preference; last of all `native`."""
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


def grid_tables(formats: Sequence[str]) -> list[Table]:
    """What the search wants measured first: native, each format everywhere, and each format in
    each level alone."""
    native: Table = (NATIVE,) * LEVELS
    tables = [native, *((name,) * LEVELS for name in formats)]
    for name, level in itertools.product(formats, range(LEVELS)):
        tables.append(native[:level] + (name,) + native[level + 1 :])
    return tables


def measure_grid(measure: Measure, formats: Sequence[str]) -> Grid:
    """Measure `grid_tables`."""
    tables = grid_tables(formats)
    costs = dict(zip(tables, measure(tables), strict=True))
    native: Table = (NATIVE,) * LEVELS
    single = {
        name: tuple(
            costs[native[:level] + (name,) + native[level + 1 :]] for level in range(LEVELS)
        )
        for name in formats
    }
    uniform = {name: costs[(name,) * LEVELS] for name in formats}
    return Grid(costs[native], uniform, single)


def choose(measure: Measure, grid: Grid, bits: Mapping[str, float], bound: float) -> Choice:
    """The smallest table whose measured mean KL divergence is at most `bound`.

    A deeper level never gets fewer bits than the one above it: its rows are nearer to the
    queries, so they weigh more (Theorem 19), and a conversation without bases lies in the
    deepest level as a whole and must not cost more than the table.

    Errors of different levels are independent and KL divergence is of second order in them, so
    costs of levels add up to the cost of a table: candidates are tried in order of size as far as
    that sum lets them pass. What is chosen has been measured as a whole. When a table costs more
    than its sum, the following ones are expected to exceed theirs by as much.
    All native passes any bound, so there always is a result."""
    known = {(name,) * LEVELS: cost for name, cost in grid.uniform.items()}
    known[(NATIVE,) * LEVELS] = grid.native
    excess = 1.0
    for table, expected in _by_size(grid, bits):
        if expected * excess > bound:
            continue
        cost = known[table] if table in known else measure([table])[0]
        if cost.kl <= bound or set(table) == {NATIVE}:
            return Choice(table, cost, bits_of(table, bits))
        if expected > 0:
            excess = max(excess, cost.kl / expected)
    raise AssertionError("all native is among the tables")


def calibrate(
    measure: Measure, bits: Mapping[str, float], bounds: Mapping[str, float] = BOUNDS
) -> tuple[Grid, dict[str, Choice]]:
    """The grid and the choice of every fidelity. `bits` as `sizes` gives them."""
    grid = measure_grid(measure, [name for name in bits if name != NATIVE])
    return grid, {name: choose(measure, grid, bits, bound) for name, bound in bounds.items()}


def _by_size(grid: Grid, bits: Mapping[str, float]) -> list[tuple[Table, float]]:
    """Every table whose bits do not fall with depth, with the sum of its levels' costs: smallest
    first, among equals the preferred (by cost would be by chance: they cost nearly the same)."""
    order = {name: i for i, name in enumerate(bits)}
    found = []
    for table in itertools.product(order, repeat=LEVELS):
        if any(bits[a] > bits[b] for a, b in itertools.pairwise(table)):
            continue
        expected = sum(
            grid.single[name][level].kl for level, name in enumerate(table) if name != NATIVE
        )
        rank = (round(bits_of(table, bits), 9), [order[name] for name in table])
        found.append((rank, table, expected))
    found.sort(key=lambda item: item[0])
    return [(table, expected) for _, table, expected in found]
