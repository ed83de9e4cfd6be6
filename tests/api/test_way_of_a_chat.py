"""docs/anatomy-of-a-request.md names the files of a chat; here one runs, and they are what it enters."""

from __future__ import annotations

import re
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Any, TypeAlias

import pytest
from aiohttp import web
from aiohttp.test_utils import TestClient
from services import EmbeddedService

Client: TypeAlias = TestClient[web.Request, web.Application]

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "anatomy-of-a-request.md"
PACKAGES = ("towerd/", "slots/", "kernels/", "codec/")
BEGINS, ENDS = (
    ("towerd/api/llama/completion.py", "_complete"),
    ("towerd/api/llama/task.py", "absorb"),
)
THREADS = ("MainThread", "towerd-wire", "towerd-inference", "towerd-compose")
FILES_MAX, FILES_STORED_MAX = 72, 90
"""All files that a new chat, and one from the store, may enter up to its first token: some more than the 58 and 71
that they do enter, for what happens to run beside them, such as what is said of the request before."""
COMPOSING = "towerd/tiers/composer.py"
CHAT = {
    "messages": [{"role": "user", "content": "Once there was a red ball. " * 8}],
    "n_predict": 4,
}


class Way:
    """The files that are entered between a request's handler and its first event."""

    def __init__(self) -> None:
        self.files: dict[str, None] = {}
        self._is_open = False
        self._is_over = False

    def begin(self) -> None:
        """Look at the next request."""
        self.files.clear()
        self._is_open = self._is_over = False

    def entered(self, frame: FrameType, event: str, _: Any) -> None:
        """Note the file of a call; a profile function."""
        code = frame.f_code
        if event != "call" or self._is_over:
            return
        file = code.co_filename.removeprefix(f"{ROOT}/")
        if (file, code.co_name) == BEGINS:
            self._is_open = True
        if not self._is_open or not file.startswith(PACKAGES):
            return
        if threading.current_thread().name.startswith(THREADS):
            self.files[file] = None
        self._is_over = (file, code.co_name) == ENDS


@pytest.fixture
def way() -> Iterator[Way]:
    """Watches all threads that start from here on, and this one."""
    found = Way()
    threading.setprofile(found.entered)
    sys.setprofile(found.entered)
    yield found
    sys.setprofile(None)
    threading.setprofile(None)


def named() -> set[str]:
    """The files in the page's table."""
    return set(re.findall(r"^\| \d+ \| `([^`]+)`", PAGE.read_text(), re.MULTILINE))


async def ask(client: Client) -> str:
    """Send the chat; the reply's X-Towerd-Reuse."""
    response = await client.post("/v1/chat/completions", json=CHAT)
    assert response.status == 200, await response.text()
    return response.headers["X-Towerd-Reuse"]


async def test_a_chat_enters_the_files_of_the_page(
    way: Way, client: Client, service: EmbeddedService
) -> None:
    """A new chat enters all but what composes stored rows; one from the store enters all."""
    way.begin()
    assert (await ask(client)).startswith("live=0,hot=0,warm=0,")
    assert named() - way.files.keys() == {COMPOSING}
    assert len(way.files) <= FILES_MAX, "\n".join(way.files)

    await service.engine.settle()
    service.engine.forget_live()
    way.begin()
    assert not (await ask(client)).startswith("live=0,hot=0,warm=0,")
    assert named() <= way.files.keys()
    assert len(way.files) <= FILES_STORED_MAX, "\n".join(way.files)
