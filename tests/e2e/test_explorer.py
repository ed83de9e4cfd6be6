"""The explorer in a real browser, on a daemon with a few chats."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import requests
from browser import open_browser, screenshots
from daemon import Daemon

from towerd.api.admin.page import built_ui

pytestmark = pytest.mark.slow

HOSTILE = "<img src=x onerror=window.broken=1><script>window.broken=1</script>"
PROMPTS = ("the red otter swims", "a blue whale sings", f"what is {HOSTILE} for?", "a green snake")
WAIT_MS = 60_000
SMALL = ("--ctx-size", "512", "--live-tokens", "2048", "--threads", "1", "--warm-bytes", "1GiB")


def chat(daemon: Daemon, text: str, session: str, **headers: str) -> None:
    """One turn of a chat."""
    reply = requests.post(
        daemon.url + "/v1/chat/completions",
        json={"messages": [{"role": "user", "content": text}], "max_tokens": 4, "temperature": 0},
        headers={"X-Towerd-Session": session, **headers},
        timeout=60,
    )
    assert reply.status_code == 200, reply.text


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with open_browser() as found:
        yield found


@pytest.fixture(scope="module")
def daemon(browser: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    root = tmp_path_factory.mktemp("explorer")
    with Daemon(root, "-m", "stories", *SMALL) as running:
        for number, text in enumerate(PROMPTS):
            chat(running, text, f"chat-{number}")
        chat(running, "the red otter sleeps", "chat-0")
        yield running


@pytest.fixture
def page(browser: Any, daemon: Daemon) -> Iterator[Any]:
    """A page of the explorer; a test fails if any script of it does."""
    context = browser.new_context()
    found = context.new_page()
    found.set_default_timeout(WAIT_MS)
    problems: list[str] = []
    found.on("pageerror", lambda error: problems.append(str(error)))
    found.on("console", lambda said: problems.append(said.text) if said.type == "error" else None)
    yield found
    context.close()
    assert [each for each in problems if "status of 4" not in each] == []


def test_search_open_rename_freeze_and_delete(page: Any, daemon: Daemon, tmp_path: Path) -> None:
    page.goto(daemon.url + "/towerd/")
    page.wait_for_selector(f"text={PROMPTS[1]}")
    page.screenshot(path=screenshots(tmp_path) / "conversations.png")
    page.keyboard.press("/")
    page.keyboard.type("whale")
    page.wait_for_selector("mark:has-text('whale')")
    assert page.locator(".list li").count() == 1
    page.keyboard.press("ArrowDown")
    page.keyboard.press("Enter")
    page.wait_for_selector(f".text:has-text('{PROMPTS[1]}')")
    page.screenshot(path=screenshots(tmp_path) / "conversation.png")
    page.once("dialog", lambda dialog: dialog.accept("Of whales"))
    page.click("text=Rename")
    page.wait_for_selector("h2:has-text('Of whales')")
    page.click(".about summary")
    page.click("button:has-text('Freeze')")
    page.wait_for_selector("dd:has-text('no: frozen')")
    page.click("button:has-text('Warm up')")
    page.wait_for_selector("button:has-text('Freeze')")
    with page.expect_download() as download:
        page.click("button:has-text('Export')")
    assert download.value.suggested_filename == "chat-1.tower"
    page.click("button:has-text('Pin')")
    page.click("button:has-text('Unpin')")
    page.wait_for_selector("button:text-is('Pin')")
    page.once("dialog", lambda dialog: dialog.accept())
    page.click("text=Delete")
    page.wait_for_url("**/towerd/#/")
    gone = requests.get(f"{daemon.url}/towerd/v1/sessions/chat-1", timeout=30)
    assert gone.status_code == 404
    page.fill("#search", "whale")
    page.wait_for_selector("text=Nothing was found.")


def test_scripts_in_chats_and_titles_are_text(page: Any, daemon: Daemon) -> None:
    requests.patch(
        f"{daemon.url}/towerd/v1/sessions/chat-3", json={"title": HOSTILE}, timeout=30
    ).raise_for_status()
    page.goto(daemon.url + "/towerd/#/chat/chat-2")
    page.wait_for_selector("pre.text")
    assert HOSTILE in page.inner_text("h2")
    assert HOSTILE in page.inner_text("pre.text")
    assert HOSTILE in page.inner_text(".list ol")
    page.fill("#search", "onerror")
    page.wait_for_selector("mark:has-text('onerror')")
    page.goto(daemon.url + "/towerd/#/tree")
    page.wait_for_selector("svg .node")
    page.goto(daemon.url + "/towerd/#/live")
    page.wait_for_selector("text=Last requests")
    assert page.evaluate("window.broken") is None
    assert page.locator("main img, main script").count() == 0


def test_branches_tree_requests_and_settings(page: Any, daemon: Daemon, tmp_path: Path) -> None:
    folder = screenshots(tmp_path)
    page.goto(daemon.url + "/towerd/#/chat/chat-0")
    page.wait_for_selector("h3:has-text('2 branches')")
    page.wait_for_selector("pre.text:has-text('sleeps')")
    page.click(".branches li:first-child a")
    page.wait_for_selector("pre.text:has-text('swims')")
    page.click("nav >> text=Tree")
    page.wait_for_selector("svg .node")
    page.screenshot(path=folder / "tree.png")
    assert page.locator("svg [tabindex='0']").count() == 1
    page.locator("svg [tabindex='0']").focus()
    levels = []
    for key in ("ArrowDown", "ArrowUp", "ArrowDown", "Home"):
        page.keyboard.press(key)
        levels.append(page.evaluate("document.activeElement.getAttribute('aria-level')"))
    assert levels == ["2", "1", "2", "1"]
    page.keyboard.press("Enter")
    page.wait_for_url(re.compile(r"#/tree\?root=\d+"))
    page.wait_for_selector("dt:has-text('rows')")
    page.click("nav >> text=Live")
    page.wait_for_selector("svg[aria-label='Time to first token'] rect")
    assert page.locator("tbody tr:has-text('the red otter')").count() == 2
    page.screenshot(path=folder / "live.png", full_page=True)
    page.locator("td a[href^='#/why/']").first.click()
    page.wait_for_selector("main p:has-text('tokens were evaluated')")
    page.screenshot(path=folder / "why.png")
    page.click("nav >> text=Settings")
    page.wait_for_selector("tr:has-text('--ctx-size') >> text=512")


def test_on_a_phone_and_in_the_dark(browser: Any, daemon: Daemon, tmp_path: Path) -> None:
    """Nothing is wider than the screen; one column at a time."""
    context = browser.new_context(viewport={"width": 360, "height": 640}, color_scheme="dark")
    page = context.new_page()
    page.set_default_timeout(WAIT_MS)
    for address, shown in (("#/", ".list li a"), ("#/chat/chat-0", "pre.text"), ("#/live", "svg")):
        page.goto(f"{daemon.url}/towerd/{address}")
        page.wait_for_selector(shown)
        assert page.evaluate("document.documentElement.scrollWidth") <= 360
        page.screenshot(path=screenshots(tmp_path) / f"phone-{shown[:3].strip('.')}.png")
    colour = page.evaluate("getComputedStyle(document.body).color")
    assert int(re.findall(r"\d+", colour)[0]) > 200
    context.close()


def test_nothing_is_shown_before_the_key(browser: Any, tmp_path: Path) -> None:
    with Daemon(tmp_path, "-m", "stories", *SMALL, "--api-key", "opensesame") as daemon:
        chat(daemon, "the red otter swims", "chat", Authorization="Bearer opensesame")
        page = browser.new_page()
        page.set_default_timeout(WAIT_MS)
        page.goto(daemon.url + "/towerd/#/chat/chat")
        page.wait_for_selector("#login:visible")
        assert page.inner_text("main") == ""
        page.fill("#key", "wrong")
        page.keyboard.press("Enter")
        page.wait_for_selector("#login:visible")
        assert page.inner_text("main") == ""
        page.fill("#key", "opensesame")
        page.keyboard.press("Enter")
        page.wait_for_selector("pre.text:has-text('otter')")
        assert not page.is_visible("#login")
        page.fill("#write", "and then?")
        page.keyboard.press("Enter")
        page.wait_for_selector("[role=status]:has-text('tokens were there')")
        page.close()


def test_the_chat_page_chats(page: Any, daemon: Daemon, tmp_path: Path) -> None:
    """llama.cpp's own UI, where `make ui` built it; what was said there is in the explorer."""
    page.goto(daemon.url + "/")
    if not built_ui().is_dir():
        page.wait_for_selector("#notice:has-text('make ui')")
        return
    page.fill("textarea", "Once upon a purple time")
    page.keyboard.press("Enter")
    page.wait_for_selector("text=/[0-9.]+ t\\/s/")
    page.screenshot(path=screenshots(tmp_path) / "chat.png")
    page.goto(daemon.url + "/towerd/#/")
    page.wait_for_selector(".list a:has-text('Once upon a purple time')")
