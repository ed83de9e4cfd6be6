"""The search index against reading all texts: who finds what, in which order of events whatever."""

from __future__ import annotations

import os
import re
import sqlite3
import subprocess
import sys
import textwrap
import unicodedata
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from towerd.errors import Unavailable
from towerd.search.file import FILE_NAME, remove_index
from towerd.search.index import Indexed, Passage, SearchIndex, SessionKey

WORDS = ("otter", "Otter", "ünïcode", "unicode", "snake_case", "naïve", "42", "AND", "NEAR", "x")
TEXTS = st.lists(st.sampled_from(WORDS), max_size=6).map(" ".join)
SCOPES = ("local", "local~aa@1.0", "localhost", "alice")
SESSIONS = st.lists(st.tuples(st.sampled_from(SCOPES), st.lists(TEXTS, max_size=3)), max_size=8)


def key(number: int, scope: str = "local") -> SessionKey:
    return SessionKey("t", scope, f"s{number}")


def folded(text: str) -> list[str]:
    """The words of a text, without case and accents."""
    plain = unicodedata.normalize("NFD", text.casefold())
    bare = "".join(c for c in plain if not unicodedata.combining(c))
    return re.findall(r"[^\W_]+", bare)


def has(text: str, term: str, *, begun: bool) -> bool:
    """Whether the words of `term` follow each other in `text`; begun: its last one may go on."""
    words, wanted = folded(text), folded(term)
    return any(
        words[i : i + len(wanted) - 1] == wanted[:-1]
        and (words[i + len(wanted) - 1 :] or [""])[0].startswith(wanted[-1])
        and (begun or words[i + len(wanted) - 1] == wanted[-1])
        for i in range(len(words) - len(wanted) + 1)
    )


