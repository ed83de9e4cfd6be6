"""Attention drift: Theorem 19's bound, and the measured effect of quantized keys.

The theorem: with keys of a segment perturbed by at most eps, the output of one head moves, to
first order, by at most eps * |q| / sqrt(d) * sqrt(alpha) * sqrt(M), where alpha is the attention
on the segment and M = sum of w_j |v_j - a|^2 over it.

Higher orders can be bounded, too. No score moves by more than X = eps |q| / sqrt(d),
so a' - a = sum of w_j (exp(x_j) - 1) (v_j - a) / Z' with |x_j| <= X and Z' >= exp(-X): the bound
times exp(X) (exp(X) - 1) / X holds for errors of any size, and is 5 % larger at X = 0.03.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from towerd.engine.embedded.calibration.measure import Measurer
from towerd.engine.embedded.calibration.measure_plan import NEXT_TOKENS, Continuation
from towerd.engine.embedded.context.sequences import Buffer
from towerd.engine.embedded.context.taps import Taps
from towerd.errors import TowerdError
from towerd.kernels import dispatch
from towerd.kernels.formats import BY_NAME
from towerd.slots.blob import emit_blob
from towerd.slots.layout import KVLayout, Plane
from towerd.slots.rows import KVRows
from towerd.tiers.formats.calibration import Table, encoded, level_ranges, stored_parts

Floats: TypeAlias = npt.NDArray[np.float64]

LAYERS_MAX = 8
POINTS_MAX = 4000
_SOFTMAX_ERROR_MAX = 1e-3
_SCALE_MAX = 300.0
"""exp() of it squared is still finite, and a bound of this size is meaningless anyway."""
_NOISE = 2.0**-18
"""Share of an output's norm by which sums over hundreds of cells in 32-bit floats differ."""


@dataclass(frozen=True, slots=True)
class LayerAttention:
    """One layer's attention of some queries over native rows.

    q: [heads, queries, d]; weights: [heads, queries, cells]; out: [heads, queries, d_v];
    keys: [kv heads, cells, d]; values: [kv heads, cells, d_v]; float64"""

    q: Floats
    weights: Floats
    out: Floats
    keys: Floats
    values: Floats

    @property
    def group(self) -> int:
        """Query heads that share one KV head."""
        return len(self.q) // len(self.keys)


@dataclass(frozen=True, slots=True)
class Terms:
    """The terms of the bound, each [heads, queries]."""

    eps: Floats
    q_norm: Floats
    alpha: Floats
    moment: Floats
    d_head: int

    @property
    def scale(self) -> Floats:
        """X: the most that any score can move."""
        out: Floats = self.eps * self.q_norm / np.sqrt(self.d_head)
        return out

    @property
    def bound(self) -> Floats:
        """The right-hand side of Theorem 19, which holds to first order."""
        out: Floats = self.scale * np.sqrt(self.alpha) * np.sqrt(self.moment)
        return out

    @property
    def whole_bound(self) -> Floats:
        """The bound including higher orders."""
        x = np.minimum(self.scale, _SCALE_MAX)
        out: Floats = np.exp(x) * np.expm1(x) * np.sqrt(self.alpha) * np.sqrt(self.moment)
        return out


def terms(attention: LayerAttention, eps: Floats, segment: slice) -> Terms:
    """The bound's terms for keys of the cells `segment` that moved by at most `eps` [kv heads]."""
    group = attention.group
    weights = attention.weights[:, :, segment]
    values = np.repeat(attention.values[:, segment], group, axis=0)
    out = attention.out
    alpha = weights.sum(-1)
    # sum of w |v - a|^2, expanded so that no array of [queries, cells, d] is needed
    squares = np.einsum("hqc,hc->hq", weights, (values**2).sum(-1))
    cross = np.einsum("hqd,hqd->hq", out, weights @ values)
    moment = np.maximum(squares - 2 * cross + alpha * (out**2).sum(-1), 0)
    q_norm = np.linalg.norm(attention.q, axis=-1)
    eps_all = np.broadcast_to(np.repeat(eps, group)[:, None], alpha.shape)
    return Terms(eps_all, q_norm, alpha, moment, attention.q.shape[-1])


@dataclass(frozen=True, slots=True)
class AttentionSample:
    """One quantized segment of one layer: measured drift and the bound's terms, [heads, queries]
    each."""

    format: str
    segment: int
    layer: int
    drift: Floats
    noise: Floats
    """The drift of 32-bit outputs by rounding alone."""
    terms: Terms
    key_norm: float
    """Largest norm of a key of the segment."""


