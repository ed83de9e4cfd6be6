"""`towerctl lab bench prediction`: what rows before, layers below and the token alone tell of stored rows.

Predictions are fitted on a first text and measured on a second one. A prediction that leaves a share of the variance saves
half of its logarithm, in bits a number, where each number is coded by itself; what it saves after the transform
is measured with the transform's own coder, on residuals with a basis of their own, at the same step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path

import numpy as np
import zstandard

from lab.bench.prediction.predictors import Decoder, RowPredictor, TokenMeans, side_by_side
from lab.bench.prediction.rows import Floats, TextEvaluator, TextRows
from lab.bench.transform.rates import texts
from towerd.cli.bench.harness.report import Report
from towerd.codec.rows import coded
from towerd.codec.rows.learn import Rounding, groups_of, learn
from towerd.models.bundled import default_model
from towerd.slots.layout import KVLayout, Plane
from towerd.slots.rope import LayerRope, Rope
from towerd.slots.rows import KVRows
from towerd.tiers.formats.calibration import stored

STEPS = {"near": 0.2, "small": 0.65}
"""Of the root mean variance, about where `bench transform` finds the bounds of both."""
GROUP_LAYERS = 5
TOKENS, TOKENS_QUICK = 24_000, 5_400
_TESTED_SHARE = 6
_ZSTD_FORMATS = ("q8h", "q4h")
_LINEAR_ROWS = 8_000
_BASIS_ROWS = 4_000
_RIDGE = 1e-4
F16 = 1
"""ggml's type."""


