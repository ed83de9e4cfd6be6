"""The C++ mixer against its specification in Python, decision by decision."""

from __future__ import annotations

import copy
import importlib
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lab.prior import tables
from lab.reference import mix as reference_mix
from lab.reference.mix_lanes import Lane
from towerd.codec.forms import training
from towerd.kernels import _native, mixing

N_TOKENS = 40
Ranks = npt.NDArray[np.int32]


@pytest.fixture(scope="module")
def native() -> Any:
    try:
        return importlib.import_module("towerd.kernels._native")
    except ImportError:
        pytest.skip("the C++ kernels are not built")


@pytest.fixture(scope="module")
def parts() -> tuple[Any, ...]:
    """Weights, tables, a start state and kinds of a made-up corpus with phrases in it."""
    rng = np.random.default_rng(3)
    phrases = [rng.integers(0, N_TOKENS, rng.integers(2, 12)) for _ in range(12)]
    words = [
        phrases[rng.zipf(1.5) % 12] if rng.random() < 0.6 else rng.integers(0, N_TOKENS, 3)
        for _ in range(900)
    ]
    corpus = np.concatenate(words).astype(np.uint32)
    weights = np.bincount(corpus, minlength=N_TOKENS).astype(np.uint32)
    kinds = np.zeros(N_TOKENS, np.uint8)
    kinds[[5, 17]], kinds[[9, 23]] = mixing.BREAK, mixing.OPENING
    found = tables.build(corpus, N_TOKENS, 6000)
    return weights, found, training.untrained(N_TOKENS), kinds, corpus


def text_like(corpus: npt.NDArray[np.uint32], n: int, seed: int) -> Ranks:
    rng = np.random.default_rng(seed)
    at = rng.integers(0, len(corpus) - n)
    ranks = corpus[at : at + n].astype(np.int32)
    return np.where(rng.random(n) < 0.2, rng.integers(0, N_TOKENS, n, dtype=np.int32), ranks)


@pytest.mark.parametrize("table_bits", [8, 12])
def test_same_numbers_as_the_reference(native: Any, parts: Any, table_bits: int) -> None:
    """Several lanes, some steps with a network's counts, a hash table that overflows."""
    weights, tables_, start, kinds, corpus = parts
    ours = native.Mixer(weights, tables_, start, kinds)
    theirs = reference_mix.ReferenceMixer(weights, tables_, start, kinds)
    rng = np.random.default_rng(5)
    for mixer in (ours, theirs):
        mixer.reset(3, table_bits)
    for turn in range(24):
        ranks = text_like(corpus, 12, turn % 5)
        counts = rng.integers(0, 1 << 24, N_TOKENS, dtype=np.uint32)
        for lane, some, given_counts in ((turn % 3, ranks, None), (1, ranks[:1], counts)):
            found = ours.encode(lane, some, given_counts)
            wanted = theirs.encode(lane, some, given_counts)
            assert found[0].tolist() == wanted[0].tolist()
            assert found[1].tolist() == wanted[1].tolist()
    assert ours.state().tolist() == theirs.state().tolist()


@pytest.mark.parametrize("make", [_native.Mixer, reference_mix.ReferenceMixer])
def test_decisions_lead_back_to_the_tokens(parts: Any, make: Any) -> None:
    weights, tables_, start, kinds, corpus = parts
    mixer = make(weights, tables_, start, kinds)
    ranks = text_like(corpus, 60, 1)
    base = text_like(corpus, 40, 2)
    mixer.reset(1, 10)
    mixer.learn(0, base)
    bits, chances = mixer.encode(0, ranks)
    assert ((chances > 0) & (chances < 1)).all()
    mixer.reset(1, 10)
    mixer.learn(0, base)
    decisions = iter(zip(bits.tolist(), chances.tolist(), strict=True))
    for rank in ranks.tolist():
        answer = mixer.begin(0)
        while answer >= 0:
            bit, chance = next(decisions)
            assert answer == chance * 65536
            answer = mixer.step(bit)
        assert -1 - answer == rank


@pytest.fixture
def coder() -> Any:
    """constriction's range coder, which has no build for Linux on arm64."""
    return pytest.importorskip("lab.reference.range_coder")


@pytest.mark.parametrize("n_bytes", [0, 1, 4, 7, 8, 12, 200])
def test_decisions_are_read_as_constriction_reads_them(
    native: Any, coder: Any, n_bytes: int
) -> None:
    """Also beyond the end of the bits, and up to the same place where no encoder wrote them."""
    rng = np.random.default_rng(n_bytes)
    n_ends = 0
    for round in range(60):
        data = rng.bytes(n_bytes) if round % 2 else bytes(rng.choice([0, 255], n_bytes).tolist())
        ours, theirs = native.RangeDecoder(data), coder.ReferenceDecoder(data)
        chances = rng.integers(1, 65536, 400)
        chances[rng.integers(400, size=200)] = rng.choice([1, 2, 32767, 32768, 32769, 65535], 200)
        for chance in chances.tolist():
            try:
                wanted = theirs.take(chance)
            except ValueError:
                with pytest.raises(ValueError, match="no encoder"):
                    ours.take(chance)
                n_ends += 1
                break
            assert ours.take(chance) == wanted
    assert n_ends or n_bytes < 8
    for chance in (0, 65536, -1):
        with pytest.raises(ValueError, match="probability"):
            native.RangeDecoder(b"").take(chance)