@dataclass(slots=True)
class AttentionDrift:
    """Everything that was measured."""

    samples: list[AttentionSample] = field(default_factory=list)
    by_layer: dict[str, list[float]] = field(default_factory=dict)
    """Table's name -> per layer, mean |a' - a| over mean |a| with all rows stored by the table."""
    layers: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class _NativeAttention:
    """Over native rows: the output of every layer, and the attention of the watched layers."""

    outs: list[Floats]
    attention: dict[int, LayerAttention]


class DriftMeter:
    """Measures drift with a Measurer whose context is tapped, has 32-bit cache types and no
    flash attention."""

    def __init__(self, measurer: Measurer, taps: Taps) -> None:
        self.measurer = measurer
        self.taps = taps

    def measure(
        self, checkpoints: Sequence[Continuation], formats: Sequence[str], tables: dict[str, Table]
    ) -> AttentionDrift:
        """Measure the keys of each level's range in each format, one layer at a time, so that
        queries and values stay unchanged; then whole tables. Raises TowerdError for an
        architecture whose attention is not plain scaled dot-product attention."""
        n_layer = self.measurer.layout.n_layer
        drift = AttentionDrift(layers=tuple(_spread(n_layer)))
        sums: dict[str, list[Floats]] = {name: [] for name in tables}
        for checkpoint in checkpoints:
            rows = self.measurer.rows(checkpoint)
            native = self._native(checkpoint, rows, drift.layers)
            for layer, attention in native.attention.items():
                drift.samples += self._layer(checkpoint, rows, attention, layer, formats)
            for name, table in tables.items():
                outs = self._outs(checkpoint, stored_parts(rows, table))
                pairs = zip(native.outs, outs, strict=True)
                sums[name].append(np.array([_relative(a, b) for a, b in pairs]))
        drift.by_layer = {name: np.mean(each, axis=0).tolist() for name, each in sums.items()}
        return drift

    def _layer(
        self,
        checkpoint: Continuation,
        rows: KVRows,
        native: LayerAttention,
        layer: int,
        formats: Sequence[str],
    ) -> list[AttentionSample]:
        samples = []
        for name in formats:
            layout = only_keys(rows.layout, layer, name)
            for level, (start, stop) in enumerate(level_ranges(len(rows))):
                if start == stop:
                    continue
                segment = rows.slice(start, stop)
                stored = encoded(segment, layout)
                moved = _heads(_floats(stored.layout.k[layer], stored.k[layer]), native.keys)
                kept = native.keys[:, start:stop]
                eps = np.linalg.norm(moved - kept, axis=-1).max(-1)
                parts = [rows.slice(0, start), stored, rows.slice(stop, len(rows))]
                out = self._outs(checkpoint, parts)[layer]
                samples.append(
                    AttentionSample(
                        name,
                        level,
                        layer,
                        np.linalg.norm(out - native.out, axis=-1),
                        _NOISE * np.linalg.norm(native.out, axis=-1),
                        terms(native, eps, slice(start, stop)),
                        float(np.linalg.norm(kept, axis=-1).max()),
                    )
                )
        return samples

    def _native(
        self, checkpoint: Continuation, rows: KVRows, layers: Sequence[int]
    ) -> _NativeAttention:
        """The attention over native rows, checked against the formula."""
        found = self._evaluate(checkpoint, [rows], "Qcur", "kq_soft_max", "kqv")
        if len(self.taps.layers) != rows.layout.n_layer:
            raise TowerdError("Not every layer's attention can be watched in this architecture.")
        n = checkpoint.p + NEXT_TOKENS
        outs = [np.asarray(self.taps.take("kqv", i), np.float64) for i in self.taps.layers]
        attention = {}
        for plane in layers:
            layer, out = self.taps.layers[plane], outs[plane]
            q = np.asarray(self.taps.take("Qcur", layer), np.float64)
            q = q.reshape(len(q), len(out), -1).transpose(1, 0, 2)
            weights = np.asarray(self.taps.take("kq_soft_max", layer)[:, :, :n], np.float64)
            keys = _both(rows, found, plane, "k")
            values = _both(rows, found, plane, "v")
            n_kv = keys.shape[1] // q.shape[-1]
            keys, values = (each.reshape(n, n_kv, -1).transpose(1, 0, 2) for each in (keys, values))
            attention[plane] = LayerAttention(q, weights, out, keys, values)
            _check_plain(attention[plane], checkpoint.p)
        return _NativeAttention(outs, attention)

    def _outs(self, checkpoint: Continuation, parts: Sequence[KVRows]) -> list[Floats]:
        """The attention output [heads, queries, d_v] of each layer over these rows."""
        self._evaluate(checkpoint, parts, "kqv")
        return [np.asarray(self.taps.take("kqv", i), np.float64) for i in self.taps.layers]

    def _evaluate(self, checkpoint: Continuation, parts: Sequence[KVRows], *names: str) -> KVRows:
        """Evaluate the continuation in one batch, watching these tensors; returns its rows."""
        scratch, p = self.measurer.scratch, checkpoint.p
        v_trans = scratch.context.v_trans
        blob: Buffer = np.asarray(emit_blob(parts, layout=self.measurer.layout, v_trans=v_trans))
        ids = self.measurer.plan.windows[checkpoint.window][p : p + NEXT_TOKENS]
        self.taps.watch(*names)
        found = scratch.evaluate(blob, p, ids, logits=False, rows=True)
        assert found.rows is not None
        return found.rows


