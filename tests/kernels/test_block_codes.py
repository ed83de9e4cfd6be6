"""Block codes: ggml's to the byte, towerd's within their bounds, alike on all instruction sets."""

from __future__ import annotations

from typing import Any

import ggml_rows
import numpy as np
import numpy.typing as npt
import pytest
from block_numbers import FAMILIES, IN_F16
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from kernel_rows import patterns

from lab.reference.blocks import CODES, IQ4_NL_LEAST, decode_blocks, encode_blocks
from towerd.kernels import dispatch
from towerd.kernels.formats import BY_NAME, CACHE_FORMATS

Floats = npt.NDArray[np.float32]
Bytes = npt.NDArray[np.uint8]

GGML = [row.name for row in CACHE_FORMATS if row.is_quantized]
STORED = [name for name in CODES if name not in GGML]
PLAIN_OF = {"q4": "q4_0", "q5": "q5_0", "q4a": "q4_1", "q5a": "q5_1"}
HALF_STEP = [name for name in STORED if name not in PLAIN_OF]

RMS_ON_NORMAL = {
    "q8": 0.0053, "q6": 0.0214, "q5": 0.0404, "q4": 0.0812,
    "q8a": 0.0046, "q6a": 0.0187, "q5a": 0.0340, "q4a": 0.0698,
    "q8_0": 0.0054, "q5_0": 0.0429, "q4_0": 0.0861, "q5_1": 0.0380, "q4_1": 0.0783,
    "iq4_nl": 0.0788,
}  # fmt: skip
"""Root mean square error on normal numbers, relative to theirs."""

HALF_STEP_SLACK = 1e-5
"""Of a step: two roundings to float32 may put a number this far beyond the half step."""
SEARCH_SLACK = {"q4": 1e-6, "q5": 1e-6, "q4a": 2e-5, "q5a": 2e-5}
"""Of the squares of the numbers (less the minimum): the search compares sums in float32."""


def kernel_bytes(name: str, values: Floats) -> Bytes:
    """encode_blocks by the implementation in use."""
    return dispatch.transcoded(np.ascontiguousarray(values).view(np.uint8), "f32", name)


def kernel_floats(name: str, rows: Bytes) -> Floats:
    """decode_blocks by the implementation in use."""
    return dispatch.transcoded(rows, name, "f32").view(np.float32)


def steps(name: str, rows: Bytes) -> Floats:
    """|scale| of single blocks."""
    return np.abs(rows[:, :2].copy().view(np.float16).astype(np.float32))


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("name", GGML)
def test_reference_writes_what_ggml_writes(name: str, family: str) -> None:
    """Byte for byte; only codes that ggml leaves unset (iq4_nl below 1e-15) may differ."""
    values = FAMILIES[family]
    expected = ggml_rows.encode(BY_NAME[name].ggml_type, values)
    got = encode_blocks(name, values)
    if name == "iq4_nl":
        unset = np.abs(values).max(1) < IQ4_NL_LEAST
        expected[unset, 2:] = got[unset, 2:]
    assert np.array_equal(got, expected)


@pytest.mark.parametrize("name", GGML)
def test_reference_reads_what_ggml_reads(name: str) -> None:
    """Any bytes at all, to the bit."""
    rows = patterns(name, 50, 640)
    expected = ggml_rows.decode(BY_NAME[name].ggml_type, rows)
    got = decode_blocks(name, rows)
    assert np.array_equal(got, expected, equal_nan=True)
    finite = np.isfinite(expected)
    assert np.array_equal(got.view(np.uint32)[finite], expected.view(np.uint32)[finite])


