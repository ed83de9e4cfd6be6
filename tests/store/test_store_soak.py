"""The long attack on a store's files: flipped bits in every kind of file, files that take each
other's place, clocks that jump. Nothing wrong is ever served, and nothing that was acknowledged is
lost without a word."""

from __future__ import annotations

import random
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
from cold_population import coder
from store_tools import ROW_IDENTITY, check_rows, turn_of, write_all

from towerd.codec import Codec
from towerd.cold import freeze
from towerd.cold.freezing import cold_history
from towerd.errors import NotFound, RowsDamaged, StoreError, TowerdError
from towerd.search.file import FILE_NAME
from towerd.search.index import Passage, SearchIndex, SessionKey
from towerd.store import FormatRequest, Store
from towerd.store.catalog.vocabularies import KeptVocabulary
from towerd.store.rows.checkpoints import CheckpointTable
from towerd.store.segments.checkpoint_file import CUT_META

CHATS = {
    f"chat-{n}": np.random.default_rng(n).integers(3, 512, 80 + 10 * n).tolist() for n in range(5)
}
FORMATS = {"chat-0": None, "chat-1": "q4h", "chat-2": "q5h"}
"""What the rows of these are stored in."""
FROZEN, STATEFUL = "chat-4", "chat-3"
CALIBRATION = "calibration:" + ROW_IDENTITY.digest().hex()
MEASURED = '{"measured": ' + str(list(range(300))) + "}"
WORD = "otter"
KEY = SessionKey("00" * 32, "local", "chat-0")
FLIPS = 24
"""Of each file."""


def state(n: int) -> np.ndarray[tuple[int], np.dtype[np.uint8]]:
    return np.random.default_rng(n).integers(0, 256, 3000, np.uint8)


@pytest.fixture(scope="module")
def codec(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Codec]:
    with coder(tmp_path_factory.mktemp("tables")) as made:
        yield made


@pytest.fixture(scope="module")
def before(tmp_path_factory: pytest.TempPathFactory, codec: Codec) -> Path:
    """A closed store that has every kind of file."""
    root = tmp_path_factory.mktemp("before") / "store"
    with Store.open(root, ROW_IDENTITY) as store:
        store.set_meta(CUT_META + store.state.digest.hex(), "boundary")
        store.set_meta(CALIBRATION, MEASURED)
        for name, ids in CHATS.items():
            node = store.commit_turn(turn_of(ids[:50], ids[50:], session=name)).node
            store.rename_session(name, f"title of {name}")
            if name in FORMATS:
                write_all(store, node)
                wanted = FORMATS[name]
                if wanted is not None:
                    assert node.file is not None
                    assert (
                        store.rows.reencode(node.file, [FormatRequest(0, 60, wanted)]) is not None
                    )
        table = CheckpointTable(store.state)
        for node in table.attach(
            np.array(CHATS[STATEFUL], np.int32), "local", {60: (state(60), False)}
        ):
            table.write(node)
        freeze(store, codec, FROZEN)
        pieces = [b"piece %d" % id for id in range(512)]
        store.vocabularies.keep(
            store.state.identity.tokenizer_digest, KeptVocabulary(pieces, [b""] * 512)
        )
    index = SearchIndex(root / FILE_NAME)
    index.add(KEY, 1.0, [Passage(1, 1.0, f"the red {WORD} " * 50)])
    index.close()
    return root


@contextmanager
def opened(root: Path, model: object = ROW_IDENTITY) -> Iterator[Store]:
    with Store.open(root, model) as store:  # type: ignore[arg-type]
        yield store


def check(root: Path, codec: Codec) -> None:
    """Every token, title and number is there; rows, states, words and what the search finds are
    right or are gone."""
    with opened(root) as store:
        for name, ids in CHATS.items():
            info = store.session(name)
            assert (info.title, info.n_tokens) == (f"title of {name}", len(ids))
            history = cold_history(store, codec, name, "local") or store.history(name)
            assert history.ids(history.leaf).tolist() == ids, name
            for turn in store.turns(name):
                try:
                    check_rows(store, store.node(turn.reply_node))
                except (NotFound, RowsDamaged):
                    assert name == FROZEN or name in FORMATS
        assert store.get_meta(CALIBRATION) == MEASURED
        table = CheckpointTable(store.state)
        for found in table.all():
            try:
                np.testing.assert_array_equal(table.load(found), state(60))
            except RowsDamaged:
                assert found not in table.all()
        try:
            words = store.vocabularies.read(store.state.identity.tokenizer_digest)
            assert words.text(np.array([3, 5])) == "piece 3piece 5"
        except StoreError:
            assert not store.vocabularies.has(store.state.identity.tokenizer_digest)
        store.verify(repair=True)
        report = store.verify()
        assert report.ok, report.problems
        store.gc()
    index = SearchIndex(root / FILE_NAME)
    try:
        hits = index.search(WORD, "local", 10)
        assert [hit.session for hit in hits] in ([], [KEY])
        assert all(WORD in "".join(hit.snippet) for hit in hits)
    except TowerdError:
        index.repair()
        assert index.search(WORD, "local", 10) == []
    finally:
        index.close()


def kinds(root: Path) -> list[str]:
    """Every file of the store that may be damaged, but locks."""
    paths = (path for path in root.rglob("*") if path.is_file() and path.stat().st_size)
    return sorted(str(path.relative_to(root)) for path in paths if "lock" not in path.name)


@pytest.mark.soak
@pytest.mark.timeout(1200)
def test_a_flipped_bit_in_every_file(tmp_path: Path, before: Path, codec: Codec) -> None:
    """Of a store that was closed well, so that its mark of that is wrong, and of one that was not."""
    chance = random.Random(5)
    for kind in kinds(before):
        for number in range(FLIPS):
            root = tmp_path / "store"
            shutil.copytree(before, root)
            data = bytearray((root / kind).read_bytes())
            at = number if number < FLIPS // 3 else chance.randrange(len(data))
            data[at % len(data)] ^= 1 << chance.randrange(8)
            (root / kind).write_bytes(data)
            if number % 2 and (root / "catalog.sqlite.clean").exists():
                (root / "catalog.sqlite.clean").unlink()
            try:
                check(root, codec)
            except BaseException as error:
                error.add_note(f"{kind}, byte {at}")
                raise
            shutil.rmtree(root)
