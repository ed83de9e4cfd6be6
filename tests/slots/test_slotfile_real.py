"""Slot files of the real llama-server and of llama_state_seq_save_file."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sysconfig
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from whole_slot_file import parse_slot_file

from towerd.slots.errors import StateError
from towerd.slots.selftest import check_slot_file, self_test
from towerd.slots.slotfile import parse_tokens, token_section

Ids = npt.NDArray[np.int32]
SITE = Path(sysconfig.get_path("purelib"))
SERVER = SITE / "bin" / "llama-server"
SETUPS = {
    "default": [],
    "streams": ["-np", "3"],
    "v_trans": ["-fa", "off"],
    "quantized": ["-ctk", "q8_0", "-ctv", "q4_0"],
}


class Server:
    """A llama-server process on a free port."""

    def __init__(self, model: Path, slots: Path, flags: list[str]) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = probe.getsockname()[1]
        command = [SERVER, "-m", model, "--port", str(self.port), "-c", "768", "-t", "1"]
        command += ["--slot-save-path", slots, "--no-cache-idle-slots", "--no-warmup", *flags]
        env = os.environ | {"LD_LIBRARY_PATH": str(SITE / "lib")}
        quiet: dict[str, Any] = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
        self.process = subprocess.Popen(list(map(str, command)), env=env, **quiet)

    def wait(self) -> None:
        """Wait until it answers; fails the test if it dies or takes a minute."""
        for _ in range(600):
            assert self.process.poll() is None, "llama-server died"
            try:
                self.get("/health")
                return
            except (urllib.error.URLError, ConnectionError):
                time.sleep(0.1)
        pytest.fail("llama-server did not start")

    def get(self, path: str) -> Any:
        with urllib.request.urlopen(f"http://127.0.0.1:{self.port}{path}", timeout=30) as reply:
            return json.load(reply)

    def post(self, path: str, body: dict[str, Any]) -> Any:
        data = json.dumps(body).encode()
        headers = {"Content-Type": "application/json"}
        url = f"http://127.0.0.1:{self.port}{path}"
        request = urllib.request.Request(url, data, headers)
        with urllib.request.urlopen(request, timeout=30) as reply:
            return json.load(reply)


@pytest.fixture(params=SETUPS)
def server(
    request: pytest.FixtureRequest, model_paths: dict[str, Path], tmp_path: Path
) -> Iterator[Server]:
    if not SERVER.exists():
        pytest.skip("llama-server is not built")
    running = Server(model_paths["llama"], tmp_path, SETUPS[request.param])
    try:
        running.wait()
        yield running
    finally:
        running.process.terminate()
        running.process.wait(timeout=30)


def _complete(server: Server, ids: Ids) -> Any:
    body = {"prompt": ids.tolist(), "n_predict": 4, "temperature": 0, "id_slot": 0}
    return server.post("/completion", body | {"ignore_eos": True, "return_tokens": True})


def test_server_files(server: Server, tmp_path: Path, ids: Ids) -> None:
    """A saved slot round-trips byte for byte."""
    _complete(server, ids)
    saved = server.post("/slots/0?action=save", {"filename": "saved"})
    data = (tmp_path / "saved").read_bytes()
    slot = parse_slot_file(data)
    assert slot.to_bytes() == data
    assert slot.packed
    assert len(slot.tokens) == saved["n_saved"] == len(slot.state.rows)
    assert slot.tokens[: len(ids)].tolist() == ids.tolist()


@pytest.mark.parametrize("unified", [True, False])
def test_library_files(
    open_context: Callable[..., Any], tmp_path: Path, ids: Ids, unified: bool
) -> None:
    """llama_state_seq_save_file writes a plain token list; the version word is checked."""
    context = open_context(unified=unified, n_seq=3)
    context.decode(ids[:20], 0, 1)
    data = context.save_file(tmp_path / "plain", ids[:20], 1)
    slot = parse_slot_file(data)
    assert not slot.packed
    assert slot.tokens.tolist() == ids[:20].tolist()
    assert slot.to_bytes() == data
    assert slot.state.to_bytes() == context.blob(1)
    self_test(context.blob(1), np.arange(20), slot.state.rows.layout)


def test_other_version(open_context: Callable[..., Any], tmp_path: Path, ids: Ids) -> None:
    """Another version is refused with both numbers, by the check at start."""
    context = open_context()
    context.decode(ids[:5], 0)
    data = context.save_file(tmp_path / "plain", ids[:5])
    future = data[:4] + (4).to_bytes(4, "little") + data[8:]
    check_slot_file(data, context.blob())
    with pytest.raises(StateError, match="version 4, not 3"):
        check_slot_file(future, context.blob())
    layout = parse_slot_file(data).state.rows.layout
    with pytest.raises(StateError, match="positions 0 to 4"):
        self_test(context.blob(), np.arange(6), layout)
    with pytest.raises(StateError, match="magic"):
        self_test(b"ggsn" + context.blob()[4:], np.arange(5), layout)


WORDS = [
    ([], [], False),
    ([1, 2, 3], [1, 2, 3], False),
    ([-1, 1, 2, 8, 9, 0], [8, 9], True),
    ([-1, 1, 0, 0], [], True),
]


@pytest.mark.parametrize(("words", "tokens", "packed"), WORDS)
def test_token_sections(words: list[int], tokens: list[int], packed: bool) -> None:
    """Both forms of the token section, there and back."""

    parsed, was_packed = parse_tokens(np.array(words, np.int32))
    assert (parsed.tolist(), was_packed) == (tokens, packed)
    assert token_section(parsed, packed).tolist() == words


@pytest.mark.parametrize(
    "words",
    [
        [-1],
        [-1, 1, 5, 8, 0],
        [-1, 2, 1, 8, 0],
        [-1, 1, -1, 0],
        [-1, 1, 1, 8, 1],
        [3, -1],
        [-1, 1, 1, -1, 0],
        [-1, 1, 1, 8, 0, 0],
    ],
)
def test_bad_token_sections(words: list[int]) -> None:
    """Truncated, of another version, with media, or with words too many."""

    with pytest.raises(StateError):
        parse_tokens(np.array(words, np.int32))


def test_token_sections_of_what_is_no_token() -> None:
    """Ids of another type, and negative ones."""
    with pytest.raises(StateError, match="int32"):
        token_section(np.arange(7), True)  # type: ignore[arg-type]
    with pytest.raises(StateError, match="negative"):
        token_section(np.arange(-1, 6, dtype=np.int32), True)
