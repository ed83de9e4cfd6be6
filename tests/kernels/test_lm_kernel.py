"""The language model's kernel: the same bits everywhere, and the right numbers."""

from __future__ import annotations

import functools
import math
from fractions import Fraction
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from lab.reference import lm as reference_lm
from lab.reference.lm import fused, unpacked
from towerd.codec.models.rotation import rotation
from towerd.kernels._native import Lm
from towerd.kernels.lm import LmShape, make_lm, pack, pack_norm, pack_q8

Floats = npt.NDArray[np.float32]
Doubles = npt.NDArray[np.float64]
SHAPES = {
    "plain": LmShape(50, 32, 2, 2, 2, 16, 64, 9, 2, 1e-5),
    "shared KV heads": LmShape(37, 64, 1, 4, 2, 16, 32, 18, 9, 1e-6),
    "nothing even": LmShape(19, 36, 2, 3, 1, 10, 33, 7, 0, 0.0),
    "smallest": LmShape(1, 2, 1, 1, 1, 2, 1, 1, 0, 1e-5),
}
FORMATS = ("f32", "f16", "q8")


def draw(shape: LmShape, format: str = "f32", seed: int = 0, peak: float = 1.0) -> tuple[Any, ...]:
    """The arguments of a model with random weights, after the shape."""
    rng = np.random.default_rng(seed)
    matrices = []
    for n_rows, n_columns in shape.matrices():
        rows = (rng.standard_normal((n_rows, n_columns)) * peak / math.sqrt(n_columns)).astype(
            "<f4"
        )
        if format == "q8" and n_columns % 32 == 0:
            blocks = rng.integers(0, 256, (n_rows, n_columns // 32, 34), np.uint8)
            scales = rng.uniform(1e-5, 0.004, (n_rows, n_columns // 32)).astype("<f2")
            blocks[..., :2] = scales[..., None].view(np.uint8)
            matrices.append(pack_q8(blocks))
        else:
            matrices.append(pack(rows.astype(np.float16) if format == "f16" else rows))
    norms = [
        pack_norm(rng.uniform(0.5, 1.5, shape.n_embd).astype(np.float32))
        for _ in range(2 * shape.n_layer + 1)
    ]
    cos, sin = rotation(shape.n_ctx, shape.head_dim, 10000.0)
    return matrices, norms, cos, sin


def fed(
    model: Lm | reference_lm.ReferenceLm, lanes: list[int], tokens: list[int], n_threads: int = 1
) -> Floats:
    return model.step(np.array(lanes, np.int32), np.array(tokens, np.int32), n_threads)


class Plain:
    """The equations of the llama architecture in float64, a whole text at a time."""

    def __init__(self, shape: LmShape, matrices: Any, norms: Any, cos: Floats, sin: Floats) -> None:
        self.shape, self.cos, self.sin = shape, cos.astype(float), sin.astype(float)
        self.matrices = [
            unpacked(weights, *size).astype(float)
            for weights, size in zip(matrices, shape.matrices(), strict=True)
        ]
        self.norms = [each[: shape.n_embd].astype(float) for each in norms]

    def logits(self, tokens: list[int]) -> Doubles:
        shape = self.shape
        x: Doubles = self.matrices[0][tokens]
        for layer in range(shape.n_layer):
            q, k, v, o, gate, up, down = self.matrices[2 + 7 * layer : 9 + 7 * layer]
            y = self._norm(x, 2 * layer)
            x = x + self._attention(y @ q.T, y @ k.T, y @ v.T) @ o.T
            y = self._norm(x, 2 * layer + 1)
            g = y @ gate.T
            x = x + (g / (1 + np.exp(-g)) * (y @ up.T)) @ down.T
        logits: Doubles = self._norm(x, -1) @ self.matrices[1].T
        return logits

    def _norm(self, x: npt.NDArray[np.float64], which: int) -> Doubles:
        mean = (x * x).mean(axis=1, keepdims=True)
        scaled: Doubles = x / np.sqrt(mean + self.shape.norm_eps) * self.norms[which]
        return scaled

    def _attention(self, q: Any, k: Any, v: Any) -> Doubles:
        n, dim, shape = len(q), self.shape.head_dim, self.shape
        queries = self._rotate(q.reshape(n, shape.n_head, dim))
        keys = self._rotate(k.reshape(n, shape.n_head_kv, dim))
        values, out = v.reshape(n, shape.n_head_kv, dim), np.empty((n, shape.n_head, dim))
        for head in range(shape.n_head):
            kv = head // (shape.n_head // shape.n_head_kv)
            scores = queries[:, head] @ keys[:, kv].T / math.sqrt(dim)
            weights = np.exp(scores - scores.max()) * np.tri(n)
            out[:, head] = weights / weights.sum(axis=1, keepdims=True) @ values[:, kv]
        return out.reshape(n, -1)

    def _rotate(self, x: npt.NDArray[np.float64]) -> Doubles:
        cos, sin = self.cos[: len(x), None], self.sin[: len(x), None]
        a, b = x[..., ::2], x[..., 1::2]
        return np.stack((a * cos - b * sin, a * sin + b * cos), -1).reshape(x.shape)


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("name", SHAPES)
def test_the_equations(kernels: str, name: str, format: str) -> None:
    """Logits are those of the architecture, to float32's noise."""
    shape = SHAPES[name]
    arguments = draw(shape, format)
    tokens = np.random.default_rng(1).integers(0, shape.n_vocab, shape.n_ctx).tolist()
    model = make_lm(shape, *arguments)
    got = fed(model, [3] * len(tokens), tokens)
    expected = Plain(shape, *arguments).logits(tokens)
    np.testing.assert_allclose(got, expected, atol=3e-5 * np.abs(expected).max(), rtol=0)


@functools.cache
def expected_rows(name: str, format: str) -> tuple[Any, dict[int, list[int]], dict[int, Floats]]:
    """Arguments, texts by lane, and their logits by the reference, each text by itself."""
    shape, rng = SHAPES[name], np.random.default_rng(3)
    arguments = draw(shape, format, seed=2, peak=3.0)
    texts = {lane: rng.integers(0, shape.n_vocab, shape.n_ctx + 3).tolist() for lane in (0, 2)}
    rows = {
        lane: fed(reference_lm.ReferenceLm(shape, *arguments), [0] * len(text), text)
        for lane, text in texts.items()
    }
    return arguments, texts, rows


@pytest.mark.parametrize(
    ("name", "format"),
    [
        ("plain", "q8"),
        ("shared KV heads", "f16"),
        ("nothing even", "f32"),
        ("nothing even", "f16"),
        ("smallest", "f32"),
    ],
)
def test_the_bits_of_the_reference(kernels: str, name: str, format: str) -> None:
    """Every instruction set, number of threads, and way to spread tokens over lanes and calls gives
    the same; texts longer than the context too."""
    arguments, texts, expected = expected_rows(name, format)
    model, rng = make_lm(SHAPES[name], *arguments), np.random.default_rng(4)
    for n_threads in (1, 2, 3):
        model.reset()
        at = dict.fromkeys(texts, 0)
        while any(at[lane] < len(text) for lane, text in texts.items()):
            some = {lane: text[at[lane] :][: rng.integers(0, 9)] for lane, text in texts.items()}
            lanes = [lane for lane, tokens in some.items() for _ in tokens]
            got = fed(
                model, lanes, [token for tokens in some.values() for token in tokens], n_threads
            )
            for lane, tokens in some.items():
                mine = got[[i for i, each in enumerate(lanes) if each == lane]]
                assert np.array_equal(mine, expected[lane][at[lane] :][: len(tokens)])
                assert np.array_equal(model.counts(mine), counted(mine))
                at[lane] += len(tokens)


def counted(logits: Floats) -> npt.NDArray[np.uint32]:
    chances = reference_lm.exponential(logits - logits.max(axis=1, keepdims=True))
    return (chances * np.float32(1 << 24)).astype(np.uint32) + np.uint32(1)


def test_many_lanes(kernels: str) -> None:
    """More lanes than go in a group; each as if it were alone."""
    shape = SHAPES["plain"]
    arguments = draw(shape, "f16")
    model, alone = make_lm(shape, *arguments), make_lm(shape, *arguments)
    for step in range(3):
        tokens = [(7 * lane + step) % shape.n_vocab for lane in range(37)]
        got = fed(model, list(range(37)), tokens, 3)
        for lane in (0, 15, 16, 36):
            assert np.array_equal(got[lane], fed(alone, [lane], [tokens[lane]])[0])


def test_wide_matrices(kernels: str) -> None:
    """Every number of panels in the main loop and its rest."""
    for n_embd in (128, 144, 240):
        shape = LmShape(16 * 9 + 5, n_embd, 1, 2, 1, 32, 16 * 11, 33, 8, 1e-5)
        arguments = draw(shape, "f16", n_embd)
        tokens = [5, 9, 2]
        expected = fed(reference_lm.ReferenceLm(shape, *arguments), [0] * 3, tokens)
        assert np.array_equal(fed(make_lm(shape, *arguments), [0] * 3, tokens), expected)


def test_subnormal_numbers(kernels: str) -> None:
    """They are kept, also on a thread that is set to drop them."""
    shape = SHAPES["plain"]
    matrices, norms, cos, sin = draw(shape, "f32", 5)
    tiny = pack(unpacked(matrices[0], *shape.matrices()[0]) * np.float32(1e-20))
    matrices = [tiny, *matrices[1:]]
    norms = [norm * np.float32(1e-22) for norm in norms]
    expected = fed(
        reference_lm.ReferenceLm(shape, matrices, norms, cos, sin), [0] * 4, [1, 2, 3, 4]
    )
    assert 0 < np.abs(expected).max() < np.finfo(np.float32).tiny
    torch = pytest.importorskip("torch")
    model = make_lm(shape, matrices, norms, cos, sin)
    drops = torch.set_flush_denormal(True)
    try:
        got = [fed(model, [lane] * 4, [1, 2, 3, 4], 2) for lane in (0, 1)]
        assert not drops or np.float32(1e-30) * np.array([1e-10], np.float32) == 0
    finally:
        torch.set_flush_denormal(False)
    assert np.array_equal(got[0], expected)
    assert np.array_equal(got[1], expected)


FLOATS = st.floats(width=32, allow_nan=False, allow_infinity=False)


@settings(max_examples=200, deadline=None)
@given(FLOATS, FLOATS, FLOATS, st.integers(-3, 3))
def test_fused_is_rounded_once(a: float, b: float, c: float, nudge: int) -> None:
    """Against exact fractions, with sums that nearly cancel among them."""
    near = np.float32(-a * b if abs(a * b) < 3e38 else c)
    for addend in (np.float32(c), near, np.nextafter(near, np.float32(nudge))):
        exact = Fraction(a) * Fraction(b) + Fraction(float(addend))
        if abs(exact) >= Fraction(float(np.finfo(np.float32).max)):
            continue
        got = float(fused(np.array([a], np.float32), np.float32(b), addend)[0])
        assert got == rounded(exact)


def rounded(exact: Fraction) -> float:
    """To the nearest float32, ties to even."""
    if exact == 0:
        return 0.0
    exponent = -149
    while abs(exact) / Fraction(2) ** exponent >= 1 << 24:
        exponent += 1
    return float(round(exact / Fraction(2) ** exponent) * Fraction(2) ** exponent)


def test_exponential() -> None:
    """e^x to a few units in the last place; nothing below -80."""
    x = np.linspace(-80, 0, 5001).astype(np.float32)
    expected = np.exp(x.astype(np.float64))
    np.testing.assert_allclose(reference_lm.exponential(x), expected, rtol=3e-7)
    far = np.array([-80.01, -1e9, -np.inf], np.float32)
    assert reference_lm.exponential(far).tolist() == [0, 0, 0]
    assert reference_lm.exponential(np.array([0, -0.0], np.float32)).tolist() == [1, 1]


@settings(
    max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(st.lists(st.floats(-200, 200, width=32), min_size=1, max_size=70))
def test_counts(kernels: str, logits: list[float]) -> None:
    """Every token has a count, and they are in proportion to the softmax."""
    model = make_lm(SHAPES["smallest"], *draw(SHAPES["smallest"]))
    rows = np.array([logits, logits[::-1]], np.float32)
    counts = model.counts(rows)
    assert np.array_equal(counts, counted(rows))
    assert counts.min() >= 1
    assert counts.max() == (1 << 24) + 1
    expected = np.exp(rows[0].astype(float) - rows[0].max())
    np.testing.assert_allclose((counts[0] - 1.0) / (1 << 24), expected, atol=4e-7)


def test_rotation() -> None:
    """The angles of float64, which are exact enough to compare with, to float32's last bit."""
    for n, n_rot, base in ((1024, 64, 10000.0), (64, 6, 500000.0), (3, 2, 1.0)):
        angles = np.arange(n)[:, None] * base ** -(np.arange(0, n_rot, 2) / n_rot)
        cos, sin = rotation(n, n_rot, base)
        np.testing.assert_allclose(cos, np.cos(angles), rtol=0, atol=6e-8)
        np.testing.assert_allclose(sin, np.sin(angles), rtol=0, atol=6e-8)
    assert rotation(3, 2, 1.0)[0].shape == (3, 1)


def test_a_text_that_became_too_long(kernels: str) -> None:
    """It continues like a text of only its last tokens."""
    shape = SHAPES["plain"]
    arguments = draw(shape)
    tokens = np.random.default_rng(0).integers(0, shape.n_vocab, shape.n_ctx + 5).tolist()
    last = fed(make_lm(shape, *arguments), [1] * len(tokens), tokens)[shape.n_ctx :]
    kept = tokens[shape.n_ctx - shape.n_keep :]
    short = fed(make_lm(shape, *arguments), [0] * len(kept), kept)[shape.n_keep :]
    assert np.array_equal(last, short)


@pytest.mark.parametrize("format", FORMATS)
def test_packing(format: str) -> None:
    """Panels hold the numbers of the matrix."""
    rng = np.random.default_rng(0)
    rows: Any
    if format == "q8":
        blocks = rng.integers(0, 256, (21, 3, 34), np.uint8)
        scales = rng.uniform(-1, 1, (21, 3)).astype("<f2")
        blocks[..., :2] = scales[..., None].view(np.uint8)
        rows = (blocks[..., 2:].view(np.int8) * scales[..., None].astype(np.float32)).reshape(
            21, -1
        )
        weights = pack_q8(blocks)
    else:
        rows = rng.standard_normal((21, 7)).astype(np.float16 if format == "f16" else np.float32)
        weights = pack(rows)
    assert weights[0] == format
    assert weights[1].ctypes.data % 64 == 0
    assert np.array_equal(unpacked(weights, *rows.shape), rows.astype(np.float32))


def test_numbers_beyond_float32(kernels: str) -> None:
    """Finite weights with products that are not: an error with every kernel, never other counts;
    the model works again after a reset."""
    shape = SHAPES["plain"]
    for which in range(1, 9):
        matrices, norms, cos, sin = draw(shape)
        huge = unpacked(matrices[which], *shape.matrices()[which]).copy()
        huge[3] = 3e38
        matrices[which] = pack(huge)
        model = make_lm(shape, matrices, norms, cos, sin)
        with pytest.raises(ValueError, match="^weights: a number is beyond what float32 holds$"):
            fed(model, [0] * 6, [3, 3, 1, 3, 2, 3])
        model.reset()


BAD: dict[str, tuple[str, list[int], list[int]]] = {
    "no such lane": ("lanes", [256], [0]),
    "negative lane": ("lanes", [-1], [0]),
    "lanes not in order": ("lanes", [1, 0], [0, 0]),
    "no such token": ("tokens", [0], [50]),
    "negative token": ("tokens", [0], [-1]),
    "fewer tokens": ("tokens", [0, 1], [0]),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_steps(kernels: str, name: str) -> None:
    argument, lanes, tokens = BAD[name]
    with pytest.raises(ValueError, match=f"^{argument}: "):
        fed(make_lm(SHAPES["plain"], *draw(SHAPES["plain"])), lanes, tokens)


def test_bad_logits_and_models(kernels: str) -> None:
    shape = SHAPES["plain"]
    matrices, norms, cos, sin = draw(shape)
    model = make_lm(shape, matrices, norms, cos, sin)
    for bad in (np.nan, np.inf, -np.inf):
        with pytest.raises(ValueError, match="^logits: "):
            model.counts(np.array([[0, bad, 1]], np.float32))
    assert fed(model, [], []).shape == (0, 50)
    cases: dict[str, tuple[Any, ...]] = {
        "matrices": (matrices[:-1], norms, cos, sin),
        "norms": (matrices, [norm[:-1] for norm in norms], cos, sin),
        "cos": (matrices, norms, cos[1:], sin[1:]),
        r"matrices\[1\]": ([matrices[0], ("f16", matrices[1][1]), *matrices[2:]], norms, cos, sin),
        r"matrices\[2\]": ([*matrices[:2], ("f8", matrices[2][1]), *matrices[3:]], norms, cos, sin),
    }
    for argument, arguments in cases.items():
        with pytest.raises(ValueError, match=f"^{argument}: "):
            make_lm(shape, *arguments)
