from __future__ import annotations

from pathlib import Path

import pytest
import zstandard
from train_world import write_records

from lab.texts.chat_records import read_records
from lab.train.data.manifest import read_manifest
from lab.train.data.records import FIRST_SENTENCE, read_dataset
from lab.train.errors import TrainError
from towerd.errors import TowerdError

SAID = [{"role": "user", "content": "hi"}]


def test_bundled_manifest_has_a_licence_for_everything() -> None:
    table = read_manifest()
    assert all(source.origin and source.licence for source in table.values())
    assert {source.kind for source in table.values()} == {"human", "assistant", "code", "task"}
    assert not any("SA" in source.licence.replace(".", "-").split("-") for source in table.values())


def test_every_record_is_in_one_split(data_folder: Path, manifest_file: Path) -> None:
    data = read_dataset(data_folder, read_manifest(manifest_file))
    files = ("train", "dev", "more")
    written = [r for name in files for r in read_records(data_folder / f"{name}.jsonl.zst")]
    both = [r for split in (data.train, data.dev) for rows in split.values() for r in rows]
    assert sorted(str(r) for r in both) == sorted(str(r) for r in written)
    assert set(data.train) == set(data.dev) == {"talk", "notes", "answers"}


def test_answers_that_begin_alike_stay_on_one_side(data_folder: Path, manifest_file: Path) -> None:
    data = read_dataset(data_folder, read_manifest(manifest_file))

    def firsts(split: dict[str, list[object]]) -> set[str]:
        found = set()
        for record in split["answers"]:
            match = FIRST_SENTENCE.match(record.messages[0].content)  # type: ignore[attr-defined]
            assert match
            found.add(match[0])
        return found

    train, dev = firsts(data.train), firsts(data.dev)  # type: ignore[arg-type]
    assert dev
    assert not train & dev


@pytest.mark.parametrize(
    ("records", "what"),
    [
        ([{"src": "talk/1"}], "line 1"),
        ([{"src": "talk/1", "messages": SAID}, {"src": "talk/2", "messages": ["hi"]}], "line 2"),
        ([{"src": "talk/1", "messages": [{"role": "user", "content": 3}]}], "line 1"),
        ([{"src": "talk/1", "messages": []}], "without messages"),
        ([{"src": "secret/1", "messages": SAID}], "manifest does not list"),
        ([{"src": "talk/1", "messages": SAID}], "for evaluation"),
    ],
)
def test_bad_records(tmp_path: Path, manifest_file: Path, records: list[object], what: str) -> None:
    """What is wrong is said with the file and the line."""
    write_records(tmp_path / "train.jsonl.zst", records)
    with pytest.raises(TowerdError, match=what) as caught:
        read_dataset(tmp_path, read_manifest(manifest_file))
    assert str(tmp_path) in caught.value.message


def test_nothing_to_read(tmp_path: Path, manifest_file: Path) -> None:
    for folder in (tmp_path, tmp_path / "none"):
        with pytest.raises(TrainError, match="holds no"):
            read_dataset(folder, read_manifest(manifest_file))


def test_damaged_file(tmp_path: Path, manifest_file: Path) -> None:
    (tmp_path / "train.jsonl.zst").write_bytes(b"no zstd")
    with pytest.raises(TowerdError, match="cannot be read"):
        read_dataset(tmp_path, read_manifest(manifest_file))
    (tmp_path / "train.jsonl.zst").write_bytes(zstandard.compress(b"{\n"))
    with pytest.raises(TowerdError, match="line 1"):
        read_dataset(tmp_path, read_manifest(manifest_file))


@pytest.mark.parametrize("text", ["[a]\norigin = 1\n", "no toml [", "", "[a]\norigin='x'\n"])
def test_bad_manifest(tmp_path: Path, text: str) -> None:
    path = tmp_path / "m.toml"
    path.write_text(text)
    with pytest.raises(TrainError):
        read_manifest(path)


def test_weights_are_positive(tmp_path: Path, manifest_file: Path) -> None:
    path = tmp_path / "m.toml"
    path.write_text(manifest_file.read_text().replace("weight = 2", "weight = 0"))
    with pytest.raises(TrainError, match="above 0"):
        read_manifest(path)