@pytest.mark.parametrize("family", IN_F16)
@pytest.mark.parametrize("name", CODES)
def test_kernels_equal_the_reference(kernels: str, name: str, family: str) -> None:
    """Both ways, one block and many, rows of 1 to 5 blocks."""
    values = FAMILIES[family]
    for n_blocks in (1, 2, 3, 5):
        rows = values[: len(values) // n_blocks * n_blocks].reshape(-1, 32 * n_blocks)
        encoded = encode_blocks(name, rows)
        assert np.array_equal(kernel_bytes(name, rows), encoded)
        decoded = decode_blocks(name, encoded)
        assert np.array_equal(kernel_floats(name, encoded).view(np.uint32), decoded.view(np.uint32))


@pytest.mark.parametrize("name", CODES)
def test_error_on_normal_numbers(name: str) -> None:
    """The table of RMS errors, which documentation may quote."""
    values = np.random.default_rng(0).standard_normal((4000, 32)).astype(np.float32)
    error = decode_blocks(name, encode_blocks(name, values)) - values
    assert np.sqrt((error**2).sum() / (values**2).sum()) == pytest.approx(
        RMS_ON_NORMAL[name], rel=0.02
    )


blocks = arrays(
    np.float32,
    (1, 32),
    elements=st.floats(-65504, 65504, width=32),
    fill=st.just(np.float32(0)),
)
scaled = st.builds(
    lambda values, exponent: (values * 2.0**exponent).astype(np.float32),
    blocks,
    st.integers(-60, 0),
)
no_reset = settings(
    max_examples=150,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)


@pytest.mark.parametrize("name", STORED)
@given(values=scaled)
@no_reset
def test_any_numbers(kernels: str, name: str, values: Floats) -> None:
    """The same bytes as the reference, finite, zeros exact, and no error beyond the bound."""
    rows = kernel_bytes(name, values)
    assert np.array_equal(rows, encode_blocks(name, values))
    decoded = kernel_floats(name, rows)
    assert np.isfinite(decoded).all()
    if not values.any():
        assert not decoded.any()
    if name in HALF_STEP:
        check_half_step(name, values, rows)
    else:
        check_not_worse(name, values, rows)


def check_half_step(name: str, values: Floats, rows: Bytes) -> None:
    """No number is more than half a step off, and the step is no larger than it must be."""
    step = steps(name, rows).astype(np.float64)
    error = np.abs(decode_blocks(name, rows).astype(np.float64) - values)
    rounding = np.abs(values).max() * 2.0**-22 + 1e-40
    assert (error <= step * (0.5 + HALF_STEP_SLACK) + rounding).all()
    codes = 2 ** CODES[name].bits - 1
    low, high = float(values.min()), float(values.max())
    span = high - low if CODES[name].asymmetric else 2 * max(high, -low)
    minimum = abs(low) * 2.0**-10 if CODES[name].asymmetric else 0
    assert step.max() <= (span + minimum) / codes * (1 + 2.0**-9) + 2.0**-23


def check_not_worse(name: str, values: Floats, rows: Bytes) -> None:
    """The search never loses to the plain code of the same layout."""
    with np.errstate(all="ignore"):
        plain = decode_blocks(PLAIN_OF[name], encode_blocks(PLAIN_OF[name], values))
    wide = values.astype(np.float64)
    errors = [((rows - wide) ** 2).sum() for rows in (decode_blocks(name, rows), plain)]
    origin = wide.min() if CODES[name].asymmetric else 0.0
    slack = SEARCH_SLACK[name] * ((wide - origin) ** 2).sum()
    rounding = 32 * (np.abs(wide).max() * 2.0**-20) ** 2
    assert errors[0] <= errors[1] * (1 + SEARCH_SLACK[name]) + slack + rounding


@pytest.mark.parametrize("name", PLAIN_OF)
def test_search_wins(name: str) -> None:
    """Least squares: below the plain code's error on nearly every block, never above."""
    values = FAMILIES["normal"]
    errors = [
        ((decode_blocks(code, encode_blocks(code, values)).astype(np.float64) - values) ** 2).sum(1)
        for code in (name, PLAIN_OF[name])
    ]
    assert (errors[0] <= errors[1] * (1 + SEARCH_SLACK[name])).all()
    assert (errors[0] < errors[1]).mean() > 0.9


@pytest.mark.parametrize("name", STORED)
@pytest.mark.parametrize("family", [name for name in FAMILIES if name.startswith("huge")])
def test_stored_codes_saturate(name: str, family: str) -> None:
    """Beyond what an f16 scale reaches, numbers keep their sign and stay finite."""
    values = FAMILIES[family]
    rows = encode_blocks(name, values)
    decoded = decode_blocks(name, rows)
    assert np.isfinite(decoded).all()
    reach = np.float32(65504) * (1 << (CODES[name].bits - 1))
    beyond = np.abs(values) >= reach * 2
    assert (np.sign(decoded[beyond]) == np.sign(values[beyond])).all()
    assert (np.abs(decoded) <= 2 * np.abs(values).max(1, keepdims=True)).all()


@pytest.mark.parametrize("call", [decode_blocks, encode_blocks])
def test_unknown_code(call: object) -> None:
    """Names are checked before anything else."""
    with pytest.raises(ValueError, match="codec: 'q9' is not one of"):
        call("q9", np.zeros((1, 34), np.uint8))  # type: ignore[operator]


def test_bad_shapes() -> None:
    """Rows that are not whole blocks, and numbers of another type."""
    with pytest.raises(ValueError, match="rows: not 2 dimensions of whole q4 blocks"):
        decode_blocks("q4", np.zeros((1, 17), np.uint8))
    wrong: list[npt.NDArray[Any]] = [
        np.zeros((1, 31), np.float32),
        np.zeros(32, np.float32),
        np.zeros((1, 32)),
    ]
    for values in wrong:
        with pytest.raises(ValueError, match="values: not float32"):
            encode_blocks("q4", values)
