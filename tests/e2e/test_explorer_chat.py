"""Chats that are written in the explorer, in a real browser."""

from __future__ import annotations

import base64
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import requests
from browser import open_browser, screenshots
from daemon import Daemon
from pictures import look_at
from scripted_model import make_scripted_model

from lab.models.vision import make_projector, picture

pytestmark = pytest.mark.slow

WAIT_MS = 60_000
N_EMBD_TEXT = 64
"""Of the bundled model."""
FLAGS = ("-m", "stories", "--ctx-size", "2048", "--live-tokens", "4096", "--threads", "1")
LIMIT = ("--n-predict", "12", "--no-anticipate")
HOSTILE = "<img src=x onerror=window.broken=1>"


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with open_browser() as found:
        yield found


@pytest.fixture(scope="module")
def daemon(browser: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    root = tmp_path_factory.mktemp("chats")
    projector = root / "mmproj.gguf"
    make_projector(projector, N_EMBD_TEXT)
    with Daemon(root, *FLAGS, *LIMIT, "--mmproj", str(projector)) as running:
        yield running


@pytest.fixture(scope="module")
def marked(browser: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    """Serves a model whose template marks messages with control tokens."""
    root = tmp_path_factory.mktemp("marked")
    model = root / "marked.gguf"
    make_scripted_model(model, ("Hel", "lo"), controls=("<|im_start|>", "<|im_end|>"))
    with Daemon(root, "-m", str(model), *FLAGS[2:], *LIMIT) as running:
        yield running


@pytest.fixture
def page(browser: Any) -> Iterator[Any]:
    """A page; a test fails if any script of it does."""
    context = browser.new_context()
    found = context.new_page()
    found.set_default_timeout(WAIT_MS)
    problems: list[str] = []
    found.on("pageerror", lambda error: problems.append(str(error)))
    yield found
    context.close()
    assert problems == []


def turns(daemon: Daemon, session: str) -> list[Any]:
    found: list[Any] = daemon.get(f"/towerd/v1/sessions/{session}")["turns"]
    return found


def answered(page: Any, n_users: int) -> None:
    """Wait until so many messages of the user are shown, and the last one was answered."""
    page.wait_for_selector(f".message.user >> nth={n_users - 1}")
    page.wait_for_selector("button:has-text('Regenerate')")
    page.wait_for_selector(".growing", state="detached")


def begin(daemon: Daemon, name: str, *messages: dict[str, Any]) -> None:
    reply = requests.post(
        f"{daemon.url}/v1/chat/completions",
        json={"messages": messages, "temperature": 0, "max_tokens": 12},
        headers={"X-Towerd-Session": name},
        timeout=60,
    )
    assert reply.status_code == 200, reply.text


def test_written_by_keyboard(page: Any, daemon: Daemon, tmp_path: Path) -> None:
    """A new chat, its second turn and another reply: each continues what is there."""
    page.goto(daemon.url + "/towerd/")
    page.wait_for_selector("text=New chat")
    page.keyboard.press("n")
    page.wait_for_selector("#write:focus")
    page.keyboard.type(f"Once {HOSTILE}")
    page.keyboard.press("Shift+Enter")
    page.keyboard.type("upon a time")
    page.keyboard.press("Enter")
    page.wait_for_url("**/#/chat/chat-*")
    answered(page, 1)
    assert page.inner_text(".message.user pre") == f"Once {HOSTILE}\nupon a time"
    session = page.url.rpartition("/")[2].partition("?")[0]
    page.focus("#write")
    page.keyboard.type("And then?")
    page.keyboard.press("Enter")
    answered(page, 2)
    page.wait_for_selector("[role=status]:has-text('tokens were there')")
    page.screenshot(path=screenshots(tmp_path) / "chat-second.png")
    first, second = turns(daemon, session)
    assert second["parent"] == first["id"]
    request = daemon.get("/towerd/v1/requests?limit=1")["finished"][0]
    n_first = first["n_prompt"] + first["n_reply"]
    assert request["reuse"]["live"] >= n_first - 1
    assert page.evaluate("sessionStorage.length") == 0
    assert not page.is_visible("button:has-text('Edit')")  # no control tokens mark its messages
    page.click("button:has-text('Regenerate')")
    page.wait_for_selector("h3:has-text('2 branches')")
    assert [each["parent"] for each in turns(daemon, session)] == [None, *[first["id"]] * 2]
    assert page.evaluate("window.broken") is None


def test_a_message_is_changed(page: Any, marked: Daemon) -> None:
    """Beside what was said. What is being changed stays while the chat is frozen, or another message is answered."""
    begin(marked, "changed", {"role": "user", "content": "Once"})
    (first,) = turns(marked, "changed")
    page.goto(marked.url + "/towerd/#/chat/changed")
    answered(page, 1)
    page.click("button:has-text('Edit')")
    page.keyboard.press("Control+A")
    page.keyboard.type("Twice")
    page.click("button:has-text('Freeze')")
    page.wait_for_selector(".about summary:has-text('frozen')")
    assert page.input_value("form.edit textarea") == "Twice"
    page.fill("#write", "And then?")
    page.press("#write", "Enter")
    page.wait_for_selector("[role=status]:has-text('tokens were there')")
    page.wait_for_selector("button.main:has-text('Send'):not([disabled]) >> nth=-1")
    assert page.input_value("form.edit textarea") == "Twice"
    page.press("form.edit textarea", "Enter")
    page.wait_for_selector("h3:has-text('2 branches')")
    answered(page, 1)
    assert page.locator(".message.user pre").all_inner_texts() == ["Twice"]
    assert [each["parent"] for each in turns(marked, "changed")] == [None, first["id"], None]
    page.click("button:has-text('Edit')")
    page.keyboard.press("Escape")
    page.wait_for_selector(".message.user")


def test_what_was_typed_since_is_not_lost(browser: Any, tmp_path: Path) -> None:
    """A reply that was asked for before the page was left takes only what it was asked from the draft."""
    room = ("--ctx-size", "16384", "--live-tokens", "32768", "--ignore-eos", "--n-predict", "3000")
    with Daemon(tmp_path, *FLAGS, *room) as daemon:
        for name in ("long", "other"):
            begin(daemon, name, {"role": "user", "content": f"Once {name}"})
        page = browser.new_page()
        page.set_default_timeout(WAIT_MS)
        page.goto(daemon.url + "/towerd/#/chat/long")
        page.fill("#write", "Tell me everything")
        with page.expect_event("requestfinished", predicate=lambda sent: sent.method == "POST"):
            page.keyboard.press("Enter")
            page.wait_for_selector(".growing pre:not(:empty)")
            page.evaluate("location.hash = '#/chat/other'")
            page.wait_for_selector(".message.user:has-text('Once other')")
            page.evaluate("location.hash = '#/chat/long'")
            page.wait_for_selector(".message.user:has-text('Once long')")
            page.fill("#write", "precious")
        answered(page, 2)
        for _ in range(
            3
        ):  # what follows the end of a reply asks for the conversations, as each look does
            page.wait_for_event("requestfinished", lambda each: "/sessions?" in each.url)
        page.reload()
        page.wait_for_selector("#write")
        assert page.input_value("#write") == "precious"
        page.close()


def test_what_was_typed_is_not_lost(page: Any, daemon: Daemon) -> None:
    """By a reload, nor by a message that is refused."""
    begin(daemon, "typed", {"role": "user", "content": "Once"})
    page.goto(daemon.url + "/towerd/#/chat/typed")
    page.fill("#write", "half a thought")
    page.reload()
    page.wait_for_selector("#write")
    assert page.input_value("#write") == "half a thought"
    page.fill("#write", "long " * 4000)
    page.keyboard.press("Enter")
    page.wait_for_selector("#notice:has-text('context')")
    assert page.input_value("#write") == "long " * 4000
    page.fill("#write", "short")
    page.keyboard.press("Enter")
    answered(page, 2)
    assert page.input_value("#write") == ""


def test_pictures_and_other_devices(browser: Any, daemon: Daemon, tmp_path: Path) -> None:
    """A chat about a picture that another program began: it is shown, not encoded again, and a second one is
    attached. Another device, which has the chat open, shows what was added; a message is changed there with its picture."""
    begin(daemon, "seen", look_at(1))
    file = tmp_path / "second.png"
    file.write_bytes(base64.b64decode(picture(2)))
    contexts = [browser.new_context() for _ in range(2)]
    one, other = (context.new_page() for context in contexts)
    for page in (one, other):
        page.set_default_timeout(WAIT_MS)
        page.goto(daemon.url + "/towerd/#/chat/seen")
        page.wait_for_selector(".message img[src='data:image/png;base64," + picture(1) + "']")
    one.set_input_files("input[type=file]", file)
    one.wait_for_selector(".attached img")
    one.fill("#write", "And this?")
    one.keyboard.press("Enter")
    answered(one, 2)
    one.locator(".message img").nth(1).wait_for()
    other.wait_for_selector(".message.user:has-text('And this?') img")
    assert daemon.get("/towerd/v1/stats")["engine"]["media_encoded"] == 2
    for context in contexts:
        context.close()


def test_escape_stops(browser: Any, tmp_path: Path) -> None:
    """What was said until then is kept, and continues."""
    room = ("--ctx-size", "16384", "--live-tokens", "32768", "--ignore-eos")
    with Daemon(tmp_path, *FLAGS, *room) as daemon:
        begin(daemon, "long", {"role": "user", "content": "Once"})
        page = browser.new_page()
        page.set_default_timeout(WAIT_MS)
        page.goto(daemon.url + "/towerd/#/chat/long")
        page.fill("#write", "Tell me everything")
        page.keyboard.press("Enter")
        page.wait_for_selector(".growing pre:not(:empty)")
        page.keyboard.press("Escape")
        page.wait_for_selector(".growing", state="detached")
        answered(page, 2)
        assert [each["finished"] for each in turns(daemon, "long")] == [True, False]
        page.close()


def test_a_reply_outlives_its_page(browser: Any, tmp_path: Path) -> None:
    """It is whole on the device that has the chat open, which says meanwhile that it is being written."""
    room = ("--ctx-size", "16384", "--live-tokens", "32768", "--ignore-eos", "--n-predict", "7000")
    with Daemon(tmp_path, *FLAGS, *room) as daemon:
        begin(daemon, "long", {"role": "user", "content": "Once"})
        one, other = (browser.new_page() for _ in range(2))
        for page in (one, other):
            page.set_default_timeout(5 * WAIT_MS)
            page.goto(daemon.url + "/towerd/#/chat/long")
            page.wait_for_selector("#write")
        one.fill("#write", "Tell me everything")
        one.keyboard.press("Enter")
        one.wait_for_selector(".growing pre:not(:empty)")
        one.close()
        other.wait_for_selector("p:has-text('A reply is being written')")
        answered(other, 2)
        assert [each["finished"] for each in turns(daemon, "long")] == [True, True]
        other.wait_for_selector("p:has-text('A reply is being written')", state="hidden")
        other.close()


def test_code_on_a_phone(browser: Any, daemon: Daemon) -> None:
    """It scrolls by itself: the page is no wider than the screen. What is not closed is code to its end."""
    line = "print('" + "x" * 300 + "')"
    text = f"See:\n```python\n{line}\n```\nand\n```\n{line}"
    begin(daemon, "code", {"role": "user", "content": text})
    context = browser.new_context(viewport={"width": 360, "height": 640})
    page = context.new_page()
    page.set_default_timeout(WAIT_MS)
    page.goto(daemon.url + "/towerd/#/chat/code")
    page.wait_for_selector(".message pre.code")
    shown = page.locator(".message.user pre").all_inner_texts()
    assert [each.strip() for each in shown] == ["See:", line, "and", line]
    assert page.evaluate("document.documentElement.scrollWidth") <= 360
    inline, inner = "```print(1)```", "```\nx\n```"
    begin(
        daemon, "fences", {"role": "user", "content": f"{inline}\nfoo\n````md\n{inner}\n````\nbar"}
    )
    page.goto(daemon.url + "/towerd/#/chat/fences")
    page.wait_for_selector(".message.user:has-text('bar')")
    shown = page.locator(".message.user pre").all_inner_texts()
    assert [each.strip() for each in shown] == [f"{inline}\nfoo", inner, "bar"]
    assert page.locator(".message.user pre.code").count() == 1
    context.close()


def test_an_address_that_is_no_encoding(page: Any, daemon: Daemon) -> None:
    page.goto(daemon.url + "/towerd/#/chat/%")
    page.wait_for_selector("#notice:has-text('session')")
    page.goto(daemon.url + "/towerd/#/chat/%25%")
    page.wait_for_selector("#notice:has-text('%25%')")
