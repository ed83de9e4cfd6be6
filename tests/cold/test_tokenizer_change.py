"""Another llama.cpp cuts text into other tokens: it is noticed, and nothing becomes unreadable.

The change is made in the store: what was coded before was coded with a tokenizer that differs, and
the probe that is remembered is that tokenizer's.
"""

from __future__ import annotations

import asyncio
import logging
from dataclasses import replace
from pathlib import Path

import pytest
from cold_population import N_BASES, name_of, record, said
from oracle import ask
from reworded import Reworded
from services import OpenService
from store_tools import ROW_IDENTITY, turn_of
from waiting import until_async

from towerd.cli.doctor import store as doctor
from towerd.codec import Codec
from towerd.codec.codec import WrittenText
from towerd.codec.errors import Damaged
from towerd.codec.forms import mix
from towerd.codec.prior import file
from towerd.codec.vocabulary import TEXTS, GgufVocabulary, probe
from towerd.cold import Coding, ColdTier, IdleFreezer, VocabularySource, freeze, write_copy
from towerd.cold.cold_tier import check_minis
from towerd.cold.freezing import decode
from towerd.errors import ThawError
from towerd.models.bundled import bundled_model
from towerd.settings.config import Config
from towerd.store import Store, latest_row_identity
from towerd.store.state.probes import is_renewing, note_probe, note_renewed

STORY = b"Once upon a time there was a little girl who had a dog. They went to the park."


def coded_before(root: Path, codec: Codec) -> list[int]:
    """`lost` was coded as text, `kept` as ids, by a tokenizer that differs; its ids."""
    before = Reworded(codec.vocabulary)
    ids = [1, *before.tokenize(STORY).tolist()]
    assert ids != [1, *map(int, codec.vocabulary.tokenize(STORY))]
    with Store.open(root, latest_row_identity) as store:
        digest = store.state.identity.tokenizer_digest
        assert note_probe(store.state, digest, probe(before.tokenize))
        note_renewed(store.state, digest, 0)
        for session, form in (("kept", "packed"), ("lost", "text")):
            store.commit_turn(turn_of(ids, [400, 401], session=session))
            freeze(store, Codec(before, tables=store.tables), session, form=form)
    return [*ids, 400, 401]


async def test_another_llama_cpp(
    service_on: OpenService, tmp_path: Path, codec: Codec, caplog: pytest.LogCaptureFixture
) -> None:
    """It is said once, and by doctor for as long as it matters; conversations are renewed where their
    ids can be had; others are read as text, and answered when a client continues them."""
    config = Config(store_dir=tmp_path / "store")
    async with service_on(bundled_model()):
        pass
    assert doctor.catalog(config).status == "OK"
    ids = coded_before(tmp_path / "store", codec)
    with caplog.at_level(logging.WARNING):
        async with service_on(bundled_model()):
            pass
    assert "cuts text into other tokens than the one of the last start" in caplog.text
    assert "cuts text into other tokens" in doctor.catalog(config).found
    caplog.clear()
    async with service_on(bundled_model(), freeze_after_s=0.1) as service:
        store, cold = service.store, service.cold
        digest = store.state.identity.tokenizer_digest
        await until_async(lambda: not is_renewing(store.state, digest))
        assert cold.n_recoded == 1
        assert (await cold.session_ids("kept")).tolist() == ids
        with pytest.raises(ThawError, match="cuts text into tokens otherwise"):
            await cold.session_ids("lost")
        text = (await service.engine.detokenize(ids)).decode()
        assert await asyncio.to_thread(service.search.reader.text, "lost") == text
        answer = await ask(
            service, [*map(int, codec.vocabulary.tokenize(STORY)), 5], session="lost"
        )
        assert answer.finish.session == "lost"
        assert store.session("lost").cold_bytes
    assert "last start" not in caplog.text
    assert "1 coded conversations have no token ids here" in doctor.catalog(config).found


