"""A chat is tokenized once: what a prompt adds to an earlier one is all that llama.cpp gets."""

from __future__ import annotations

from collections.abc import Iterator

import llama_cpp.llama_cpp as lib
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from towerd.errors import InvalidRequest
from towerd.model import retokenize
from towerd.model.llama_model import LlamaModel
from towerd.model.retokenize import PART_BYTES, Retokenizer, SpecialTokens
from towerd.model.vocab import Vocab
from towerd.models.bundled import RETRIEVAL_NAME, bundled_model
from towerd.settings.sources import load
from towerd.tokens import Ids

BITS = ("<", "s>", ">", "/s>", "|im_", "|>", " ", "  ", "\n", "a", "Tim had", "é", "<s", "<0x0A>")
MODELS = {"spm": bundled_model(), "bpe": bundled_model(RETRIEVAL_NAME)}


@pytest.fixture(scope="module", params=MODELS)
def vocab(request: pytest.FixtureRequest) -> Iterator[Vocab]:
    """Of a SentencePiece and of a BPE tokenizer."""
    model = LlamaModel(MODELS[request.param], load({}), vocab_only=True)
    yield Vocab(model.ptr)
    model.close()


def chat(vocab: Vocab, n_turns: int) -> str:
    turns = (f"Tim had {i} balls.\nLily saw them." for i in range(n_turns))
    return vocab.eos_text.join(turns)


def test_a_turn_is_tokenized_not_the_chat(vocab: Vocab) -> None:
    """Turn after turn the same ids as ever, and the tokenizer gets about one turn of text."""
    known = Retokenizer(vocab)
    for n in range(500, 540):
        text = chat(vocab, n)
        before = known.n_bytes_tokenized
        assert (
            known.tokenize(text, True, True).tolist() == vocab.tokenize(text, True, True).tolist()
        )
        assert n == 500 or known.n_bytes_tokenized - before < 100


def test_an_edit_begins_at_the_turn_before(vocab: Vocab) -> None:
    """A text that leaves a known one in its middle is known up to there, and so is the known
    one."""
    known = Retokenizer(vocab)
    known.tokenize(chat(vocab, 500), True, True)
    edited = chat(vocab, 250) + f" And me.{vocab.eos_text}What then?"
    for text, n_bytes in (
        (edited, 100),
        (chat(vocab, 501), 100),
        (edited + f"{vocab.eos_text}So?", 100),
    ):
        before = known.n_bytes_tokenized
        assert (
            known.tokenize(text, True, True).tolist() == vocab.tokenize(text, True, True).tolist()
        )
        assert known.n_bytes_tokenized - before < n_bytes


@settings(max_examples=300, deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data(), add=st.booleans(), parse=st.booleans())
def test_any_texts(vocab: Vocab, data: st.DataObject, add: bool, parse: bool) -> None:
    """Whatever is known, the ids are those of the whole text."""
    known = Retokenizer(vocab, text_bytes_min=0)
    bits = st.sampled_from([*BITS, *(word.decode() for word in sorted(known.specials.words)[:4])])
    shared = data.draw(st.lists(bits, max_size=12))
    for end in data.draw(st.lists(st.lists(bits, max_size=8), min_size=1, max_size=4)):
        text = "".join([*shared, *end])
        assert (
            known.tokenize(text, add, parse).tolist() == vocab.tokenize(text, add, parse).tolist()
        )


@settings(max_examples=300, deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data(), part_bytes=st.integers(1, 20), add=st.booleans(), parse=st.booleans())
def test_any_text_in_parts(
    vocab: Vocab, data: st.DataObject, part_bytes: int, add: bool, parse: bool
) -> None:
    """However small the parts, the ids are those of the whole text."""
    specials = SpecialTokens(vocab, part_bytes)
    bits = st.sampled_from([*BITS, *(word.decode() for word in sorted(specials.words)[:4])])
    text = "".join(data.draw(st.lists(bits, max_size=20)))
    expected = vocab.tokenize(text, add, parse).tolist()
    assert specials.tokenize(text.encode(), add, parse).tolist() == expected


def test_a_long_chat_is_tokenized_in_parts(vocab: Vocab, monkeypatch: pytest.MonkeyPatch) -> None:
    """llama.cpp gets no more at once than it can take in its stride, unless it is one message."""
    texts = [chat(vocab, 5000), "word " * 5000 + chat(vocab, 2000) + "word " * 5000]
    expected = [vocab.tokenize(text, True, True).tolist() for text in texts]
    sizes: list[int] = []
    tokenize = vocab.tokenize

    def watched(data: bytes, add_special: bool, parse_special: bool) -> Ids:
        sizes.append(len(data))
        return tokenize(data, add_special, parse_special)

    monkeypatch.setattr(vocab, "tokenize", watched)
    found = [SpecialTokens(vocab).tokenize(text.encode(), True, True) for text in texts]
    assert [ids.tolist() for ids in found] == expected
    assert sum(sizes) == sum(map(len, texts))
    assert sum(size > PART_BYTES + 100 for size in sizes) == 2


@pytest.mark.parametrize(
    ("words", "text", "at", "is_cut"),
    [
        ((b"<s>", b"</s>"), b"ab<s>cd", 2, True),
        ((b"<s>", b"b<s"), b"ab<s>cd", 2, False),
        ((b"<s>", b"<s>c"), b"ab<s>cd", 2, False),
        ((b"<s>", b"s>cd"), b"ab<s>cd", 2, False),
        ((b"aXa",), b"aXaXa", 2, False),
        ((b"aXa",), b"aXaXa", 0, False),
        ((b"<s>",), b"ab<s>cd", 1, False),
    ],
)
def test_where_special_tokens_overlap_nothing_is_cut(
    vocab: Vocab, words: tuple[bytes, ...], text: bytes, at: int, is_cut: bool
) -> None:
    specials = SpecialTokens(vocab)
    specials.__dict__["words"] = words
    assert specials.is_cut(text, at) == is_cut


def test_what_is_kept_is_bounded(vocab: Vocab, monkeypatch: pytest.MonkeyPatch) -> None:
    """The texts used longest ago are forgotten, and cost a tokenization more."""
    monkeypatch.setattr(retokenize, "BYTES_MAX", 200_000)
    known = Retokenizer(vocab)
    texts = [f"{i}" + chat(vocab, 500) for i in range(12)]
    for text in texts:
        known.tokenize(text, True, True)
    before = known.n_bytes_tokenized
    known.tokenize(texts[-1], True, True)
    assert known.n_bytes_tokenized - before < 100
    known.tokenize(texts[0], True, True)
    assert known.n_bytes_tokenized - before > len(texts[0])


def test_errors_are_the_tokenizers_own(vocab: Vocab) -> None:
    known = Retokenizer(vocab)
    known.tokenize(chat(vocab, 500), True, True)
    with pytest.raises(InvalidRequest, match="Unicode"):
        known.tokenize(chat(vocab, 500) + "\ud800", True, True)


def test_llama_looks_for_these_tokens_first(vocab: Vocab) -> None:
    """What is taken for special here is what llama.cpp cuts a text at."""
    specials = SpecialTokens(vocab)
    assert {vocab.bos_text.encode(), vocab.eos_text.encode()} <= set(specials.words)
    for token, word in specials.texts.items():
        assert lib.llama_vocab_get_text(vocab.ptr, token) == word
        assert vocab.tokenize(word.decode(), False, True).tolist() == [token]
