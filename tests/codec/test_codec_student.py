"""A model of the user's with a tokenizer of its own: exact, kept with its blobs, never trusted."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from lab.models.random_gguf import Shape, make_random_gguf
from towerd.codec import Codec, container
from towerd.codec.errors import UnknownModel
from towerd.codec.forms import mini
from towerd.codec.forms.mini import check_student
from towerd.codec.models.marks import MarkedVocabulary
from towerd.codec.vocabulary import GgufVocabulary
from towerd.kernels import dispatch
from towerd.models.bundled import bundled_model

STORY = (
    b" Once upon a time, there was a little girl named Lily. She loved to play outside in the park. "
    b"One day, she saw a big, red ball. She wanted to play with it, but it was too high.\n"
)
"""What the bundled chat model has learned by heart; its tokenizer puts a space before each text."""
MANY = settings(
    max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)


@pytest.fixture(scope="module")
def taught(small: GgufVocabulary) -> Codec:
    """A codec with a student whose tokens no table has."""
    return Codec(small, student=bundled_model())


@pytest.fixture
def student(tmp_path: Path) -> Path:
    """The student's file, which may disappear."""
    return Path(shutil.copy(bundled_model(), tmp_path / "student.gguf"))


def ids_of(small: GgufVocabulary, text: bytes = STORY) -> list[int]:
    return [1, *[int(i) for i in small.tokenize(text)], 2]


@MANY
@given(st.lists(st.integers(0, 511), max_size=60), st.text(max_size=40))
def test_any_ids_come_back(small: GgufVocabulary, taught: Codec, ids: list[int], text: str) -> None:
    for some in (ids, [int(i) for i in small.tokenize(text.encode())]):
        for base in ([], ids_of(small)):
            blob = taught.encode(some, base=base, form="student")
            assert taught.decode(blob, base=base).tolist() == some


@MANY
@given(st.text(max_size=60))
def test_its_tokens_spell_any_text(text: str) -> None:
    words = MarkedVocabulary(bundled_model())
    spelled = b"".join(words.pieces[i] for i in words.tokenize(text.encode()))
    words.close()
    assert spelled == text.encode()


def test_auto_takes_it_where_it_is_smallest(small: GgufVocabulary, taught: Codec) -> None:
    story, other = ids_of(small), ids_of(small, b"Error: pip3 cannot resolve host pypi.org (443)")
    plain = Codec(small)
    assert len(taught.encode(story)) < len(plain.encode(story))
    assert taught.decode(taught.encode(story)).tolist() == story
    assert taught.encode(other) == plain.encode(other)


def test_other_kernels_read_it(
    small: GgufVocabulary, tmp_path: Path, student: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The references in numpy and Python as well."""
    ids = ids_of(small, STORY[:60])
    codec = Codec(small, tables=tmp_path / "tables", student=student)
    blob = codec.encode(ids, form="student")
    codec.keep(blob)
    for name in dispatch.available():
        monkeypatch.setenv("TOWERD_KERNELS", name)
        assert Codec(small, tables=tmp_path / "tables").decode(blob).tolist() == ids


def test_the_store_keeps_it(small: GgufVocabulary, tmp_path: Path, student: Path) -> None:
    """Without its file, and with a damaged copy of what can be derived again."""
    ids, tables = ids_of(small), tmp_path / "tables"
    codec = Codec(small, tables=tables, student=student)
    blob = codec.encode(ids)
    codec.keep(blob)
    codec.keep(blob)
    assert Codec(small, tables=tables, student=student).encode(ids) == blob
    student.unlink()
    assert Codec(small, tables=tables).decode(blob).tolist() == ids
    (start,) = tables.glob("start-*")
    start.write_bytes(start.read_bytes()[:-9])
    assert Codec(small, tables=tables).decode(blob).tolist() == ids


def test_says_which_model_is_missing(small: GgufVocabulary, tmp_path: Path, student: Path) -> None:
    codec = Codec(small, tables=tmp_path / "tables", student=student)
    blob = codec.encode(ids_of(small))
    codec.keep(blob)
    name = container.read(blob).model.hex()
    with pytest.raises(UnknownModel, match=f"needs the model or table {name}"):
        Codec(small).decode(blob)
    copy = tmp_path / "tables" / f"student-{name}.gguf"
    data = bytearray(copy.read_bytes())
    data[-4000] ^= 1
    copy.write_bytes(data)
    with pytest.raises(UnknownModel, match=f"{copy}.* is damaged"):
        Codec(small, tables=tmp_path / "tables").decode(blob)


@pytest.mark.parametrize("with_the_tables_tokens", [False, True])
def test_its_blobs_stay_while_it_is_kept(
    small: GgufVocabulary, tmp_path: Path, student: Path, with_the_tables_tokens: bool
) -> None:
    """A student that is no longer set is read from its copy; without that, its blobs are due."""
    if with_the_tables_tokens:
        student.write_bytes(mini.PATH.read_bytes() + b"\0")
    tables = tmp_path / "tables"
    codec = Codec(small, tables=tables, student=student)
    blob = codec.encode(ids_of(small), form="student")
    assert codec.is_current(blob)
    assert not Codec(small, tables=tables).is_current(blob)
    codec.keep(blob)
    assert Codec(small, tables=tables).is_current(blob)
    (copy,) = tables.glob("student-*.gguf")
    copy.unlink()
    assert not Codec(small, tables=tables).is_current(blob)


def test_a_replaced_file_is_not_kept(small: GgufVocabulary, tmp_path: Path, student: Path) -> None:
    codec = Codec(small, tables=tmp_path / "tables", student=student)
    blob = codec.encode(ids_of(small))
    student.write_bytes(student.read_bytes() + b"\0")
    with pytest.raises(OSError, match="was replaced"):
        codec.keep(blob)


def test_one_of_the_tables_tokens_is_mixed_with_the_table(
    small: GgufVocabulary, tmp_path: Path
) -> None:
    """The mini model's weights under another name: as small as the bundled form, to the byte."""
    ids, student = ids_of(small), tmp_path / "other.gguf"
    student.write_bytes(mini.PATH.read_bytes() + b"\0")
    codec = Codec(small, tables=tmp_path / "tables", student=student)
    blob, bundled = (codec.encode(ids, form=form) for form in ("student", "network"))
    assert len(blob) == len(bundled)
    assert blob != bundled
    codec.keep(blob)
    assert sorted(path.name[:4] for path in (tmp_path / "tables").iterdir()) == ["mix-", "stud"]
    assert Codec(small, tables=tmp_path / "tables").decode(blob).tolist() == ids


def test_what_cannot_be_evaluated_is_refused_in_a_sentence(tmp_path: Path) -> None:
    qwen, big = tmp_path / "qwen.gguf", tmp_path / "big.gguf"
    make_random_gguf(qwen, Shape(1, 64, 4, 2, 128, 500, arch="qwen3"))
    with big.open("wb") as file:
        file.truncate((64 << 20) + 1)
    text = tmp_path / "text.gguf"
    text.write_text("no model")
    for path, why in (
        (qwen, "architecture is not llama"),
        (big, "at most 67108864"),
        (text, "does not start like a GGUF"),
        (tmp_path / "absent.gguf", "cannot be read"),
    ):
        with pytest.raises(UnknownModel, match=why) as refusal:
            check_student(path)
        assert str(path) in str(refusal.value)
