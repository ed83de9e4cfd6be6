"""The precache file: what it means, and that every problem names its line."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import Result
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from towerd.cli.precache.spec import SpecError, load_spec

GOOD = """\
platform:
  name: acme
  public: true
  text: |
    You are Acme's.
  communities:
    - name: garden
      file: garden.txt
      bots:
        - name: roses
          text: "Roses. "
        - {name: tulips, text: Tulips., public: false}
    - name: kitchen
      text: Cook.
      public: no
      bots:
        - name: roses
          text: "Jam: "
"""


def write(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "SPEC.yaml"
    path.write_text(text)
    return path


def test_a_tree_of_prompts(tmp_path: Path) -> None:
    (tmp_path / "garden.txt").write_bytes("Gärten.\r\n".encode())
    root = load_spec(write(tmp_path, GOOD))
    assert [(p.name, p.level, p.public, p.text) for p in root.walk()] == [
        ("acme", 0, True, "You are Acme's.\n"),
        ("acme/garden", 1, True, "Gärten.\r\n"),
        ("acme/garden/roses", 2, True, "Roses. "),
        ("acme/garden/tulips", 2, False, "Tulips."),
        ("acme/kitchen", 1, False, "Cook."),
        ("acme/kitchen/roses", 2, False, "Jam: "),
    ]
    assert [p.line for p in root.walk()] == [2, 7, 10, 12, 13, 17]


def test_formats_belong_to_one_prompt(tmp_path: Path) -> None:
    """A format, or exact fidelity, is not handed down."""
    text = GOOD.replace("  public: true\n", "  public: true\n  format: q6h\n")
    text = text.replace("      text: Cook.\n", "      text: Cook.\n      fidelity: exact\n")
    (tmp_path / "garden.txt").write_text("x")
    root = load_spec(write(tmp_path, text))
    assert [(p.name, p.format) for p in root.walk() if p.format] == [
        ("acme", "q6h"),
        ("acme/kitchen", "native"),
    ]


def test_texts_that_stand_anywhere(tmp_path: Path) -> None:
    """`reuse: anywhere` is not handed down; `recompute`, which was beside it once, is read."""
    text = GOOD.replace('text: "Roses. "', 'text: "Roses. "\n          reuse: anywhere')
    text = text.replace("text: Tulips.", "text: Tulips., reuse: anywhere, recompute: 2.5")
    (tmp_path / "garden.txt").write_text("x")
    root = load_spec(write(tmp_path, text))
    names = [prompt.name for prompt in root.walk() if prompt.anywhere]
    assert names == ["acme/garden/roses", "acme/garden/tulips"]


def test_messages_continue_messages(tmp_path: Path) -> None:
    root = load_spec(
        write(
            tmp_path,
            "platform:\n  name: a\n  messages:\n    - {role: system, content: Hi}\n"
            "  communities:\n    - name: b\n      messages: [{role: user, content: '1'}]\n"
            "    - name: c\n      text: and so on\n",
        )
    )
    assert root.messages == ({"role": "system", "content": "Hi"},)
    assert [child.messages for child in root.children] == [({"role": "user", "content": "1"},), ()]


A = "platform:\n  name: a\n  text: x\n"
PROBLEMS = [
    ("", "1: empty; it needs the key 'platform'"),
    ("# nothing\n", "1: empty; it needs the key 'platform'"),
    ("- a\n", "1: the file must be a mapping with the keys 'platform'"),
    ("plattform: {}\n", "1: unknown key 'plattform', did you mean 'platform'?"),
    ("platform: hello\n", "1: the platform must be a mapping"),
    ("platform:\n  name: a\n  txt: x\n", "3: unknown key 'txt', did you mean 'text'?"),
    (
        "platform:\n  name: a\n  text: x\n  zzz: 1\n",
        "4: unknown key 'zzz', the platform has 'name'",
    ),
    ("platform:\n  text: x\n", "2: the platform has no 'name'"),
    ("platform:\n  name: a\n", "2: the platform needs one of 'text', 'file', 'messages', has none"),
    (
        A + "  file: f\n",
        "4: the platform needs one of 'text', 'file', 'messages', has 'text' and 'f",
    ),
    ("platform:\n  name: a\n  file: no.txt\n", "3: cannot read "),
    ("platform:\n  name: a\n  file: bin\n", "3: cannot read "),
    ('platform:\n  name: a\n  file: "\\0"\n', "3: cannot read "),
    ("platform:\n  name: a\n  text: 12\n", "3: 'text' must be text; put it in quotes"),
    ("platform:\n  name: a\n  text:\n", "3: 'text' must be text"),
    ("platform:\n  name: a\n  text: ''\n", "3: 'text' is empty"),
    ("platform:\n  name: a\n  text: [x]\n", "3: 'text' must be text"),
    ("platform:\n  name: a/b\n  text: x\n", "2: 'name' must be printable text without '/'"),
    ("platform:\n  name: ' '\n  text: x\n", "2: 'name' must be printable text without '/'"),
    (f"platform:\n  name: {'n' * 201}\n  text: x\n", "2: 'name' is too long"),
    (A + "  text: y\n", "4: 'text' stands here twice"),
    (A + "  public: maybe\n", "4: 'public' must be true or false"),
    (A + "  bots: []\n", "4: unknown key 'bots'"),
    (A + "  format: q9\n", "4: 'format': 'q9' is not a stored format"),
    (A + "  format: q8_0\n", "4: 'format': 'q8_0' is not a stored format"),
    (A + "  format: 4\n", "4: 'format' must be text; put it in quotes"),
    (A + "  fidelity: near\n", "4: 'fidelity' must be exact"),
    (A + "  format: q4h\n  fidelity: exact\n", "5: 'fidelity' beside 'format'"),
    (A + "  communities: x\n", "4: 'communities' must be a list"),
    (A + "  communities:\n    - x\n", "5: a community must be a mapping"),
    (
        A + "  communities:\n    - {name: b, text: x}\n    - name: b\n      text: y\n",
        "6: the name 'b' is taken already, in line 5",
    ),
    (
        A + "  communities: [{name: b, text: x, public: true}]\n",
        "4: public below 'a', which is not",
    ),
    (
        A + "  communities: [{name: b, messages: [{role: user, content: x}]}]\n",
        "4: 'messages' cannot continue the text of 'a'",
    ),
    (A + "  reuse: everywhere\n", "4: 'reuse' must be prefix or anywhere"),
    (A + "  reuse: true\n", "4: 'reuse' must be text; put it in quotes"),
    (
        A + "  reuse: anywhere\n  communities: [{name: b, text: x}]\n",
        "5: 'communities' beside reuse: anywhere: it is a text of its own",
    ),
    (
        A + "  communities: [{name: b, reuse: anywhere, messages: [{role: user, content: x}]}]\n",
        "4: 'messages' beside reuse: anywhere: it is a text of its own",
    ),
    ("platform:\n  name: a\n  messages: []\n", "3: 'messages' must be a list of messages"),
    ("platform:\n  name: a\n  messages: [{role: user}]\n", "3: a message needs 'content'"),
    ("platform:\n  name: a\n  messages: [{role: 1, content: x}]\n", "3: 'role' must be text"),
    ("platform:\n\tname: a\n", "2: not valid YAML"),
    ("platform: {name: a\n", "2: not valid YAML"),
    ("platform: *nowhere\n", "1: not valid YAML: found undefined alias"),
    ("platform: \x07\n", "1: a character that YAML does not allow"),
    ("a: 1\n---\nb: 2\n", "2: not valid YAML"),
    ("platform: " + "[" * 5000, "1: nested too deeply"),
    (
        A + "  communities: &c\n    - {name: b, text: x, bots: *c}\n",
        "5: unknown key 'bots', a bot has",
    ),
    (
        A + "  communities: [{name: b, text: x}, {name: b, text: y}]\n",
        "4: the name 'b' is taken already, in line 4",
    ),
]


@pytest.mark.parametrize(("text", "problem"), PROBLEMS)
def test_every_problem_names_its_line(tmp_path: Path, text: str, problem: str) -> None:
    (tmp_path / "bin").write_bytes(b"\xff\xfe")
    path = write(tmp_path, text)
    with pytest.raises(SpecError) as caught:
        load_spec(path)
    assert f"{path}:{problem}" in caught.value.message


def test_all_problems_are_told_at_once_in_order(tmp_path: Path) -> None:
    path = write(tmp_path, "platform:\n  nam: a\n  text: 1\n  communities:\n    - {name: 7}\n")
    with pytest.raises(SpecError) as caught:
        load_spec(path)
    lines = [line.removeprefix(f"{path}:") for line in caught.value.message.splitlines()]
    assert [line.partition(":")[0] for line in lines] == ["2", "2", "3", "5", "5"]


def test_not_utf8_names_the_line(tmp_path: Path) -> None:
    path = tmp_path / "SPEC.yaml"
    path.write_bytes(b"platform:\n  name: \xff\n")
    with pytest.raises(SpecError, match=":2: not UTF-8 text"):
        load_spec(path)


def test_a_missing_file_is_one_sentence(tmp_path: Path, ctl: Callable[..., Result]) -> None:
    result = ctl("precache", tmp_path / "no.yaml", code=1)
    assert (
        result.output == f"Error: Cannot read {tmp_path / 'no.yaml'}: No such file or directory.\n"
    )


def test_a_wrong_file_starts_nothing(tmp_path: Path, ctl: Callable[..., Result]) -> None:
    path = write(tmp_path, "platform:\n  name: a\n  txt: x\n")
    result = ctl("precache", path, "--store-dir", tmp_path / "store", code=1)
    assert f"Error: {path}:2: the platform needs one of" in result.output
    assert f"\n{path}:3: unknown key 'txt', did you mean 'text'?\n" in result.output
    assert not (tmp_path / "store").exists()


JSONISH = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(["platform", "name", "text", "file", "messages", "communities", "bots"])
            | st.text(max_size=3),
            inner,
            max_size=4,
        )
    ),
    max_leaves=20,
)


@settings(
    deadline=None, max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(value=JSONISH)
def test_any_yaml_is_read_or_refused(tmp_path: Path, value: Any) -> None:
    """Never another exception than SpecError, and never one without a line."""
    import yaml

    path = write(tmp_path, yaml.safe_dump({"platform": value}, allow_unicode=True))
    try:
        load_spec(path)
    except SpecError as error:
        for line in error.message.splitlines():
            number = line.removeprefix(f"{path}:").partition(":")[0]
            assert number.isdigit(), line
