"""The picture of a large tree, in a real browser."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from browser import open_browser, screenshots
from daemon import Daemon
from many_chats import make_store

pytestmark = pytest.mark.slow

WAIT_MS = 60_000
N_CHATS = 1000
LEAST_PX = 3
SIZES = ((1280, 800, "light"), (1280, 800, "dark"), (390, 844, "light"), (390, 844, "dark"))


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with open_browser() as found:
        yield found


@pytest.fixture(scope="module")
def daemon(browser: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    root = tmp_path_factory.mktemp("tree")
    with ThreadPoolExecutor(1) as thread:  # the browser's loop runs in this one
        thread.submit(lambda: asyncio.run(make_store(root / "store", N_CHATS))).result()
    with Daemon(root, "-m", "stories", "--ctx-size", "512", "--threads", "1") as running:
        yield running


def widths(page: Any) -> list[float]:
    found: list[float] = page.evaluate(
        "[...document.querySelectorAll('svg .node')].map((n) => n.getBoundingClientRect().width)"
    )
    return found


@pytest.mark.parametrize(("width", "height", "scheme"), SIZES)
def test_a_thousand_chats_are_readable(
    browser: Any, daemon: Daemon, tmp_path: Any, width: int, height: int, scheme: Any
) -> None:
    """No box is too small to be seen or wider than the page, and from any group a chat is a few keys away."""
    context = browser.new_context(viewport={"width": width, "height": height}, color_scheme=scheme)
    page = context.new_page()
    page.set_default_timeout(WAIT_MS)
    problems: list[str] = []
    page.on("pageerror", lambda error: problems.append(str(error)))
    page.goto(daemon.url + "/towerd/#/tree")
    page.wait_for_selector("svg .node")
    page.screenshot(path=screenshots(tmp_path) / f"tree-{width}-{scheme}.png")
    found = widths(page)
    assert 10 < len(found) < 1500
    assert min(found) >= LEAST_PX - 1.5
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    drawn = page.evaluate("document.querySelector('svg').getBoundingClientRect().width")
    assert found[0] == pytest.approx(drawn, rel=0.35)
    page.locator("svg .group").first.focus()
    page.wait_for_selector(".told:has-text('smaller ones together')")
    boxes = []
    for _ in range(4):  # as many groups as are in each other at most
        page.keyboard.press("Enter")
        page.wait_for_url(re.compile(r"#/tree\?root=\d+"))
        page.wait_for_selector("svg .node:focus")
        boxes.append(page.locator("svg .node").count())
        if page.locator("svg .node.group").count() == 0:
            break
        page.locator("svg .group").first.focus()
    assert page.locator("svg .group").count() == 0, boxes
    page.keyboard.press("Enter")
    page.wait_for_selector("dt:has-text('rows')")
    page.keyboard.press("Escape")
    page.wait_for_selector("svg .node:focus")
    context.close()
    assert problems == []


def test_boxes_are_as_wide_as_their_tokens(browser: Any, daemon: Daemon) -> None:
    """Against what /tree says, and the arrow keys walk as the boxes stand."""
    page = browser.new_page(viewport={"width": 1280, "height": 800})
    page.set_default_timeout(WAIT_MS)
    page.goto(daemon.url + "/towerd/#/tree")
    page.wait_for_selector("svg .node")
    width = page.evaluate("document.querySelector('svg').getBoundingClientRect().width")
    whole = daemon.get(f"/towerd/v1/tree?parts={int(width / LEAST_PX)}")
    wanted = whole["boxes"][0]["tokens"] / whole["tokens"] * width
    assert widths(page)[0] == pytest.approx(wanted, abs=2)
    page.locator("svg [tabindex='0']").focus()
    levels = []
    for key in ("ArrowDown", "ArrowRight", "ArrowLeft", "ArrowUp", "End", "Home"):
        page.keyboard.press(key)
        levels.append(page.evaluate("document.activeElement.getAttribute('aria-level')"))
    assert [*levels[:4], levels[5]] == ["2", "2", "2", "1", "1"]
    page.close()