@pytest.mark.parametrize("kind", ["any", "sure", "even"])
def test_decisions_are_written_as_constriction_writes_them(
    native: Any, coder: Any, kind: str
) -> None:
    """Likely and unlikely ones, with carries into long runs of words, in calls of any length."""
    rng = np.random.default_rng(len(kind))
    rare = {"any": range(1, 65536), "sure": (1, 2, 65534, 65535), "even": (32767, 32768, 32769)}
    for round in range(300):
        n = int(rng.integers(0, 300))
        chances = rng.choice(np.array(rare[kind]), n) / 65536
        bits = (rng.random(n) < (chances if round % 3 else 1 - chances)).astype(np.int32)
        bits |= np.int32(round % 5 == 0)  # the upper end of every range: carries
        ours, theirs = native.RangeEncoder(), coder.ReferenceEncoder()
        for i in range(0, n, 70):
            ours.put(bits[i : i + 70], chances[i : i + 70])
            theirs.put(bits[i : i + 70], chances[i : i + 70])
        assert ours.finish() == theirs.finish()
    for bad, of in (
        ([2], [0.5]),
        ([1], [0.0]),
        ([1], [1.0]),
        ([1], [float("nan")]),
        ([1], []),
    ):
        with pytest.raises(ValueError, match=r"bits|chances"):
            native.RangeEncoder().put(np.array(bad, np.int32), np.array(of, float))


def test_tokens_are_decoded_as_by_the_reference(native: Any, coder: Any, parts: Any) -> None:
    """From the encoder's bits, in turn with and without a network's counts."""
    weights, tables_, start, kinds, corpus = parts
    ours = native.Mixer(weights, tables_, start, kinds)
    theirs = reference_mix.ReferenceMixer(weights, tables_, start, kinds)
    ranks, rng = text_like(corpus, 90, 1), np.random.default_rng(5)
    counts = [rng.integers(1, 1 << 24, N_TOKENS, dtype=np.uint32) for _ in range(30)]
    encoder = coder.ReferenceEncoder()
    for i, each in enumerate(counts):
        encoder.put(*theirs.encode(0, ranks[3 * i : 3 * i + 2]))
        encoder.put(*theirs.encode(0, ranks[3 * i + 2 : 3 * i + 3], each))
    data = encoder.finish()
    for mixer, decoder in (
        (ours, native.RangeDecoder(data)),
        (theirs, coder.ReferenceDecoder(data)),
    ):
        mixer.reset()
        found: list[int] = []
        for each in counts:
            found += mixer.decode(0, decoder, 2).tolist()
            found += mixer.decode(0, decoder, 1, each).tolist()
        assert found == ranks.tolist()
    assert ours.state().tolist() == theirs.state().tolist()
    with pytest.raises(ValueError, match="of one token"):
        ours.decode(0, native.RangeDecoder(data), 2, counts[0])


def test_interpolation_is_over_tokens(parts: Any) -> None:
    """The decisions on the way to a token multiply to its probability in the interpolated n-gram
    model, computed from the lists token by token."""
    weights, tables_, start, kinds, corpus = parts
    mixer = reference_mix.ReferenceMixer(weights, tables_, start, kinds)
    mixer.learn(0, corpus[100:160].astype(np.int32))
    mixer.begin(0)
    assert sum(len(each.ranks) > 0 for each in mixer.lists) >= 2
    found, wanted = np.ones(N_TOKENS), np.ones(N_TOKENS)
    for rank in range(N_TOKENS):
        walk = copy.deepcopy(mixer)
        node = walk.node
        while True:
            _, middle, _, left, right = walk.tree[node]
            bit = rank >= middle
            by_order = (walk.chances[mixing.STATIC], walk.chances[0])
            for product, chance in zip((found, wanted), by_order, strict=True):
                product[rank] *= (chance if bit else 65536 - chance) / 65536
            if not (node := right if bit else left):
                break
            walk.step(int(bit))
    for each in mixer.lists:
        listed = np.zeros(N_TOKENS)
        listed[each.ranks] = np.diff(each.sums) - reference_mix.DISCOUNT / 64
        rest = each.unlisted / 4096
        wanted = (listed + rest * wanted) / (listed.sum() + rest)
    assert found.sum() == pytest.approx(1, abs=0.01)
    assert found == pytest.approx(wanted, rel=0.03, abs=2e-4)


