"""The extension in its process: one libllama, the GIL released, a quiet stderr."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import threading
from collections import defaultdict
from pathlib import Path

import pytest

from towerd.wire import Model, Request

LIBRARIES = ("libllama", "libllama-common", "libmtmd", "libggml", "libggml-base", "libggml-cpu")
QUIET = """
import logging, sys
logging.disable()
from llama_wire import Talker, answer
talker = Talker()
model = talker.model()
print("loaded", file=sys.stderr)
for endpoint, body in [
    ("completion", b'{"prompt": "a", "n_predict": 3, "id_slot": "x", "samplers": ["no"]}'),
    ("completion", b'{"prompt": "a", "grammar": "root ::= ("}'),
    ("completion", b'{"prompt": "a", "grammar": "root ::= root"}'),
    ("chat", b'{"messages": [{"role": "user", "content": "x"}], "stream": "x", "n_predict": 3}'),
]:
    print(answer(talker, model, endpoint, body).status)
"""
N_MESSAGES = 1_001


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="needs /proc")
def test_one_copy_of_each_library() -> None:
    """llama-cpp-python's build is installed twice; only one of each is loaded, whichever module of
    towerd comes first."""
    for first in ("towerd.wire", "towerd.model.llama_model", "towerd.wire._wire"):
        script = f"import {first}, towerd.wire; print(open('/proc/self/maps').read())"
        maps = subprocess.run(
            [sys.executable, "-c", script], capture_output=True, text=True, check=True
        ).stdout
        files = defaultdict(set)
        for line in maps.splitlines():
            if match := re.search(r" (\S+ \d+) +\S*/(lib[\w-]+)\.so[\d.]*$", line):
                files[match[2]].add(match[1])
        assert {name: len(files[name]) for name in LIBRARIES} == dict.fromkeys(LIBRARIES, 1)


def test_nothing_is_printed() -> None:
    """llama.cpp's code warns of wrong fields and bad grammars on its own log, not on ours."""
    support = Path(__file__).parent.parent / "support"
    done = subprocess.run(
        [sys.executable, "-c", QUIET],
        capture_output=True,
        text=True,
        check=True,
        env={"PYTHONPATH": str(support)},
    )
    assert done.stdout.split() == ["200", "400", "400", "400"]
    assert done.stderr.rpartition("loaded\n")[2] == ""


def test_parsing_leaves_the_interpreter_free(model: Model) -> None:
    """Another thread runs while a long chat is parsed, although nothing makes threads take turns."""
    body = json.dumps({"messages": long_chat(N_MESSAGES)}).encode()
    order: list[str] = []
    begun = threading.Event()

    def parse() -> None:
        begun.set()
        Request(model, "chat", body)
        order.append("parsed")

    thread = threading.Thread(target=parse)
    interval_s = sys.getswitchinterval()
    sys.setswitchinterval(1_000.0)
    try:
        thread.start()
        begun.wait()
        order.append("another")
        thread.join()
    finally:
        sys.setswitchinterval(interval_s)
    assert order == ["another", "parsed"]


def long_chat(n: int) -> list[dict[str, str]]:
    """Messages of a user and an assistant in turn."""
    text = (
        "Once upon a time there was a little girl named Lily who liked to play with her red ball."
    )
    return [
        {"role": "user" if i % 2 == 0 else "assistant", "content": f"{i} {text}"} for i in range(n)
    ]