async def test_the_codecs_own_vocabulary(
    tmp_path: Path, codec: Codec, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """What was coded after a base took its cut, too: it is said, and copies are coded again."""
    with Store.open(tmp_path / "store", ROW_IDENTITY) as store:
        for number in (0, N_BASES):
            record(store, number)
        with monkeypatch.context() as patch:
            other = replace(file.bundled(), vocabulary=Reworded(file.bundled().vocabulary))
            patch.setattr(file, "bundled", lambda: other)
            before = Codec(codec.vocabulary, tables=store.tables)
            write_copy(store, before, name_of(N_BASES), form="mix")
            check_minis(store, before)
        digest = store.state.identity.tokenizer_digest
        note_renewed(store.state, digest, 0)
        caplog.clear()
        source = VocabularySource(bundled_model(), "hash")
        cold = ColdTier(store, Coding(lambda: source, store.tables), freeze_after_s=-1)
        freezer = IdleFreezer(cold)
        freezer.start()
        await until_async(lambda: cold.n_recoded == 1)
        await until_async(lambda: not is_renewing(store.state, digest))
        assert "cuts the codec's vocabulary differently" in caplog.text
        freeze(store, codec, name_of(N_BASES))
        frozen = store.cold.read(name_of(N_BASES))
        assert frozen is not None
        assert len(frozen.base) == 40
        history = frozen.history(decode(codec, frozen))
        assert history.ids(history.leaf).tolist() == said(N_BASES)[-1]
        check_minis(store, codec)
        assert not is_renewing(store.state, digest)
        await freezer.stop()
        await cold.close()


def test_what_is_remembered(tmp_path: Path, codec: Codec) -> None:
    """The first probe is no change; a change stays until all is renewed. The texts differ under a
    tokenizer that differs a little."""

    store, digest = Store.open(tmp_path / "store", ROW_IDENTITY), b"d" * 32
    assert not note_probe(store.state, digest, "one")
    assert not note_probe(store.state, digest, "one")
    assert not is_renewing(store.state, digest)
    assert note_probe(store.state, digest, "two")
    assert not note_probe(store.state, digest, "two")
    assert is_renewing(store.state, digest)
    assert not is_renewing(store.state, b"e" * 32)
    note_renewed(store.state, digest, 0)
    assert not is_renewing(store.state, digest)
    store.close()
    assert probe(codec.vocabulary.tokenize) == probe(codec.vocabulary.tokenize)
    for text in TEXTS:

        def other(each: bytes, text: str = text) -> list[int]:
            ids = [int(i) for i in codec.vocabulary.tokenize(each)]
            return ids[:-1] if each == text.encode() else ids

        assert probe(other) != probe(codec.vocabulary.tokenize)


def test_a_base_that_is_cut_otherwise(codec: Codec, monkeypatch: pytest.MonkeyPatch) -> None:
    """Text that was coded after a base depends on how the mini vocabulary cuts that: if it changed,
    there is an error and no other text."""
    base = [int(i) for i in codec.vocabulary.tokenize(STORY)]
    own = [int(i) for i in codec.vocabulary.tokenize(STORY[20:])]
    changed = Codec(Reworded(codec.vocabulary))
    for form in ("mix", "network"):
        after, alone = codec.encode(own, base, form=form), codec.encode(own, form=form)
        assert isinstance(changed.read(after, base), WrittenText)
        with monkeypatch.context() as patch:
            patch.setattr(mix, "WRITTEN", dict.fromkeys(mix.WRITTEN, "something else"))
            with pytest.raises(Damaged, match="other ids"):
                changed.read(after, base)
            found = changed.read(alone)
            assert isinstance(found, WrittenText)
            said = b"".join(codec.vocabulary.pieces[i] for i in own)
            assert found.spell(codec.vocabulary) == said
    table = changed.text_coder().mini
    assert table.cuts_as_written()
    assert isinstance(table.prior.vocabulary, GgufVocabulary)
