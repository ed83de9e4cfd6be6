"""A daemon that stores its conversations in fewer bits: what a person sees of it."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import requests
from click.testing import CliRunner
from daemon import Daemon, reuse_of

from towerd.cli.main import towerctl

MakeDaemon = Callable[..., Daemon]
SHRINKING = ("--level-formats", "0=q4h,1=q8h", "--shrink-after", "0")
STORY = "Once upon a time there was a bird. It was small and red. It had a friend. " * 6


def wait_until_shrunk(daemon: Daemon, n: int = 1) -> dict[str, Any]:
    """Until nothing is left to be put into another format; the tiers' stats."""
    deadline = time.monotonic() + 20
    while True:
        tiers = daemon.get("/towerd/v1/stats")["tiers"]
        if tiers["segments_shrunk"] >= n and tiers["unwritten_segments"] == 0:
            assert isinstance(tiers, dict)
            return tiers
        assert time.monotonic() < deadline, tiers
        time.sleep(0.02)


def test_a_shrunk_session_goes_on(make_daemon: MakeDaemon) -> None:
    """After a restart its past comes from the stored format: the reply says for how many tokens,
    and so do segments, stats and metrics."""
    for name, flags in (("native", ("--fidelity", "exact")), ("shrunk", SHRINKING)):
        with make_daemon(*flags, name=name) as daemon:
            ids = daemon.post("/tokenize", {"content": STORY, "add_special": True})["tokens"]
            ids += daemon.complete(ids, 16)["tokens"]
            if name == "shrunk":
                stats = wait_until_shrunk(daemon)
                assert 0 < stats["warm_quantized_bytes"] < stats["warm_bytes"]
                assert stats["level_formats"] == "0=q4h,1=q8h"
            daemon.stop()
            daemon.start()
            body = {"prompt": ids, "n_predict": 16, "temperature": 0, "ignore_eos": True}
            reply = requests.post(daemon.url + "/completion", json=body, timeout=60)
            assert len(reply.json()["content"]) > 0
            reuse = reuse_of(reply.headers)
            assert reuse["warm"] >= len(ids) - 2
            assert reuse["prefill"] <= 2
            if name == "native":
                assert "approx" not in reuse
                continue
            assert len(ids) - 128 - 8 <= reuse["approx"] <= len(ids) - 128
            check_listed(daemon)
            assert daemon.stop() == 0
        with daemon.stored() as store:
            assert not all(file.is_native for file in store.files())


def check_listed(daemon: Daemon) -> None:
    """Segments, their command, and metrics name the format."""
    segments = daemon.get("/towerd/v1/segments")["segments"]
    formats = {each["format"] for each in segments if each["format"]}
    assert "native+q8h" in formats
    found = CliRunner().invoke(
        towerctl, ["segments", "ls", "--json", "--socket", str(daemon.socket)]
    )
    listed = json.loads(found.output)["segments"]  # rows of the last reply may come in between
    assert {each["format"] for each in listed if each["format"]} >= formats
    table = CliRunner().invoke(towerctl, ["segments", "ls", "--socket", str(daemon.socket)])
    assert "FORMAT" in table.output
    assert "q8h" in table.output
    one = segments[0]["id"]
    shown = CliRunner().invoke(
        towerctl, ["segments", "show", str(one), "--socket", str(daemon.socket)]
    )
    assert re.search(rf"^format +{re.escape(segments[0]['format'])}$", shown.output, re.MULTILINE)
    metrics = requests.get(daemon.url + "/metrics", timeout=10).text
    assert "towerd_segments_shrunk_total" in metrics
    line = next(
        text for text in metrics.splitlines() if text.startswith("towerd_warm_quantized_bytes ")
    )
    assert float(line.split()[1]) > 0


def test_bases_with_a_format_of_their_own(make_daemon: MakeDaemon, tmp_path: Path) -> None:
    """The precache file says it, the bases show it, the rows are kept so."""
    spec = tmp_path / "bases.yaml"
    spec.write_text(
        f"platform:\n  name: p\n  format: q6h\n  text: '{STORY}'\n"
        f"  communities:\n    - name: c\n      fidelity: exact\n      text: '{STORY}'\n"
    )
    with make_daemon(*SHRINKING) as daemon:
        socket = ("--socket", str(daemon.socket))
        first = CliRunner().invoke(towerctl, ["precache", str(spec), "--json", *socket])
        assert first.exit_code == 0, first.output
        wait_until_shrunk(daemon)
        bases = daemon.get("/towerd/v1/bases")["bases"]
        assert [(each["name"], each["format"]) for each in bases] == [
            ("p", "q6h"),
            ("p/c", "native"),
        ]
        kept = {each["segment"]: each["name"] for each in bases}
        shown = daemon.get("/towerd/v1/segments")["segments"]
        formats = {kept[each["id"]]: each["format"] for each in shown if each["id"] in kept}
        # what was just computed is in RAM as computed; the disk has the format
        assert formats["p/c"] == "native"
        again = CliRunner().invoke(towerctl, ["precache", str(spec), "--json", *socket])
        assert {each["status"] for each in json.loads(again.output)["bases"]} == {"unchanged"}
        assert daemon.stop() == 0
        with daemon.stored() as store:
            (platform,) = [node for node in store.nodes() if node.id == bases[0]["segment"]]
            assert platform.file is not None
            assert {run.format for run in platform.file.runs} == {"native", "q6h"}
        daemon.flags = (*SHRINKING[:2],)
        daemon.start()
        spec.write_text(spec.read_text().replace("format: q6h", "format: native"))
        changed = CliRunner().invoke(towerctl, ["precache", str(spec), "--json", *socket])
        report = json.loads(changed.output)["bases"]
        assert [each["status"] for each in report] == ["changed", "unchanged"]
        assert report[0]["format"] == "native"


def test_bad_formats_are_told(make_daemon: MakeDaemon) -> None:
    """By the API as by the command line."""
    with make_daemon() as daemon:
        body: dict[str, Any] = {"name": "b", "prompt": "Once", "format": "q9"}
        reply = daemon.post("/towerd/v1/precache", body, 400)
        assert "'q9' is not a stored format" in reply["error"]["message"]
        body["format"] = 4
        assert "format" in daemon.post("/towerd/v1/precache", body, 400)["error"]["message"]
