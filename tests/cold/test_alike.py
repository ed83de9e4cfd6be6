"""Blobs that follow a base which is like a session's own prompt."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from cold_population import coder
from store_tools import ROW_IDENTITY, turn_of
from waiting import until_async

from towerd.codec import Codec, container
from towerd.cold import (
    Coding,
    ColdTier,
    IdleFreezer,
    VocabularySource,
    cold_history,
    freeze,
    recode,
    thaw,
    write_copy,
)
from towerd.models.bundled import bundled_model
from towerd.store import Store
from towerd.tokens import Ids

NAMES = ("Lily", "Anna", "Tom", "Mia")
PROMPT = (
    " has a big red ball and a little dog named Max. Every day they play outside in the park, and when it "
    "rains they stay at home and read a book about the sea. Ask for the number of the order, look it up in the "
    "list of the day, and say when the bread and the cakes will be ready. Never promise a time before eight. "
    "If somebody is sad, be kind, tell a story about a bear who lost his hat, and ask what the weather is like. "
)
SAID = (
    " What is for dinner today? There is soup, {} said.",
    " My cat is in a tree and I cannot find {}.",
    " Can we go to the beach with {} on Sunday?",
    " The moon is big, {}, and the stars are far.",
)


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    with Store.open(tmp_path / "store", ROW_IDENTITY) as opened:
        yield opened


@pytest.fixture(scope="module")
def codec(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Codec]:
    with coder(tmp_path_factory.mktemp("tables")) as made:
        yield made


def prompt(codec: Codec, variant: int) -> list[int]:
    """One prompt with other names in it, with which it begins."""
    text = f"{NAMES[variant]}{PROMPT}Write to {NAMES[variant]} when in doubt."
    return list(codec.vocabulary.tokenize(text.encode()))


def chat(store: Store, codec: Codec, variant: int) -> list[int]:
    """Record a chat; its tokens."""
    said = SAID[variant].format(NAMES[variant]).encode()
    whole = prompt(codec, variant) + list(codec.vocabulary.tokenize(said))
    store.commit_turn(turn_of(whole[:-3], whole[-3:], session=f"chat-{variant}"))
    return whole


def add_base(store: Store, codec: Codec, scope: str = "local") -> Ids:
    """Pin the first prompt; its tokens."""
    ids = np.array(prompt(codec, 0), np.int32)
    store.bases.add("base", ids, scope, 1, False)
    return ids


def ids_of(store: Store, codec: Codec, name: str) -> Ids:
    history = cold_history(store, codec, name) or store.history(name)
    return history.ids(history.leaf)


def test_a_session_follows_a_base_like_its_prompt(store: Store, codec: Codec) -> None:
    """Frozen it takes less than seven tenths of the bytes, comes back token by token, and the store verifies."""
    add_base(store, codec)
    whole = chat(store, codec, 1)
    done = freeze(store, codec, "chat-1")
    assert done is not None
    alone = len(codec.encode(whole))
    assert done.nbytes < 0.7 * alone
    assert done.n_tokens == len(whole)
    stats = store.cold.stats()
    assert stats["alike_coded"] == 1
    assert stats["alike_bytes_saved"] == alone - done.nbytes
    assert ids_of(store, codec, "chat-1").tolist() == whole
    assert store.verify().ok
    assert thaw(store, codec, "chat-1")
    assert ids_of(store, codec, "chat-1").tolist() == whole
    assert freeze(store, codec, "chat-1") is not None  # from the copy
    assert store.session("chat-1").cold_bytes == done.nbytes


def test_what_is_not_like_a_base(store: Store, codec: Codec) -> None:
    """A base of another tenant, and one that a session begins with, are no context of this kind."""
    add_base(store, codec, "other")
    whole = chat(store, codec, 1)
    done = freeze(store, codec, "chat-1")
    assert done is not None
    assert done.nbytes == len(codec.encode(whole))
    add_base(store, codec)
    chat(store, codec, 0)
    freeze(store, codec, "chat-0")
    assert store.cold.stats()["alike_coded"] == 0
    assert store.session("chat-0").cold_bytes < done.nbytes / 2  # the base is its beginning


def test_a_removed_base_stays_until_its_sessions_are_coded_again(
    store: Store, codec: Codec
) -> None:
    """A collection of what nothing needs leaves it; once they are, it goes, and they are whole."""
    base = add_base(store, codec)
    whole = {f"chat-{i}": chat(store, codec, i) for i in (1, 2)}
    freeze(store, codec, "chat-1")
    write_copy(store, codec, "chat-2")
    assert store.cold.stats()["alike_coded"] == 2
    assert not store.cold.alike.strays()
    store.bases.remove("base", "local")
    assert sorted(store.cold.alike.strays()) == [("chat-1", "local"), ("chat-2", "local")]
    store.gc()
    assert store.match(base, "local").n == len(base)
    for name, ids in whole.items():
        assert ids_of(store, codec, name).tolist() == ids
        assert recode(store, codec, name)
    assert not store.cold.alike.strays()
    assert store.gc().segments
    assert store.match(base, "local").n == 0
    for name, ids in whole.items():
        assert ids_of(store, codec, name).tolist() == ids
    assert store.verify().ok


def test_one_tokens_of_its_own_stay(store: Store, codec: Codec) -> None:
    """Coded again, a session follows what it shares with the base that was removed."""
    platform = list(codec.vocabulary.tokenize(" ".join(SAID).encode()))
    store.bases.add("p", np.array(platform, np.int32), "local", 0, False)
    store.bases.add("p/q", np.array(platform + prompt(codec, 0), np.int32), "local", 1, False)
    whole = platform + prompt(codec, 1)
    store.commit_turn(turn_of(whole[:-3], whole[-3:], session="chat"))
    freeze(store, codec, "chat")
    assert store.cold.stats()["alike_coded"] == 1
    store.bases.remove("p/q", "local")
    assert recode(store, codec, "chat")
    (each,) = store.cold.coded(0, 10)
    blob = container.read(store.cold.blob(each.pk))
    assert blob.n_ids == len(prompt(codec, 1))
    store.gc()
    assert ids_of(store, codec, "chat").tolist() == whole


async def test_idle_time_codes_them_again(store: Store, codec: Codec) -> None:
    cold = ColdTier(
        store,
        Coding(lambda: VocabularySource(bundled_model(), "hash"), store.tables),
        freeze_after_s=-1,
    )
    add_base(store, codec)
    chat(store, codec, 1)
    assert await cold.freeze("chat-1") is not None
    freezer = IdleFreezer(cold)
    store.bases.remove("base", "local")
    assert store.cold.alike.strays()
    freezer.start()
    await until_async(lambda: cold.n_recoded == 1)
    assert not store.cold.alike.strays()
    assert cold.n_failed == 0
    await freezer.stop()
    await cold.close()
