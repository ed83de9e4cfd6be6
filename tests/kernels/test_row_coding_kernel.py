"""Transform coding: the same pages and rows on every instruction set, the reference, hostile pages, bad input."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from lab.reference import rans
from lab.reference.row_transform import Transform, dequantized, quantized
from towerd.kernels import dispatch, row_coding
from towerd.kernels.row_coding import ESCAPE, HALF, SYMBOLS, TABLE_SUM, Quantizer, RowTransform

STEP, DEAD_ZONE, SHRINK = 0.25, 0.125, 0.0625
WIDTHS = (64, 32, 50)


def _table(scale: float, reach: int = HALF) -> npt.NDArray[np.uint16]:
    """Frequencies of a two-sided exponential distribution; none beyond `reach`."""
    values = np.arange(SYMBOLS) - HALF
    shares = np.where(np.abs(values) <= reach, np.exp(-np.abs(values) / scale), 0.0)
    table = np.floor(shares / shares.sum() * (TABLE_SUM - SYMBOLS)).astype(int)
    table[shares > 0] += 1
    table[ESCAPE] = 1
    table[HALF] += TABLE_SUM - table.sum()
    found: npt.NDArray[np.uint16] = table.astype(np.uint16)
    return found


TABLES = np.stack([_table(0.3, 2), _table(2.0), _table(9.0)])
SHIFTS = np.array([0, 0, 3], np.uint8)


class Coded:
    """A random transform, its quantizer and some rows of three planes."""

    def __init__(self, n: int, n_components: int = 60, format: str = "f16", seed: int = 0) -> None:
        random = np.random.default_rng(seed)
        d = sum(WIDTHS)
        vectors = np.linalg.qr(random.normal(size=(d, d)))[0][:n_components].astype(np.float16)
        mean = random.normal(size=d).astype(np.float32)
        weights = random.uniform(0.5, 2, d).astype(np.float32)
        self.format = format
        self.reference = Transform(vectors, mean, weights)
        self.transform = RowTransform(vectors.view(np.uint16), mean, weights)
        self.classes = np.sort(random.integers(0, 3, n_components))[::-1].astype(np.uint8)
        self.tables = rans.Tables(self.classes, SHIFTS, TABLES)
        self.quantizer = Quantizer(STEP, DEAD_ZONE, SHRINK, self.classes, SHIFTS, TABLES)
        dtype = np.float32 if format == "f32" else np.float16
        values = random.normal(size=(n, d)) * random.choice([0.2, 3.0, 300.0], (n, 1))
        self.values = values.astype(dtype)
        ends = np.cumsum(WIDTHS)
        self.planes = [
            np.ascontiguousarray(self.values[:, end - width : end]).view(np.uint8)
            for width, end in zip(WIDTHS, ends, strict=True)
        ]

    @property
    def symbols(self) -> npt.NDArray[np.int16]:
        """The quantized components[component, row], by the kernel's own sums."""
        found = row_coding.components(self.transform, self.planes, self.format)
        return np.ascontiguousarray(quantized(found, STEP, DEAD_ZONE).T)

    def page(self, n_threads: int = 1) -> bytes:
        job = (self.transform, self.quantizer, self.planes)
        return row_coding.encode_pages([job], self.format, n_threads)[0]

    def read(self, page: Any) -> npt.NDArray[Any] | None:
        """The rows of a page; None if it is refused."""
        out = [np.zeros_like(plane) for plane in self.planes]
        job = (self.transform, self.quantizer, page, out)
        if not row_coding.decode_pages([job], self.format)[0]:
            return None
        return np.concatenate([plane.view(self.values.dtype) for plane in out], axis=1)


@pytest.mark.parametrize("format", ["f16", "f32"])
@pytest.mark.parametrize("n", [1, 3, 4, 61])
def test_pages_are_the_references(kernels: str, n: int, format: str) -> None:
    coded = Coded(n, format=format)
    assert coded.page() == rans.encode(coded.symbols, coded.tables)


def test_rows_are_the_references(kernels: str) -> None:
    """Components are sums in float32, and rows are rounded to f16."""
    coded = Coded(33)
    exact = coded.reference.components(coded.values.astype(np.float32))
    found = row_coding.components(coded.transform, coded.planes, "f16")
    assert np.abs(found - exact).max() < 1e-5 * np.abs(exact).max()
    rows = coded.reference.rows(dequantized(coded.symbols.T, STEP, SHRINK))
    read = coded.read(coded.page())
    assert read is not None
    assert np.abs(read - rows).max() <= 2**-10 * np.abs(rows).max()