@given(sessions=SESSIONS, terms=st.lists(st.sampled_from(WORDS), min_size=1, max_size=3))
def test_finds_what_reading_everything_finds(
    sessions: list[tuple[str, list[str]]],
    terms: list[str],
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    index = SearchIndex(tmp_path_factory.mktemp("index") / FILE_NAME)
    for number, (scope, texts) in enumerate(sessions):
        passages = [Passage(turn, 1.0, text) for turn, text in enumerate(texts)]
        index.add(key(number, scope), 1.0, passages)
        index.add(key(number, scope), 1.0, passages)
    for asked in (None, "local", "alice"):
        found = {hit.session for hit in index.search(" ".join(terms), asked, 100)}
        wanted = {
            key(number, scope)
            for number, (scope, texts) in enumerate(sessions)
            if asked in (None, scope, scope.partition("~")[0])
            and any(
                all(has(text, term, begun=i == len(terms) - 1) for i, term in enumerate(terms))
                for text in texts
            )
        }
        assert found == wanted
    index.close()


@pytest.fixture
def index(tmp_path: Path) -> SearchIndex:
    return SearchIndex(tmp_path / FILE_NAME)


@pytest.mark.parametrize(
    "typed",
    ['"', '"otter', 'otter"', "otter*", "(otter", "-otter", "otter:", "^otter", "NOT otter"],
)
def test_what_is_typed_is_never_a_syntax_error(index: SearchIndex, typed: str) -> None:
    index.add(key(1), 1.0, [Passage(1, 1.0, "an otter, not two")])
    assert len(index.search(typed, None, 9)) == ("otter" in typed)


@pytest.mark.parametrize("typed", ["otter _ fox", "_", "__ fox", "snake_case", "_otter_"])
def test_an_underline_is_no_word(index: SearchIndex, typed: str) -> None:
    index.add(key(1), 1.0, [Passage(1, 1.0, "otter, snake case and fox")])
    assert len(index.search(typed, None, 9)) == (typed != "_")


def test_phrases_scripts_without_spaces_and_snippets(index: SearchIndex) -> None:
    index.add(key(1), 1.0, [Passage(1, 1.0, "今天天气很好。 <b>the red otter</b>")])
    assert index.search("天气", None, 9)
    assert not index.search("气天", None, 9)
    assert index.search('"red otter"', None, 9)
    assert not index.search('"otter red"', None, 9)
    (hit,) = index.search("天气 red", None, 9)
    assert "".join(hit.snippet) == "今天天气很好。 <b>the red otter</b>"
    assert hit.snippet[3] == "red"


def test_deleted_words_leave_the_bytes(index: SearchIndex) -> None:
    """Of what was removed nothing can be found in the files."""
    for number in range(50):
        index.add(key(number), 1.0, [Passage(1, 1.0, f"otter number{number} secretword{number}")])
    index.forget([key(7)])
    index.scrub()
    data = b"".join(
        path.read_bytes() for path in index.path.parent.iterdir() if path.name != FILE_NAME + "-shm"
    )
    assert b"secretword8" in data
    assert b"secretword7" not in data
    assert b"number7 " not in data
    # words of an index share their beginnings: what is left of this one would be its last letters
    rows = sqlite3.connect(index.path)
    rows.execute("CREATE VIRTUAL TABLE temp.seen USING fts5vocab(main, words, row)")
    assert "secretword7" not in {term for (term, *_) in rows.execute("SELECT * FROM temp.seen")}
    rows.close()


def test_what_another_reads_is_scrubbed_later(index: SearchIndex) -> None:
    """The log of the file still has it then, and whoever deletes hears of that."""
    index.add(key(1), 1.0, [Passage(1, 1.0, "secretword")])
    other = sqlite3.connect(index.path, isolation_level=None)
    other.execute("BEGIN")
    assert other.execute("SELECT text FROM passages").fetchall() == [("secretword",)]
    index.forget([key(1)])
    assert not index.scrub()
    other.close()
    assert index.scrub()
    data = b"".join(path.read_bytes() for path in index.path.parent.iterdir())
    assert b"secretword" not in data


def test_a_new_session_of_an_old_name_replaces_it(index: SearchIndex) -> None:
    """Which is said, so that the old words are scrubbed."""
    assert not index.add(key(1), 1.0, [Passage(1, 1.0, "old words")], "old?")
    assert index.add(key(1), 2.0, [Passage(1, 2.0, "new words")], "new?")
    assert not index.search("old", None, 9)
    assert list(index.questions([key(1), key(2)]).values()) == ["new?"]


@pytest.mark.parametrize("damage", ["bytes", "version", "truncated"])
def test_a_damaged_index_is_begun_anew(index: SearchIndex, damage: str) -> None:
    """At its opening, without an error: it is derived data."""
    index.add(key(1), 1.0, [Passage(1, 1.0, "otter")])
    path = index.path
    index.close()
    if damage == "bytes":
        path.write_bytes(b"no database" * 1000)
    elif damage == "truncated":
        os.truncate(path, 5000)
    else:
        db = sqlite3.connect(path)
        db.execute("PRAGMA user_version = 99")
        db.close()
    again = SearchIndex(path)
    if damage != "truncated":
        assert again.keys() == []
    assert path.stat().st_mode & 0o777 == 0o600
    again.close()


def empty_log(index: SearchIndex) -> None:
    """Move all that was entered from the log of the file into the file itself."""
    db = sqlite3.connect(index.path)
    assert db.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()[0] == 0
    db.close()


def meet_damage(index: SearchIndex) -> None:
    """Write and read until SQLite looks at the damaged pages."""
    for _ in range(3):
        index.add(key(999), 1.0, [Passage(1, 1.0, "otter")])
        index.search("otter", None, 9)


def test_damage_in_use_is_said_and_repaired(index: SearchIndex) -> None:
    for number in range(200):
        index.add(key(number), 1.0, [Passage(1, 1.0, f"otter number{number} " * 50)])
    empty_log(index)
    index.path.write_bytes(b"no database" * 1000)
    with pytest.raises(Unavailable):
        meet_damage(index)
    index.repair()
    assert index.search("otter", None, 9) == []
    index.add(key(1), 1.0, [Passage(1, 1.0, "otter")])
    assert len(index.search("otter", None, 9)) == 1


def test_one_process_begins_anew_and_the_others_follow(tmp_path: Path) -> None:
    """None goes on with a file that is no longer there, and none removes the new one."""
    one, two = (SearchIndex(tmp_path / FILE_NAME) for _ in range(2))
    for number in range(200):
        one.add(key(number), 1.0, [Passage(1, 1.0, f"otter number{number} " * 50)])
    empty_log(one)
    one.path.write_bytes(b"no database" * 1000)
    for index in (one, two):
        with pytest.raises(Unavailable):
            meet_damage(index)
    one.repair()
    one.add(key(3), 1.0, [Passage(1, 1.0, "otter")])
    two.repair()
    assert [hit.session for hit in two.search("otter", None, 9)] == [key(3)]
    remove_index(tmp_path)
    three = SearchIndex(tmp_path / FILE_NAME)
    for number, index in enumerate((one, two, three), 5):
        index.add(key(number), 1.0, [Passage(1, 1.0, "otter")])
    for index in (one, two, three):
        found = {hit.session for hit in index.search("otter", None, 9)}
        assert found == {key(5), key(6), key(7)}
        index.close()


def test_several_processes_fill_one_index(tmp_path: Path) -> None:
    """Whoever enters what first: it is there once; a reader does not wait for a writer."""
    work = """if True:
        import sys
        from pathlib import Path
        from towerd.search.index import Passage, SearchIndex, SessionKey
        index = SearchIndex(Path(sys.argv[1]))
        for number in range(100):
            key = SessionKey("t", "local", f"s{number}")
            index.add(key, 1.0, [Passage(turn, 1.0, f"otter word{number}") for turn in range(3)])
    """
    path = tmp_path / FILE_NAME
    writers = [
        subprocess.Popen([sys.executable, "-c", textwrap.dedent(work), str(path)]) for _ in range(3)
    ]
    assert [writer.wait(120) for writer in writers] == [0, 0, 0]
    index = SearchIndex(path)
    assert {hit.session for hit in index.search("otter", None, 1000)} == {
        key(number) for number in range(100)
    }
    assert {index.indexed(key(number)) for number in range(100)} == {Indexed(1.0, 3, None)}
    other = sqlite3.connect(path, isolation_level=None)
    other.execute("BEGIN IMMEDIATE")
    assert index.search("word7", None, 9)
    other.execute("ROLLBACK")
    other.close()