def test_who_speaks_is_followed() -> None:
    """Contexts of the chat's form: the author, the one before, the first token of the line."""
    text, opening, feed = 1, 2, 3
    kinds = np.array([0, 0, mixing.OPENING, mixing.BREAK, 0, 0, 0], np.uint8)
    lane = Lane()
    first, second = (text, 4), (text, 5)
    names = []
    for name in (first, second, first):
        for rank in (opening, *name, feed):
            lane.append(rank, kinds)
        for rank in (6, text, feed, 4, 5):
            lane.append(rank, kinds)
        names.append(lane.name)
        assert lane.line == 4 + 1
        assert lane.place == 5
    assert names[0] == names[2] != names[1] == lane.previous
    assert 0 not in names
    assert not lane.in_name


def test_it_learns(parts: Any) -> None:
    """Text that was seen costs less than new text, and text of the corpus less than noise."""
    weights, tables_, start, kinds, corpus = parts
    mixer = _native.Mixer(weights, tables_, start, kinds)

    def cost(ranks: Ranks) -> float:
        bits, chances = mixer.encode(0, ranks)
        return float(-np.log2(np.where(bits == 1, chances, 1 - chances)).sum())

    mixer.reset()
    first = cost(corpus[:200].astype(np.int32))
    assert cost(corpus[:200].astype(np.int32)) < 0.5 * first
    mixer.reset()
    assert first < 0.8 * cost(np.random.default_rng(0).integers(0, N_TOKENS, 200, dtype=np.int32))


def test_it_follows_the_network(parts: Any) -> None:
    """A distribution that is always right is soon believed."""
    weights, tables_, start, kinds, _ = parts
    mixer = _native.Mixer(weights, tables_, start, kinds)
    mixer.reset()
    rng = np.random.default_rng(0)
    costs = []
    for rank in rng.integers(0, N_TOKENS, 300, dtype=np.int32):
        counts = np.ones(N_TOKENS, np.uint32)
        counts[rank] = 1 << 24
        bits, chances = mixer.encode(0, np.array([rank]), counts)
        costs.append(float(-np.log2(np.where(bits == 1, chances, 1 - chances)).sum()))
    assert np.mean(costs[-50:]) < 0.1 < np.mean(costs[:3]) < 1


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda w, t, s, k: (w[:1], t, s, k), "weights"),
        (lambda w, t, s, k: (w, t, s[:-1], k), "state"),
        (lambda w, t, s, k: (w, t, s, k[1:]), "kinds"),
        (lambda w, t, s, k: (w, [(t[0][0][:-1], t[0][1]), *t[1:]], s, k), "buckets"),
        (lambda w, t, s, k: (w, [t[0], (t[1][0][:-2], t[1][1])], s, k), "buckets"),
        (lambda w, t, s, k: (w, [(t[0][0], t[0][1][:-1])], s, k), "outside"),
        (lambda w, t, s, k: (w, [(t[0][0], t[0][1] | np.uint16(0xFFF0))], s, k), "tokens"),
        (lambda w, t, s, k: (w, [t[0], (t[1][0], t[1][1] | np.uint16(62))], s, k), "longer|tokens"),
    ],
)
def test_unsound_tables_are_refused(native: Any, parts: Any, change: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        native.Mixer(*change(*parts[:4]))


def test_misuse_is_refused(native: Any, parts: Any) -> None:
    mixer = native.Mixer(*parts[:4])
    with pytest.raises(ValueError, match="no token was begun"):
        mixer.step(0)
    with pytest.raises(ValueError, match="lane"):
        mixer.begin(1)
    with pytest.raises(ValueError, match="not a token"):
        mixer.encode(0, np.array([N_TOKENS], np.int32))
    with pytest.raises(ValueError, match="counts"):
        mixer.begin(0, np.ones(3, np.uint32))
    mixer.begin(0)
    with pytest.raises(ValueError, match="not finished"):
        mixer.begin(0)
    with pytest.raises(ValueError, match="lanes"):
        mixer.reset(0, 12)


@settings(max_examples=30, deadline=None)
@given(st.lists(st.integers(0, 15), min_size=20, max_size=200), st.integers(1, 5))
def test_tables_hold_the_counts(tokens: list[int], order: int) -> None:
    """Every context that occurs twice, with what followed it: brute force over the text."""
    ranks = np.array(tokens, np.uint32)
    found = tables.count(ranks, order)
    wanted: dict[tuple[int, ...], dict[int, int]] = {}
    for i in range(order, len(tokens)):
        after = wanted.setdefault(tuple(tokens[i - order : i]), {})
        after[tokens[i]] = after.get(tokens[i], 0) + 1
    least = 2 if order > 1 else 1
    kept = {k: v for k, v in wanted.items() if sum(v.values()) >= least}
    index, data = tables.pack(found, 16, order)
    mixer = reference_mix.ReferenceMixer(
        np.ones(16, np.uint32),
        [(index, data)] * order,
        training.untrained(16),
        np.zeros(16, np.uint8),
    )
    assert len(found.contexts) == len(kept)
    for context, after in kept.items():
        listed = mixer.look_up(order, [0] * 16 + list(context))
        counts = dict(zip(listed.ranks, np.diff(listed.sums).tolist(), strict=True))
        assert counts == {k: max(c for c in tables.COUNTS if c <= n) for k, n in after.items()}