def only_keys(layout: KVLayout, layer: int, name: str) -> KVLayout:
    """`layout` with the keys of one layer in `name`, a stored format or a cache type."""
    keys, plane = list(layout.k), layout.k[layer]
    found = BY_NAME[name]
    if found.is_cache_type:
        keys[layer] = Plane(found.type_id, found.row_bytes(plane.n_elements))
    else:
        keys[layer] = plane.stored_as(name)
    return replace(layout, k=tuple(keys))


def _floats(plane: Plane, rows: npt.NDArray[np.uint8]) -> Floats:
    """The values of a plane's rows, float64[n, elements]."""
    values = dispatch.transcoded(rows, plane.format.name, "f32").view(np.float32)
    return values.astype(np.float64)


def _both(rows: KVRows, more: KVRows, layer: int, which: str) -> Floats:
    """float64[n, elements]: a plane of the prefix and of the continuation."""
    planes = getattr(rows.layout, which)
    if not planes:
        raise TowerdError("This architecture keeps no values in its cache.")
    each = [_floats(planes[layer], getattr(part, which)[layer]) for part in (rows, more)]
    return np.concatenate(each)


def _heads(values: Floats, like: Floats) -> Floats:
    """[n, elements] -> [kv heads, n, d]."""
    return values.reshape(len(values), len(like), -1).transpose(1, 0, 2)


def _check_plain(attention: LayerAttention, p: int) -> None:
    """Raises TowerdError unless the tapped weights are the softmax of q k / sqrt(d) over the cells
    up to each query."""
    group, d = attention.group, attention.q.shape[-1]
    scores = attention.q @ np.repeat(attention.keys, group, axis=0).transpose(0, 2, 1)
    scores /= np.sqrt(d)
    n_queries, n_cells = scores.shape[1:]
    future = np.arange(n_cells) > p + np.arange(n_queries)[:, None]
    scores[:, future] = -np.inf
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    weights /= weights.sum(-1, keepdims=True)
    if np.abs(weights - attention.weights).max() > _SOFTMAX_ERROR_MAX:
        raise TowerdError(
            "This architecture's attention is not plain scaled dot-product attention, "
            "which Theorem 19 is about."
        )


def _spread(n_layers: int) -> list[int]:
    """At most LAYERS_MAX layers, first and last among them."""
    picked = np.linspace(0, n_layers - 1, min(LAYERS_MAX, n_layers)).round().astype(int)
    return [int(layer) for layer in picked]


def _relative(native: Floats, moved: Floats) -> float:
    norm = float(np.linalg.norm(native, axis=-1).mean())
    return float(np.linalg.norm(moved - native, axis=-1).mean()) / norm


# ---- statistics of the samples ---------------------------------------------------------------


def code_bits(name: str) -> int:
    """The bits of a stored format's codes: 4 for q4h."""
    return int(BY_NAME[name].codec.strip("qa"))


