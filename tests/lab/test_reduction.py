"""`towerctl lab reduce`: a base without what a model finds nearly impossible."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from click.testing import Result
from daemon import Daemon
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from lab.commands.reduce import write
from towerd.cli.precache.spec import Prompt, load_spec

Ctl = Callable[..., Result]
CtlJson = Callable[..., Any]

PLATFORM = "Once upon a time there was a little girl named Lily."
PARK = " One day she went to the zyxqv park. The sun qqjxzb was shining."
BIRD = " She saw a bird, and the vbnkmw bird said hello."


@pytest.fixture
def spec(tmp_path: Path) -> Path:
    path = tmp_path / "SPEC.yaml"
    path.write_text(
        f"platform:\n  name: acme\n  text: '{PLATFORM}'\n  communities:\n"
        f"    - {{name: park, text: '{PARK}', bots: [{{name: bird, text: '{BIRD}'}}]}}\n"
    )
    return path


def test_what_is_left_is_precached_and_reused(
    spec: Path, server: Daemon, ctl: Ctl, ctl_json: CtlJson
) -> None:
    at, out = ("--socket", server.socket), spec.parent / "less.yaml"
    asked = ("lab", "reduce", spec, "--p-min", "acme/park=0.001", "--out", out, "-m", "stories")
    found = ctl_json(*asked)
    assert list(found) == ["acme/park"]
    less = found["acme/park"]
    assert less["p_min"] == 0.001
    assert 0 < less["symbols_lost"] < less["symbols"]
    assert less["tokens"] < less["tokens_before"]
    assert less["bytes"] < less["bytes_before"]
    texts = [prompt.text for prompt in load_spec(out).walk()]
    assert [texts[0], texts[2]] == [PLATFORM, BIRD]
    assert len(texts[1]) < len(PARK)
    assert is_left_of(texts[1], PARK)
    bases = ctl_json("precache", out, *at)["bases"]
    prompt = "".join(texts)
    assert len(server.post("/tokenize", {"content": prompt})["tokens"]) <= bases[2]["tokens"]
    timings = server.complete(prompt + " The end.")["timings"]
    assert timings["cache_n"] >= bases[2]["tokens"] - 1
    said = ctl(*asked).stdout  # the file is there, and the same
    assert f"acme/park: {less['symbols_lost']} of {less['symbols']} symbols left out" in said
    assert "must begin with the texts in" in said


def test_messages_keep_their_roles(tmp_path: Path, ctl_json: CtlJson) -> None:
    said = [
        {"role": "system", "content": "Lily likes to play zyxqv with a ball."},
        {"role": "user", "content": "Who likes to qqjxzb play?"},
    ]
    spec, out = tmp_path / "SPEC.yaml", tmp_path / "less.yaml"
    spec.write_text(f"platform:\n  name: a=b\n  messages: {said}\n")
    found = ctl_json("lab", "reduce", spec, "--p-min", "a=b=1e-3", "--out", out)
    assert found["a=b"]["symbols_lost"] > 0
    left = load_spec(out).messages
    assert [message["role"] for message in left] == ["system", "user"]
    for new, old in zip(left, said, strict=True):
        assert is_left_of(new["content"], old["content"])


def is_left_of(less: str, text: str) -> bool:
    """Whether `less` is `text` without some of its characters."""
    rest = iter(text)
    return all(char in rest for char in less)


@pytest.mark.parametrize(
    ("given_args", "problem"),
    [
        (("--p-min", "0.001"), "has no '='"),
        (("--p-min", "park=0.001"), "acme, acme/park, acme/park/bird"),
        (("--p-min", "acme=0"), "'0' is not a probability over 0"),
        (("--p-min", "acme=1"), "'1' is not a probability over 0"),
        (("--p-min", "acme=nan"), "'nan' is not a probability over 0"),
        (("--p-min", "acme=few"), "'few' is not a probability over 0"),
        (("--p-min", "acme=.1", "--p-min", "acme=.2"), "'acme' twice"),
        (("--p-min", "acme=0.9999999"), "nothing is left of it with p_min 1"),
    ],
)
def test_wrong_flags_write_nothing(
    spec: Path, ctl: Ctl, given_args: tuple[str, ...], problem: str
) -> None:
    out = spec.parent / "less.yaml"
    said = ctl("lab", "reduce", spec, *given_args, "--out", out, code=1)
    assert problem in said.stderr
    assert said.stderr.count("\n") == 1
    assert not out.exists()


def test_a_file_that_says_something_else_stays(spec: Path, ctl: Ctl) -> None:
    asked = ("lab", "reduce", spec, "--p-min", "acme/park=0.001", "--out")
    before = spec.read_bytes()
    assert "exists and is not what" in ctl(*asked, spec, code=1).stderr
    assert spec.read_bytes() == before
    assert "cannot be written" in ctl(*asked, spec.parent / "no" / "x", code=1).stderr


TEXTS = st.text(st.characters(codec="utf-8"), min_size=1, max_size=40)


@settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@example(texts=("\x85", " \u2028", "a\x85 b\r\n", "\x85"), public=False)
@given(texts=st.tuples(TEXTS, TEXTS, TEXTS, TEXTS), public=st.booleans())
def test_what_is_written_is_read_again(
    tmp_path: Path, texts: tuple[str, str, str, str], public: bool
) -> None:
    bots = Prompt("a/b/c", 2, False, 0, texts[2], (), ())
    chat = Prompt("m/n", 1, public, 0, "", ({"role": texts[0], "content": texts[3]},), ())
    module = Prompt("a/b/d", 2, public, 0, texts[3], (), (), None, True)
    below = Prompt("a/b", 1, public, 0, texts[1], (), (bots, module), "q6h")
    for root in (
        Prompt("a", 0, public, 0, texts[0], (), (below,)),
        Prompt("m", 0, public, 0, "", ({"role": "user", "content": texts[1]},), (chat,)),
    ):
        path = tmp_path / "out.yaml"
        path.unlink(missing_ok=True)
        write(path, root)
        found = list(load_spec(path).walk())
        assert [replace(p, line=0, children=()) for p in found] == [
            replace(p, children=()) for p in root.walk()
        ]
