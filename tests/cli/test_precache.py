"""towerctl precache with the real engine: in its own process and through a daemon."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import Result
from daemon import Daemon

Ctl = Callable[..., Result]
CtlJson = Callable[..., Any]

PLATFORM = "Once upon a time there was a little girl named Lily."
PARK = "\nOne day she went to the park. "
BIRD = "She saw a bird, and the bird said hello."
HOME = " She liked to stay at home."


@pytest.fixture
def spec(tmp_path: Path) -> Path:
    (tmp_path / "bird.txt").write_text(BIRD)
    path = tmp_path / "SPEC.yaml"
    path.write_text(
        "platform:\n"
        "  name: acme\n"
        "  public: true\n"
        f"  text: {PLATFORM}\n"
        "  communities:\n"
        f'    - {{name: park, text: "{PARK}", bots: [{{name: bird, file: bird.txt}}]}}\n'.replace(
            PARK, PARK.replace("\n", "\\n")
        )
        + f'    - {{name: home, text: "{HOME}", public: false}}\n'
    )
    return path


def test_without_a_daemon_then_with_one(
    spec: Path, tmp_path: Path, ctl: Ctl, ctl_json: CtlJson
) -> None:
    """What the command stored by itself, a daemon reuses down to the last token of each base."""
    store = ("--store-dir", tmp_path / "d" / "store")
    said = ctl("precache", spec, *store)
    assert "loading the default model for this command" in said.stderr
    assert "4 of 4 bases were evaluated" in said.stdout
    again = ctl_json("precache", spec, *store)
    assert [base["status"] for base in again["bases"]] == ["unchanged"] * 4
    assert ctl_json("verify", *store)["ok"]
    tokens = {base["name"]: base["tokens"] for base in again["bases"]}
    with Daemon(tmp_path / "d") as server:
        at = ("--socket", server.socket)
        assert ctl_json("precache", spec, *at)["bases"] == again["bases"]
        timings = server.complete(PLATFORM + PARK + BIRD + " The end.")["timings"]
        assert timings["cache_n"] >= tokens["acme/park/bird"] - 1
        timings = server.complete(PLATFORM + HOME + " The end.")["timings"]
        assert timings["cache_n"] >= tokens["acme/home"] - 1


def test_a_parents_tokens_begin_its_childrens(
    spec: Path, server: Daemon, ctl: Ctl, ctl_json: CtlJson
) -> None:
    at = ("--socket", server.socket)
    bases = ctl_json("precache", spec, *at)["bases"]
    paths = {}
    for base in bases:
        segment = ctl_json("segments", "show", base["segment"], *at)
        paths[base["name"]] = segment["path"]
        assert segment["p1"] == base["tokens"]
        assert segment["pinned"]
        assert segment["scope"] == ("public" if base["public"] else "local")
    for name, path in paths.items():
        parent = name.rpartition("/")[0]
        if parent:
            assert path[: len(paths[parent])] == paths[parent]
            assert len(path) > len(paths[parent])
    prefilled = sum(base["reuse"]["prefill"] for base in bases)
    assert prefilled < sum(base["tokens"] for base in bases) / 2
    whole = server.post("/tokenize", {"content": PLATFORM + PARK + BIRD, "add_special": True})
    assert (
        len(whole["tokens"]) == {base["name"]: base["tokens"] for base in bases}["acme/park/bird"]
    )


def test_only_what_changed_is_evaluated(
    spec: Path, server: Daemon, ctl: Ctl, ctl_json: CtlJson
) -> None:
    at = ("--socket", server.socket)
    dry = ctl_json("precache", spec, "--dry-run", *at)
    assert [base["status"] for base in dry["bases"]] == ["new"] * 4
    assert ctl_json("pin", *at)["bases"] == []
    ctl("precache", spec, *at)
    (spec.parent / "bird.txt").write_text(BIRD + " Hello, bird.")
    before = ctl_json("pin", *at)["bases"]
    dry = ctl_json("precache", spec, "--dry-run", *at)
    assert [base["status"] for base in dry["bases"]] == [*["unchanged"] * 2, "changed", "unchanged"]
    assert "1 of 4 bases would be evaluated" in ctl("precache", spec, "--dry-run", *at).output
    assert ctl_json("pin", *at)["bases"] == before
    assert "1 of 4 bases were evaluated" in ctl("precache", spec, *at).output
    assert "0 of 4 bases were evaluated" in ctl("precache", spec, *at).output
    assert ctl_json("unpin", "--base", "acme/home", *at)["base"] == "acme/home"
    assert len(ctl_json("pin", *at)["bases"]) == 3


def test_messages_match_chat_requests(
    tmp_path: Path, server: Daemon, ctl: Ctl, ctl_json: CtlJson
) -> None:
    path = tmp_path / "SPEC.yaml"
    path.write_text(
        "platform:\n  name: a\n  messages: [{role: system, content: Lily likes stories.}]\n"
        "  communities:\n    - name: b\n      messages:\n"
        "        - {role: user, content: 'Who likes stories?'}\n"
        "        - {role: assistant, content: Lily does.}\n"
    )
    at = ("--socket", server.socket)
    bases = ctl_json("precache", path, *at)["bases"]
    messages = [
        {"role": "system", "content": "Lily likes stories."},
        {"role": "user", "content": "Who likes stories?"},
        {"role": "assistant", "content": "Lily does."},
        {"role": "user", "content": "And the cat?"},
    ]
    reply = server.post("/v1/chat/completions", {"messages": messages, "max_tokens": 3})
    cached = reply["usage"]["prompt_tokens_details"]["cached_tokens"]
    assert cached >= bases[1]["tokens"] - 1 > bases[0]["tokens"]


def test_what_the_model_refuses_names_the_line(
    tmp_path: Path, server: Daemon, ctl: Ctl, ctl_json: CtlJson
) -> None:
    at = ("--socket", server.socket)
    path = tmp_path / "SPEC.yaml"
    path.write_text(
        "platform:\n  name: a\n  text: Hello.\n  communities:\n"
        f"    - {{name: ok, text: Yes.}}\n    - {{name: long, text: {'word ' * 600}}}\n"
    )
    said = ctl("precache", path, *at, code=1).output
    assert f"{path}:6: 'a/long': " in said
    assert "tokens do not fit the context of 512" in said
    assert ctl_json("pin", *at)["bases"] == []


def test_the_daemons_model_is_the_one_asked_for(
    spec: Path, tmp_path: Path, server: Daemon, ctl: Ctl
) -> None:
    at = ("--socket", server.socket)
    (tmp_path / "other.gguf").write_bytes(b"GGUF")
    said = ctl("precache", spec, "-m", tmp_path / "other.gguf", *at, code=1).output
    assert "serves" in said
    assert "other.gguf" in said
    assert "--ctx-size would change nothing" in ctl("precache", spec, "-c", 64, *at, code=1).output


@pytest.mark.parametrize("data", [b"", b"not a model", b"GGUF\3\0\0\0"])
def test_a_model_that_does_not_load(data: bytes, spec: Path, tmp_path: Path, ctl: Ctl) -> None:
    model = tmp_path / "bad.gguf"
    model.write_bytes(data)
    said = ctl("precache", spec, "-m", model, "--store-dir", tmp_path / "store", code=1)
    assert str(model) in said.stderr.splitlines()[-1]


def test_a_store_in_use_is_refused(spec: Path, server: Daemon, ctl: Ctl) -> None:
    said = ctl("precache", spec, "--store-dir", server.store_dir, code=1).output
    assert f"is in use by process {server.pid}" in said