def test_every_instruction_set_writes_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    coded = Coded(61)
    found = []
    for name in dispatch.available():
        if name != "metal":
            monkeypatch.setenv(dispatch.ENV, name)
            rows = coded.read(coded.page())
            assert rows is not None
            found.append((coded.page(), rows.tobytes()))
    assert len(set(found)) == 1


def test_a_full_basis_keeps_rows_to_half_a_step() -> None:
    """With all components, an error is at most the dead zone's share of a step in each direction."""
    coded = Coded(40, sum(WIDTHS))
    rows = coded.read(coded.page())
    assert rows is not None
    errors = (rows - coded.values).astype(np.float64) * coded.reference.weights
    ordinary = np.abs(coded.values).max(axis=1) < 100  # others are limited by f16
    errors = errors[ordinary]
    limit = STEP * (0.5 + DEAD_ZONE + SHRINK)
    assert np.sqrt((errors**2).mean()) < limit
    assert np.sqrt((errors**2).mean()) > STEP / 10


def test_a_quantizer_takes_the_first_components(kernels: str) -> None:
    """As if the transform had no others."""
    coded, n = Coded(19), 37
    fewer = RowTransform(
        coded.reference.vectors[:n].view(np.uint16), coded.reference.mean, coded.reference.weights
    )
    quantizer = Quantizer(STEP, DEAD_ZONE, SHRINK, coded.classes[:n], SHIFTS, TABLES)
    pages = [
        row_coding.encode_pages([(transform, quantizer, coded.planes)], "f16")[0]
        for transform in (coded.transform, fewer)
    ]
    assert pages[0] == pages[1]
    out = [[np.zeros_like(plane) for plane in coded.planes] for _ in range(2)]
    for transform, to in zip((coded.transform, fewer), out, strict=True):
        assert row_coding.decode_pages([(transform, quantizer, pages[0], to)], "f16") == [True]
    assert all((a == b).all() for a, b in zip(*out, strict=True))


def test_many_jobs_on_threads_are_as_one_by_one() -> None:
    parts = [Coded(n, seed=n) for n in range(1, 12)]
    jobs = [(part.transform, part.quantizer, part.planes) for part in parts]
    pages = row_coding.encode_pages(jobs, "f16", 3)
    assert pages == [part.page() for part in parts]
    out = [[np.zeros_like(plane) for plane in part.planes] for part in parts]
    reads = [
        (part.transform, part.quantizer, page, to)
        for part, page, to in zip(parts, pages, out, strict=True)
    ]
    assert row_coding.decode_pages(reads, "f16", 3) == [True] * len(parts)
    for part, page, to in zip(parts, pages, out, strict=True):
        rows = part.read(page)
        assert rows is not None
        assert rows.tobytes() == np.concatenate([p.view(np.float16) for p in to], 1).tobytes()


@pytest.mark.parametrize("scale", [0.3, 2.0, 30.0, 20000.0])
def test_the_reference_reads_what_it_writes(scale: float) -> None:
    random = np.random.default_rng(1)
    values = np.clip(random.laplace(0, scale, (12, 9)), -32768, 32767).astype(np.int16)
    tables = rans.Tables(np.arange(12).astype(np.uint8) % 3, SHIFTS, TABLES)
    page = rans.encode(values, tables)
    read = rans.decode(page, 9, tables)
    assert read is not None
    assert (read == values).all()
    assert rans.decode(page[:-1], 9, tables) is None
    assert rans.decode(page, 10, tables) is None


def test_pages_are_about_as_long_as_their_entropy() -> None:
    """Symbols that are as frequent as their table says."""
    coded = Coded(1)
    random = np.random.default_rng(2)
    classes = np.full(60, 1, np.uint8)
    symbols = random.choice(SYMBOLS - 1, (60, 400), p=TABLES[1, :ESCAPE] / TABLES[1, :ESCAPE].sum())
    page = rans.encode((symbols - HALF).astype(np.int16), rans.Tables(classes, SHIFTS, TABLES))
    shares = TABLES[1] / TABLE_SUM
    bits = -np.log2(shares[symbols]).sum()
    assert bits < 8 * len(page) < bits * 1.002 + 8 * 44
    assert coded.page()


