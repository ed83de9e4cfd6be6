"""POST /v1/audio/transcriptions on the embedded engine: llama-server's words, for its own forms."""

from __future__ import annotations

import base64
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import requests
from daemon import Daemon
from hearing_model import make_hearing_projector, sound

from towerd.cli.bench.harness.servers import llama_server
from towerd.models.bundled import bundled_model

MakeDaemon = Callable[..., Daemon]
PATH = "/v1/audio/transcriptions"
N_EMBD_TEXT = 64
"""Of the bundled model."""
HEALTH_S_MAX = 1.0


def transcribe(url: str, data: bytes | None, path: str = PATH, **fields: str) -> requests.Response:
    files = {} if data is None else {"file": ("a.wav", data, "audio/wav")}
    form: dict[str, Any] = {"temperature": "0", "max_tokens": "8"} | fields
    names: Any = files or {"none": (None, "")}
    return requests.post(url + path, data=form, files=names, timeout=60)


def test_as_llama_server(make_daemon: MakeDaemon, tmp_path: Path) -> None:
    """Whole and streamed, with a prompt and a language; and what is refused, alike."""
    projector = tmp_path / "mmproj.gguf"
    make_hearing_projector(projector, N_EMBD_TEXT)
    exact = ("-ctk", "f32", "-ctv", "f32")
    flags = ("-c", "1024", "-t", "1", *exact, "--mmproj", str(projector))
    data = base64.b64decode(sound(1))
    with llama_server(bundled_model(), *flags, "-np", "1") as alone:
        with make_daemon(*flags, "--no-anticipate") as daemon:
            for fields in ({}, {"language": "de"}, {"prompt": "Listen: ", "stream": "true"}):
                wanted, said = (transcribe(url, data, **fields) for url in (alone.url, daemon.url))
                assert (wanted.status_code, said.status_code) == (200, 200), said.text
                assert said.headers["Content-Type"] == wanted.headers["Content-Type"]
                if "stream" in fields:
                    assert deltas(said.text) == deltas(wanted.text) != []
                else:
                    assert said.json()["text"] == wanted.json()["text"] != ""
                    assert tokens(said) == tokens(wanted)
            for upload, more in (
                (None, {}),
                (b"no sound", {}),
                (data, {"response_format": "srt"}),
                (data, {"max_tokens": "many"}),
            ):
                answers = [transcribe(url, upload, **more) for url in (alone.url, daemon.url)]
                assert [each.status_code for each in answers] == [400, 400], answers[1].text
            assert transcribe(daemon.url, data, "/audio/transcriptions").status_code == 200
            reply = requests.post(daemon.url + PATH, json={"file": "x"}, timeout=30)
            assert reply.status_code == 400
            others_are_served(daemon)


def deltas(stream: str) -> list[str]:
    """The events of a stream, without what counts and times."""
    return [line for line in stream.splitlines() if "transcript.text.delta" in line]


def tokens(reply: requests.Response) -> dict[str, Any]:
    usage = dict(reply.json()["usage"])
    del usage["input_tokens_details"]  # the second server is asked what the first was
    return usage


def others_are_served(daemon: Daemon) -> None:
    """While forms arrive that take as long to read as forms can."""
    head = b'--b\r\nContent-Disposition: form-data; name="file"; filename="a"\r\n\r\n'
    hostile = (
        head + b"\r\n--" * (15 << 20),
        head + b"\x00" * (60 << 20) + b"\r\n--b--",
        b"--b\r\n" + b"a: b\r\n" * (10 << 20),
        b'--b\r\nContent-Disposition: form-data; name="x"\r\n\r\n\r\n' * (1 << 20),
    )
    content_type = {"Content-Type": "multipart/form-data; boundary=b"}

    def send(body: bytes) -> int:
        return requests.post(
            daemon.url + PATH, data=body, headers=content_type, timeout=60
        ).status_code

    with ThreadPoolExecutor(1) as pool:
        for body in hostile:
            sent = pool.submit(send, body)
            worst = 0.0
            while not sent.done():
                began = time.monotonic()
                daemon.get("/health")
                worst = max(worst, time.monotonic() - began)
            assert sent.result() == 400
            assert worst < HEALTH_S_MAX


def test_a_model_without_ears(make_daemon: MakeDaemon) -> None:
    with make_daemon("-c", "512") as daemon:
        reply = transcribe(daemon.url, b"x")
        assert reply.status_code in (400, 501)
        assert "does not support audio input" in reply.json()["error"]["message"]
