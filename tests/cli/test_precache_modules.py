"""Modules (`reuse: anywhere`) from precaching to use."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import requests
from click.testing import Result
from daemon import Daemon

Ctl = Callable[..., Result]
CtlJson = Callable[..., Any]

STORY = (
    "Once upon a time there was a bird. It was small and red. It had a friend named Tom. "
    "They liked to play in the park. One day, the bird saw a big tree. It was so tall. "
    "Tom was scared of the tree, but he wanted to help his friend."
)


@pytest.fixture
def spec(tmp_path: Path) -> Path:
    path = tmp_path / "SPEC.yaml"
    path.write_text(
        "platform:\n  name: acme\n  public: true\n  text: Lily likes stories.\n  communities:\n"
        f"    - {{name: story, reuse: anywhere, recompute: 20, text: '{STORY}'}}\n"
        "    - {name: park, text: ' She is in the park.'}\n"
    )
    return path


def test_from_the_file_to_the_reply(
    spec: Path, tmp_path: Path, ctl: Ctl, ctl_json: CtlJson
) -> None:
    """Measured when it is precached, here without a daemon; found in prompts of a daemon."""
    store = ("--store-dir", tmp_path / "d" / "store")
    dry = ctl_json("precache", spec, "--dry-run", *store)["bases"]
    assert dry[1]["module"]["kl"] is None
    said = ctl("precache", spec, *store).stdout
    assert all(column in said for column in ("DRIFT KL", "NOISE", "EXCESS"))
    again = ctl_json("precache", spec, *store)["bases"]
    assert [base["status"] for base in again] == ["unchanged"] * 3
    assert [base["module"] is None for base in again] == [True, False, True]
    module = again[1]["module"]
    assert module["tokens"] == again[1]["tokens"]
    assert module["recomputed"] >= round(module["tokens"] * 0.2)
    assert f"{module['recomputed']:,} ({module['recomputed'] / module['tokens']:.0%})" in said
    assert 0 < module["kl"] - module["floor_kl"] <= 0.002
    assert (module["fidelity"], module["spliced"]) == ("near", True)
    with Daemon(tmp_path / "d") as server:
        at = ("--socket", server.socket)
        assert ctl_json("precache", spec, *at)["bases"] == again
        prompt = f"Lily has a book. She reads: {STORY} What did the bird see?"
        body: Any = {"prompt": prompt, "n_predict": 4, "temperature": 0, "stream": True}
        reply = requests.post(server.url + "/completion", json=body, timeout=60)
        n_kept = module["tokens"] - module["recomputed"]
        assert f"approx={n_kept}" in reply.headers["X-Towerd-Reuse"]
        lines = [line for line in reply.text.splitlines() if '"towerd"' in line]
        last = json.loads(lines[-1].removeprefix("data: "))
        drift = {"kl": module["kl"], "floor_kl": module["floor_kl"]}
        assert last["towerd"]["drift"] == pytest.approx(drift)
        assert last["towerd"]["reuse"]["approximate"] == n_kept
        assert last["timings"]["cache_n"] >= n_kept
        spec.write_text(spec.read_text().replace("recompute: 20", "recompute: 30"))
        status = [base["status"] for base in ctl_json("precache", spec, *at)["bases"]]
        assert status == ["unchanged", "changed", "unchanged"]
        spec.write_text(spec.read_text().replace("reuse: anywhere, recompute: 30, ", ""))
        status = [base["status"] for base in ctl_json("precache", spec, *at)["bases"]]
        assert status == ["unchanged", "changed", "unchanged"]
        assert server.stop() == 0
    with server.stored() as opened:
        assert all(base.module is None for base in opened.bases.listing())


def test_another_fidelity_measures_again_and_may_refuse(
    spec: Path,
    tmp_path: Path,
    ctl: Ctl,
    ctl_json: CtlJson,
    random_models: Callable[[str], Path],
) -> None:
    """What is spliced under one bound is not trusted under another."""
    spec.write_text(spec.read_text().replace("recompute: 20", "recompute: 0"))
    store = ("--store-dir", tmp_path / "store")
    small = tmp_path / "small.toml"
    small.write_text('fidelity = "small"\n')
    first = ctl_json("precache", spec, *store, "--config", small)["bases"][1]["module"]
    assert (first["fidelity"], first["spliced"]) == ("small", True)
    strict = ctl_json("precache", spec, *store)["bases"]
    assert [base["status"] for base in strict] == ["unchanged", "changed", "unchanged"]
    module = strict[1]["module"]
    assert module["fidelity"] == "near"
    assert module["recomputed"] > first["recomputed"]
    assert "not spliced" not in ctl("precache", spec, *store).stdout
    # random weights attend to everything: even the last share leaves it beyond the bound
    random = ("--model", random_models("llama"), "--store-dir", tmp_path / "random")
    said = ctl("precache", spec, *random).stdout
    assert "acme/story is not spliced in: its drift is" in said
    assert "--fidelity near allows 0.0020" in said


def test_what_cannot_be_a_module(server: Daemon) -> None:
    """By the API; the file's errors are test_spec's."""

    def refused(status: int = 400, **fields: Any) -> str:
        body = {"name": "m", "prompt": STORY, "reuse": "anywhere", **fields}
        message = server.post("/towerd/v1/precache", body, status)["error"]["message"]
        assert isinstance(message, str)
        return message

    assert "at least 32 tokens" in refused(prompt="Once upon a time.")
    assert "at least 32 tokens" in refused(prompt=[5] * 31)
    assert "needs room for text around it" in refused(prompt=[5] * 440)
    assert "'recompute'" in refused(recompute=100)
    assert "'recompute'" in refused(recompute="5")
    assert "'reuse' must be" in refused(reuse="nowhere")
    assert "'recompute' belongs" in refused(reuse="prefix", recompute=5)
    assert "not 'messages'" in refused(prompt=None, messages=[{"role": "user", "content": "x"}])
    assert server.get("/towerd/v1/bases")["bases"] == []


def test_models_and_daemons_that_splice_nothing(
    spec: Path, tmp_path: Path, ctl: Ctl, random_models: Callable[[str], Path]
) -> None:
    """The reason is told in a sentence."""
    store = ("--store-dir", tmp_path / "store")
    said = ctl("precache", spec, *store, "--model", random_models("qwen2vl"), code=1).stderr
    assert "cannot be spliced: positions have more than one component" in said
    windowed = random_models("gemma3")
    said = ctl("calibrate", *store, "--model", windowed, code=1).stderr
    assert "nothing to calibrate: it has sliding-window layers" in said
    said = ctl("bench", "quality", "--model", windowed, code=1).stderr
    assert "nothing to measure: it has sliding-window layers" in said
    config = tmp_path / "t.toml"
    config.write_text('fidelity = "exact"\n')
    said = ctl("precache", spec, *store, "--config", config, code=1).stderr
    assert "--fidelity exact" in said


@pytest.fixture
def random_models(tmp_path: Path, ctl: Ctl) -> Callable[[str], Path]:
    def make(arch: str) -> Path:
        path = tmp_path / f"{arch}.gguf"
        ctl("model", "random", path, "--arch", arch, "--json")
        return path

    return make