def test_changed_pages_are_refused_or_other_rows(kernels: str) -> None:
    """Most changes leave a coder in a state that no encoder begins with; others are in lower bits."""
    coded = Coded(30)
    page, refused = coded.page(), 0
    rows = coded.read(page)
    assert rows is not None
    random = np.random.default_rng(3)
    n_states_and_words = 40 + 4 * int.from_bytes(page[:4], "little")  # escaped ones may be any
    for _ in range(300):
        changed = bytearray(page)
        changed[random.integers(n_states_and_words)] ^= 1 << random.integers(8)
        read = coded.read(changed)
        refused += read is None
        assert read is None or read.tobytes() != rows.tobytes()
    assert refused > 200
    for length in (0, 7, 39, 40, 41, len(page) - 1):
        assert coded.read(page[:length]) is None
    assert coded.read(page + b"\0") is None
    for _ in range(200):
        noise = random.integers(0, 256, random.integers(0, 300)).astype(np.uint8)
        assert coded.read(noise) is None


def test_bad_arguments_are_refused() -> None:
    coded = Coded(4)
    half, ones = coded.reference.vectors.view(np.uint16), np.ones(sum(WIDTHS), np.float32)
    infinite = half.copy()
    infinite[2, 3] = 0x7C00
    for vectors, mean, weights, name in (
        (infinite, ones, ones, "vectors"),
        (half[:0], ones, ones, "vectors"),
        (np.tile(half, (3, 1)), ones, ones, "vectors"),
        (half, ones[:-1], ones, "mean"),
        (half, ones * np.float32(np.nan), ones, "mean"),
        (half, ones, -ones, "weights"),
    ):
        with pytest.raises(ValueError, match=name):
            RowTransform(vectors, mean, weights)
    unsummed, no_escape = TABLES.copy(), TABLES.copy()
    unsummed[1, 4] += 1
    no_escape[0, HALF] += no_escape[0, ESCAPE]
    no_escape[0, ESCAPE] = 0
    good = (STEP, DEAD_ZONE, SHRINK, coded.classes, SHIFTS, TABLES)
    for at, value, name in (
        (0, 0.0, "step"),
        (0, float("nan"), "step"),
        (1, 0.5, "dead_zone"),
        (2, -0.1, "shrink"),
        (3, coded.classes + np.uint8(1), "classes"),
        (4, SHIFTS + np.uint8(9), "shifts"),
        (5, unsummed, "frequencies"),
        (5, no_escape, "frequencies"),
        (5, TABLES[:2], "frequencies"),
    ):
        arguments: list[Any] = list(good)
        arguments[at] = value
        with pytest.raises(ValueError, match=name):
            Quantizer(*arguments)


def test_bad_jobs_are_refused() -> None:
    coded, other = Coded(4), Coded(4, 61)
    page = coded.page()
    jobs: tuple[tuple[Any, Any, Any], ...] = (
        (coded.transform, other.quantizer, coded.planes),
        (coded.transform, coded.quantizer, coded.planes[:2]),
        (coded.transform, coded.quantizer, [plane[:0] for plane in coded.planes]),
        (coded.transform, coded.quantizer, [coded.planes[0][:2], *coded.planes[1:]]),
        (None, coded.quantizer, coded.planes),
        (coded.transform, coded.transform, coded.planes),
    )
    for transform, quantizer, planes in jobs:
        with pytest.raises(ValueError, match="jobs"):
            row_coding.encode_pages([(transform, quantizer, planes)], "f16")
        with pytest.raises(ValueError, match="jobs"):
            row_coding.decode_pages([(transform, quantizer, page, planes)], "f16")
    with pytest.raises(ValueError, match="format"):
        row_coding.encode_pages([(coded.transform, coded.quantizer, coded.planes)], "q8_0")
    twice = (coded.transform, coded.quantizer, page, coded.planes)
    with pytest.raises(ValueError, match="same bytes"):
        row_coding.decode_pages([twice, twice], "f16")
    coded.planes[1].view(np.float16)[2, 5] = np.inf
    with pytest.raises(ValueError, match="not finite"):
        row_coding.encode_pages([(coded.transform, coded.quantizer, coded.planes)], "f16")