async def run(
    model: Path | None,
    quick: bool,
    *,
    learn_text: Path | None = None,
    text: Path | None = None,
    tokens: int | None = None,
) -> Report:
    """Evaluate both texts, then fit and measure. Raises ConfigError, ModelError, NotSupported."""
    path = default_model() if model is None else model
    n = tokens or (TOKENS_QUICK if quick else TOKENS)
    report = Report("prediction", path.name)
    first, second = texts(learn_text, text)
    source = TextEvaluator(path)
    try:
        _exactness(report, source, second)
        learned, tested = source.rows(first, n), source.rows(second, max(1, n // _TESTED_SHARE))
    finally:
        source.close()
    measure(report, path, learned, tested)
    return report


def measure(report: Report, path: Path, learned: TextRows, tested: TextRows) -> None:
    """All figures but those of the model itself."""
    report.figures |= {"learned_tokens": len(learned), "tested_tokens": len(tested)}
    _delta(report, learned.part(0, _LINEAR_ROWS), tested)
    _stored_codes(report, tested)
    _first_layer(report, learned.part(_cut(learned), len(learned)), tested)
    _by_token(report, path, learned, tested)


def _exactness(report: Report, source: TextEvaluator, text: str) -> None:
    """Whether the first layer's rows have the same bits in batches of any width."""
    ids = source.vocab.tokenize(text, False, False)[:96]
    wide = source.evaluated(ids, len(ids))
    first = wide.layout.n_layer - wide.layout.n_window if wide.layout.n_window else 0
    same = [
        np.array_equal(wide.plane(i), rows.plane(i))
        for rows in (source.evaluated(ids, width) for width in (1, 2, 8, 32))
        for i in (first, wide.layout.n_layer + first)
    ]
    report.figures["first_layer_same_bits"] = all(same)


def _delta(report: Report, learned: TextRows, tested: TextRows) -> None:
    """Saved bits a number by linear predictions from the row before and from the layers below."""
    n_layer = learned.layout.n_layer
    for kind, first in (("k", 0), ("v", n_layer)):
        planes = range(first, first + n_layer)
        before = [_saved(learned, tested, i, _before) for i in planes]
        report.figures[f"{kind}_before_bits"] = float(np.mean(before))
        for n_below in (1, 2):
            seen = partial(_below, n_below=n_below)
            found = [_saved(learned, tested, i, seen) for i in planes[n_below:]]
            report.figures[f"{kind}_{n_below}_below_bits"] = float(np.mean(found))


def _before(rows: TextRows, i: int) -> Floats:
    values = np.roll(rows.plane(i), 1, axis=0)
    values[~rows.follows] = 0
    return values


def _below(rows: TextRows, i: int, n_below: int) -> Floats:
    return side_by_side(rows, range(i - n_below, i))


def _saved(
    learned: TextRows, tested: TextRows, i: int, seen: Callable[[TextRows, int], Floats]
) -> float:
    x, y, mean = seen(learned, i), learned.plane(i), learned.plane(i).mean(0)
    known = x.mean(0)
    x, y = x - known, y - mean
    square = x.T @ x
    square[np.diag_indices_from(square)] += _RIDGE * np.trace(square) / len(square)
    factors = np.linalg.solve(square.astype(np.float64), (x.T @ y).astype(np.float64))
    wanted = tested.plane(i) - mean
    left = wanted - (seen(tested, i) - known) @ factors.astype(np.float32)
    varies = wanted.var(0) > 0
    return float(np.mean(0.5 * np.log2(wanted.var(0)[varies] / left.var(0)[varies])))


def _stored_codes(report: Report, tested: TextRows) -> None:
    """What zstd finds in rows of block formats, at levels 3 and 19."""
    planes = [Plane(F16, 2 * plane.n_elements) for plane in tested.layout.planes]
    n = tested.layout.n_layer
    layout = KVLayout(tuple(planes[:n]), tuple(planes[n:]))
    rows = _as_rows(tested, range(2 * n), layout)
    for name in _ZSTD_FORMATS:
        codes = [np.ascontiguousarray(plane).tobytes() for plane in stored(rows, name).planes()]
        for level in (3, 19):
            packed = sum(len(zstandard.compress(each, level)) for each in codes)
            share = 1 - packed / sum(len(each) for each in codes)
            report.figures[f"zstd_{level}_{name}_saved"] = share


def _first_layer(report: Report, learned: TextRows, tested: TextRows) -> None:
    """The share of coded bits that the first layer takes: its group with it and without."""
    n, n_window = learned.layout.n_layer, learned.layout.n_window
    first = n - n_window if n_window else 0
    layers = range(first, min(first + GROUP_LAYERS, n))
    groups = groups_of(learned.layout, GROUP_LAYERS)
    half = len(groups) // 2
    whole = [_coded_bits(learned, tested, [*groups[i], *groups[half + i]]) for i in range(half)]
    less = _coded_bits(learned, tested, [i + at for at in (0, n) for i in layers[1:]])
    (mine,) = (bits for i, bits in enumerate(whole) if set(groups[i]) == set(layers))
    for step in STEPS:
        total = sum(bits[step] for bits in whole)
        report.figures[f"first_layer_share_{step}"] = (mine[step] - less[step]) / total
        report.figures[f"token_bytes_{step}"] = total / 8


def _by_token(report: Report, path: Path, learned: TextRows, tested: TextRows) -> None:
    """Shares of variance explained, and bits saved by coding the rest, for the first layers, some in the middle and the
    last ones."""
    cut = _cut(learned)
    fitted, rest = learned.part(0, cut), learned.part(cut, len(learned))
    known = np.isin(tested.ids[:, 0], fitted.ids[:, 0])
    report.figures["tokens_with_a_mean"] = float(known.mean())
    groups = groups_of(learned.layout, GROUP_LAYERS)
    half = len(groups) // 2
    first = np.argsort([groups[i][0] for i in range(half)], kind="stable")
    if learned.layout.n_window:  # full layers lie between those with a window
        first = first[first > 0]
    for i, where in ((first[0], "first"), (first[len(first) // 2], "middle"), (first[-1], "last")):
        planes = [*groups[i], *groups[half + i]]
        plain = _coded_bits(rest, tested, planes)
        for name, predictor in _predictors(path, fitted, side_by_side(fitted, planes)):
            found = _coded_bits(rest, tested, planes, predictor)
            for kind, share in _explained(tested, planes, predictor).items():
                report.figures[f"{where}_{kind}_{name}_explained"] = share
            for step, bits in found.items():
                report.figures[f"{where}_{name}_saved_{step}"] = 1 - bits / plain[step]
            saved_bytes = (plain["near"] - found["near"]) / 8
            report.figures[f"{where}_{name}_mb"] = predictor.nbytes / 1e6
            report.figures[f"{where}_{name}_pays_after_tokens"] = (
                predictor.nbytes / saved_bytes if saved_bytes > 0 else float("inf")
            )


def _cut(learned: TextRows) -> int:
    """Where the rows begin that bases are learned from: predictions are fitted on others, or what they leave would be
    less than on new text."""
    return max(len(learned) // 2, len(learned) - _BASIS_ROWS)


def _predictors(path: Path, fitted: TextRows, values: Floats) -> Iterator[tuple[str, RowPredictor]]:
    yield "token", TokenMeans(fitted.ids, values, 1)
    yield "two_tokens", TokenMeans(fitted.ids, values, 2)
    yield "decoder", Decoder(path, fitted.ids, values)


def _explained(rows: TextRows, planes: Sequence[int], predictor: RowPredictor) -> dict[str, float]:
    """The share of the variance of keys and of values that a prediction does not leave."""
    wanted = side_by_side(rows, planes)
    left = wanted - predictor.predict(rows.ids)
    n_k = sum(rows.layout.planes[i].n_elements for i in planes[: len(planes) // 2])
    return {
        kind: float(1 - left[:, part].var(0).sum() / wanted[:, part].var(0).sum())
        for kind, part in (("k", slice(n_k)), ("v", slice(n_k, None)))
    }


def _coded_bits(
    learned: TextRows,
    tested: TextRows,
    planes: Sequence[int],
    predictor: RowPredictor | None = None,
) -> dict[str, float]:
    """By step the bits of a row of `tested`, of what a prediction leaves of it if there is one, in the coding of a
    basis that was learned from the same of `learned`. `planes`: of keys, then of values, each a group."""
    half = len(planes) // 2
    spreads = [
        float(np.sqrt(side_by_side(learned, part).var(0).mean()))
        for part in (planes[:half], planes[half:])
    ]
    weights = [1 / spread for spread in spreads for _ in range(half)]
    k, v = (
        tuple(Plane(F16, 2 * learned.layout.planes[i].n_elements) for i in part)
        for part in (planes[:half], planes[half:])
    )
    layout = KVLayout(k, v)
    both = [_as_rows(rows, planes, layout, predictor) for rows in (learned, tested)]
    rope = Rope((LayerRope("none", layout.k[0].n_elements),) * half)
    basis = learn(
        both[:1],
        rope,
        {name: Rounding(step) for name, step in STEPS.items()},
        row_identity=b"",
        groups=groups_of(layout, half),
        weights=weights,
    )
    return {name: 8 * len(coded.encode(both[1], basis, name, rope)) / len(tested) for name in STEPS}


def _as_rows(
    rows: TextRows, planes: Sequence[int], layout: KVLayout, predictor: RowPredictor | None = None
) -> KVRows:
    values = side_by_side(rows, planes)
    if predictor is not None:
        values -= predictor.predict(rows.ids)
    ends = np.cumsum([plane.n_elements for plane in layout.planes])
    parts = [
        np.ascontiguousarray(part, np.float16).view(np.uint8)
        for part in np.split(values, ends[:-1], axis=1)
    ]
    positions = np.arange(len(rows), dtype=np.int32)
    n = layout.n_layer
    return KVRows(layout, positions, tuple(parts[:n]), tuple(parts[n:]))
