"""llama.cpp's chat page at `/` in a real browser, where it is built: branches, a key, several models."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import requests
from browser import open_browser, screenshots
from daemon import Daemon
from scripted_model import make_scripted_model

import towerd
from towerd.api.admin.ui import built_ui
from towerd.models.bundled import bundled_model

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(built_ui() is None, reason="the chat page is not built (make ui)"),
]

ANSWER = "[aria-label='Assistant message with actions']"
IS_DONE = """n => { const found = document.querySelectorAll("[aria-label='Assistant message with actions']");
    return found.length == n && /[0-9.]+ t\\/s/.test(found[n - 1].innerText); }"""
WAIT_MS = 60_000
SMALL = ("--ctx-size", "2048", "--threads", "1", "--warm-bytes", "1GiB")
TEMPLATE = Path(towerd.__file__).parent / "data/templates/Qwen3.jinja"
THOUGHT = ("<think>\n", "I count. ", "\n</think>\n\n", "Forty-two.")


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with open_browser() as found:
        yield found


@pytest.fixture
def open_page(browser: Any) -> Iterator[Callable[[Daemon], Any]]:
    """`open_page(daemon)`: the chat page of a new visitor; a test fails if any script of it does."""
    context = browser.new_context()
    problems: list[str] = []

    def open_it(daemon: Daemon) -> Any:
        page = context.new_page()
        page.set_default_timeout(WAIT_MS)
        page.on("pageerror", lambda error: problems.append(str(error)))
        page.goto(daemon.url + "/")
        return page

    yield open_it
    context.close()
    assert problems == []


def say(page: Any, text: str, n_answers: int = 1) -> None:
    """Send a message, and wait until the last of so many answers is there."""
    page.fill("textarea", text)
    page.keyboard.press("Enter")
    is_done(page, n_answers)


def is_done(page: Any, n_answers: int = 1) -> None:
    page.wait_for_function(IS_DONE, arg=n_answers)
    page.get_by_role("button", name="Stop", exact=True).wait_for(state="detached")


def choose(page: Any, model: str) -> None:
    """Pick a model from the page's list, which loads it."""
    page.locator("form button:has(.lucide-package)").last.click()
    page.fill("[placeholder='Search models...']", model)
    page.locator(".models-list [role=option]").first.click()
    page.wait_for_selector(f"text=Model loaded: {model}")


def evaluated(daemon: Daemon) -> list[int]:
    """Prompt tokens that each request of the page evaluated, the first request first."""
    answered = daemon.get("/towerd/v1/requests")["finished"]
    return [each["reuse"]["prefill"] for each in reversed(answered)]


def test_branches(open_page: Callable[[Daemon], Any], tmp_path: Path) -> None:
    """Another answer to a question evaluates none of it; an edited one what is new. The page goes back
    to what it had."""
    with Daemon(tmp_path / "d", "-m", "stories", *SMALL) as daemon:
        page = open_page(daemon)
        say(page, "Tell me of a dog that finds a red ball and takes it home.")
        page.get_by_role("button", name="Regenerate").click()
        page.get_by_label("Message version 2 of 2").wait_for()
        is_done(page)
        page.get_by_label("User message with actions").get_by_role("button", name="Edit").click()
        edited = page.locator("textarea").first
        edited.fill("Tell me of a dog that finds a red ball and hides it.")
        edited.press("Enter")
        page.wait_for_selector("text=hides it")
        is_done(page)
        first, again, other = evaluated(daemon)
        assert first > 10
        assert again <= 1
        assert other < first
        page.get_by_label("Previous version").first.click()
        page.wait_for_selector("text=takes it home")


def test_a_key(open_page: Callable[[Daemon], Any], tmp_path: Path) -> None:
    """The page asks for it, takes no other, and keeps it."""
    with Daemon(tmp_path / "d", "-m", "stories", "--api-key", "opensesame", *SMALL) as daemon:
        page = open_page(daemon)
        page.get_by_role("button", name="Enter API Key").click()
        for key in ("wrong", "opensesame"):
            page.wait_for_function("() => !document.querySelector('#api-key-input').disabled")
            page.fill("#api-key-input", key)
            page.keyboard.press("Enter")
            page.wait_for_selector("text=Invalid API key" if key == "wrong" else "textarea")
        say(page, "Hello.")
        page.reload()
        page.wait_for_selector(ANSWER)


def test_several_models(open_page: Callable[[Daemon], Any], tmp_path: Path) -> None:
    """The one that is chosen is loaded and answers; what it thinks is shown apart."""
    folder = tmp_path / "models"
    folder.mkdir()
    (folder / "tales.gguf").write_bytes(bundled_model().read_bytes())
    make_scripted_model(folder / "thinker.gguf", THOUGHT)
    config = tmp_path / "towerd.toml"
    config.write_text(f"[models.thinker]\nchat_template_file = '{TEMPLATE}'\n")
    flags = ("--models-dir", str(folder), "--config", str(config), *SMALL)
    with Daemon(tmp_path / "d", *flags) as daemon:
        page = open_page(daemon)
        choose(page, "thinker")
        say(page, "Think.")
        answer = page.locator(ANSWER).first
        assert "Forty-two." in answer.inner_text()
        assert "I count." not in answer.inner_text()
        answer.get_by_text("Reasoning").click()
        answer.get_by_text("I count.").wait_for()
        choose(page, "tales")
        say(page, "Tell me of a dog.", 2)
        page.screenshot(path=screenshots(tmp_path) / "chat-page-models.png")
        listed = requests.get(daemon.url + "/models", timeout=30).json()["data"]
        assert {each["status"]["value"] for each in listed} == {"loaded"}