def summary(drift: AttentionDrift) -> dict[str, Any]:
    """The figures for the report: share under the bound, tightness (drift over bound, for drift
    beyond rounding), fitted slopes.

    slope_bits: of log2(drift over its terms, with the largest key norm in place of eps) against
    bits, over the Hadamard formats; predicted -1. slope_alpha: of log(drift / (eps |q| / sqrt(d)
    sqrt(M))) against log(alpha); predicted 1/2. slope_alpha_raw: the same without dividing by
    sqrt(M), which itself grows with alpha: the bound is proportional to sqrt(alpha M)."""
    ratio = np.concatenate([_ratio(s).ravel() for s in drift.samples])
    whole = np.concatenate([_exceeds(s).ravel() for s in drift.samples])
    by_format = {
        name: float(np.quantile(_all(drift, name, _ratio), 0.99))
        for name in dict.fromkeys(s.format for s in drift.samples)
    }
    rotated, plain = families(drift)
    alpha, drift_m, drift_raw = points(drift)
    return {
        "queries": len(ratio),
        "share_under_bound": float((ratio <= 1).mean()),
        "share_under_whole_bound": float(1 - whole.mean()),
        "tightness_p50": float(np.quantile(ratio[ratio > 0], 0.5)),
        "tightness_p99": float(np.quantile(ratio[ratio > 0], 0.99)),
        "tightness_max": float(ratio.max()),
        "tightness_p99_by_format": by_format,
        "slope_bits": slope_bits(drift, rotated),
        "slope_bits_unrotated": slope_bits(drift, plain),
        "slope_bits_predicted": -1.0,
        "slope_alpha": _fit(np.log(alpha), np.log(drift_m)),
        "slope_alpha_raw": _fit(np.log(alpha), np.log(drift_raw)),
        "slope_alpha_predicted": 0.5,
        "relative_drift_by_layer": drift.by_layer,
        "layers_watched": list(drift.layers),
    }


def families(drift: AttentionDrift) -> tuple[list[str], list[str]]:
    """The stored formats that were measured: with a Hadamard rotation, without."""
    names = dict.fromkeys(s.format for s in drift.samples if not BY_NAME[s.format].is_cache_type)
    rotated = [name for name in names if BY_NAME[name].is_hadamard]
    return rotated, [name for name in names if name not in rotated]


def slope_bits(drift: AttentionDrift, formats: Sequence[str]) -> float | None:
    """Slope of log2(mean normalised drift) against code bits; None for fewer than two."""
    found = {code_bits(name): normalised(drift, name) for name in formats}
    if len(found) < 2:
        return None
    return _fit(np.array(list(found)), np.log2(list(found.values())))


def normalised(drift: AttentionDrift, name: str) -> float:
    """Mean drift of a format over the mean of |k| |q| / sqrt(d) sqrt(alpha M)."""
    moved = _all(drift, name, lambda sample: sample.drift)
    return float(moved.mean() / _all(drift, name, _unit).mean())


def points(drift: AttentionDrift) -> tuple[Floats, Floats, Floats]:
    """(alpha, drift / (eps |q| / sqrt(d) sqrt(M)), drift / (eps |q| / sqrt(d))) of queries that
    attend to the segment at all; at most POINTS_MAX of them, evenly picked."""
    alpha = np.concatenate([s.terms.alpha.ravel() for s in drift.samples])
    scale = np.concatenate([s.terms.scale.ravel() for s in drift.samples])
    moment = np.concatenate([s.terms.moment.ravel() for s in drift.samples])
    moved = np.concatenate([s.drift.ravel() for s in drift.samples])
    noise = np.concatenate([s.noise.ravel() for s in drift.samples])
    good = np.flatnonzero((alpha > 1e-6) & (moved > noise) & (moment > 0) & (scale > 0))
    good = good[:: max(1, -(-len(good) // POINTS_MAX))]
    raw = moved[good] / scale[good]
    return alpha[good], raw / np.sqrt(moment[good]), raw


def _ratio(sample: AttentionSample) -> Floats:
    """Drift beyond rounding over the bound; 0 if there is no such drift."""
    bound, moved = sample.terms.bound, np.maximum(sample.drift - sample.noise, 0)
    return np.divide(moved, bound, out=np.zeros_like(bound), where=moved > 0)


def _exceeds(sample: AttentionSample) -> npt.NDArray[np.bool_]:
    """Where the drift exceeds the bound that includes higher orders."""
    return sample.drift > sample.terms.whole_bound + sample.noise


def _unit(sample: AttentionSample) -> Floats:
    eps = np.full_like(sample.terms.alpha, sample.key_norm)
    return replace(sample.terms, eps=eps).bound


def _all(drift: AttentionDrift, name: str, of: Any) -> Floats:
    return np.concatenate([of(s).ravel() for s in drift.samples if s.format == name])


def _fit(x: npt.ArrayLike, y: npt.ArrayLike) -> float:
    """Slope of the least-squares line."""
    return float(np.polyfit(np.asarray(x, float), np.asarray(y, float), 1)[0])
