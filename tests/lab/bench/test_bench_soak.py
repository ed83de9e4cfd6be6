"""`bench soak`: its requests, its figures, and how it ends if the daemon does not answer."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable

import pytest
from click.testing import Result

from lab.bench import soak
from lab.bench.processes import vitals
from lab.bench.soak import FAILURES_MAX, SoakSample, new_load, slope, thinned
from towerd.cli.bench.harness.servers import ServerProcess
from towerd.engine.llama_server.process.process import free_port

HANGING = """
import sys, time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

class Handler(BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.end_headers()
        self.wfile.write(b'{"store": {"segments": 3}, "tiers": {}, "ram": {}}')

    def do_POST(self):
        time.sleep(600)

    def log_message(self, *args):
        pass

ThreadingHTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
"""
"""Answers /health, but no other request."""


def hanging() -> ServerProcess:
    port = free_port()
    return ServerProcess([sys.executable, "-c", HANGING, str(port)], port=port, env={})


def sample(done: int, rss_mb: float) -> SoakSample:
    return SoakSample(float(done), done, rss_mb, 9, 3, 0.0, 0.0, done)


def test_the_command(ctl: Callable[..., Result], monkeypatch: pytest.MonkeyPatch) -> None:
    """A short run has the expected figures, and they are plausible."""
    monkeypatch.setattr(soak, "REQUESTS_QUICK", 40)
    ran = ctl("bench", "soak", "--quick", "--ram-max", "400M")
    found = json.loads(ran.stdout.splitlines()[-1])
    assert (found["done"], found["failed"]) == (40, 0)
    assert 0 < found["left_early"] < 20
    assert 0 < found["rss_mb_start"] <= found["rss_mb_max"] < 1000
    assert found["fds_max"] > 3
    assert found["threads_max"] > 1
    assert found["segments"] > 40
    assert 0.1 < found["ram_of_max"] <= 1
    assert 0 < found["hot_mb_max"] < 33.6
    assert found["samples"][0]["done"] == 0
    assert found["samples"][-1]["done"] == 40
    assert set(found["missed"]) == {"hot_evictions", "warm_evictions"}


def test_the_load() -> None:
    """Most prompts are like no other; some share a beginning with one that was answered."""
    load = new_load(400)
    prompts = []
    for request in load.requests:
        prompts.append(request.prompt)
        load.recent.append(request.prompt + " and that was all")
    assert len(set(prompts)) > 390
    firsts = {prompt.split()[0] for prompt in prompts}
    assert 200 < len(firsts) < 300
    assert max(len(prompt.split()) for prompt in prompts) <= soak.WORDS[1]


@pytest.mark.parametrize(
    ("key", "fields"),
    [
        ("rss_kb_per_request", {"rss_mb": 0.02}),
        ("fds_more", {"fds": 0.01}),
        ("threads_more", {"threads": 0.01}),
    ],
)
def test_growth_is_judged(key: str, fields: dict[str, float]) -> None:
    """What grows with every request misses its target; what is flat meets it."""
    for growth, missed in (({}, []), (fields, [key])):
        load = new_load(1)
        load.done = 2000
        load.samples = [
            SoakSample(
                float(n),
                n,
                100.0 + n * growth.get("rss_mb", 0),
                round(9 + n * growth.get("fds", 0)),
                round(3 + n * growth.get("threads", 0)),
                0.0,
                0.0,
                n,
            )
            for n in range(0, 2001, 100)
        ]
        stats = {"hot_evictions": 1, "warm_evictions": 1}
        assert soak.report_of("m", load, stats, 1.0).as_json()["missed"] == missed


async def test_a_daemon_that_does_not_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    """The run ends after a few failures, and says which."""
    monkeypatch.setattr(soak, "ANSWER_S_MAX", 0.2)
    load = new_load(1000)
    with hanging() as server:
        await soak.press(server, load)
    report = soak.report_of("m", load, {}, 1.0)
    assert FAILURES_MAX <= report.figures["failed"] < FAILURES_MAX + soak.CLIENTS
    assert report.figures["done"] == 0
    assert "no answer within" in report.figures["stopped"]
    assert "failed" in report.as_json()["missed"]


async def test_a_daemon_that_takes_too_much(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is stopped before the machine is."""
    monkeypatch.setattr(soak, "RSS_MB_MAX", 1)
    load = new_load(1000)
    with hanging() as server:
        await soak.press(server, load)
        assert vitals(server) is None
    assert "MB" in load.stopped


def test_growth() -> None:
    """The slope is per request, and the samples that are shown are spread over the run."""
    samples = [sample(done, 100 + done / 50) for done in range(0, 1000, 7)]
    assert slope(samples) == pytest.approx(0.02)
    assert slope([sample(5, 1.0)] * 3) == 0.0
    shown = thinned(samples)
    assert (shown[0], shown[-1]) == (samples[0], samples[-1])
    assert len(shown) == soak.SAMPLES_SHOWN
    assert thinned(samples[:2]) == samples[:2]
