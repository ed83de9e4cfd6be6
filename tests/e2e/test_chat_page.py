"""llama.cpp's own web UI in a real browser: branches, reasoning, pictures, a key, several models."""

from __future__ import annotations

import base64
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from browser import open_browser, screenshots
from daemon import Daemon
from scripted_model import make_scripted_model

from lab.models.random_gguf import PRESETS, make_random_gguf
from lab.models.vision import make_projector, picture
from towerd.api.admin.page import INDEX, built_ui
from towerd.models.bundled import bundled_model

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not (built_ui() / INDEX).is_file(), reason="`make ui` has not built it"),
]

MakeDaemon = Callable[..., Daemon]
WAIT_MS = 60_000
SMALL = ("--ctx-size", "2048", "--threads", "1", "--n-predict", "8")
QWEN = Path(str(bundled_model())).parent / "templates" / "Qwen3.jinja"
ANSWER = "[aria-label='Assistant message with actions']"
ANSWERED = """([selector, count]) => {
    const found = document.querySelectorAll(selector);
    const isBusy = [...document.querySelectorAll("button")].some((it) => it.innerText === "Stop");
    return found.length === count && !isBusy && / t\\/s/.test(found[count - 1].innerText);
}"""


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with open_browser() as found:
        yield found


@pytest.fixture
def page(browser: Any, tmp_path: Path) -> Iterator[Any]:
    """A page; the test fails if any script of it does. Its picture is taken at the end."""
    context = browser.new_context()
    found = context.new_page()
    found.set_default_timeout(WAIT_MS)
    problems: list[str] = []
    found.on("pageerror", lambda error: problems.append(str(error)))
    yield found
    found.screenshot(path=screenshots(tmp_path) / "chat-page.png")
    context.close()
    assert problems == []


def say(page: Any, text: str, n_answers: int = 1) -> str:
    """Say something; the last of so many answers, when it is complete."""
    page.fill("textarea", text)
    page.keyboard.press("Enter")
    return answer(page, n_answers)


def answer(page: Any, n_answers: int = 1) -> str:
    """The last of so many answers, when it is complete."""
    page.wait_for_function(ANSWERED, arg=[ANSWER, n_answers])
    return str(page.locator(ANSWER).last.inner_text())


def prefilled(daemon: Daemon) -> list[int]:
    """Tokens that each request evaluated, the first first."""
    finished = daemon.get("/towerd/v1/requests")["finished"]
    return [each["reuse"]["prefill"] for each in reversed(finished)]


def test_branches_reuse_the_prefix(page: Any, make_daemon: MakeDaemon) -> None:
    """A message that is edited and an answer that is made again leave the others where they were,
    and evaluate nothing that was known."""
    with make_daemon("-m", "stories", *SMALL) as daemon:
        page.goto(daemon.url + "/")
        say(page, "Once upon a time there was a purple dog in a garden. He sat.")
        page.get_by_role("button", name="Regenerate").click()
        page.get_by_label("Message version 2 of 2").wait_for()
        answer(page)
        page.get_by_role("button", name="Edit").first.click()
        page.locator("textarea").first.fill(
            "Once upon a time there was a purple dog in a garden. He ran."
        )
        page.locator("textarea").first.press("Enter")
        page.wait_for_selector("text=He ran.")
        answer(page)
        first, again, edited = prefilled(daemon)
        assert again == 1
        assert edited < first / 2
        page.get_by_label("Previous version").first.click()
        page.wait_for_selector("text=He sat.")
        titles = [each["title"] for each in daemon.get("/towerd/v1/sessions")["sessions"]]
        assert any("He sat." in title for title in titles)
        assert any("He ran." in title for title in titles)


def test_reasoning_is_shown_as_such(page: Any, make_daemon: MakeDaemon, tmp_path: Path) -> None:
    script = ("<think>\nI", " wonder.\n</think>\n\n", "Forty-", "two.")
    make_scripted_model(tmp_path / "thinker.gguf", script)
    model = ("-m", str(tmp_path / "thinker.gguf"), "--chat-template-file", str(QWEN))
    with make_daemon(*model, "--ctx-size", "4096", "--threads", "1") as daemon:
        page.goto(daemon.url + "/")
        said = say(page, "What is it?")
        assert "Forty-two." in said
        assert "wonder" not in said
        page.get_by_role("button", name=re.compile("Reasoning")).last.click()
        page.wait_for_selector(f"{ANSWER} >> text=I wonder.")


def test_a_picture(page: Any, make_daemon: MakeDaemon, tmp_path: Path) -> None:
    """It is shown, and evaluated once."""
    make_projector(tmp_path / "eyes.gguf", PRESETS["tiny"].n_embd)
    make_random_gguf(tmp_path / "tiny.gguf", PRESETS["tiny"])
    (tmp_path / "blocks.png").write_bytes(base64.b64decode(picture(3)))
    model = ("-m", str(tmp_path / "tiny.gguf"), "--mmproj", str(tmp_path / "eyes.gguf"))
    with make_daemon(*model, *SMALL) as daemon:
        page.goto(daemon.url + "/")
        page.locator("input[type=file]").first.set_input_files(tmp_path / "blocks.png")
        page.wait_for_selector("img[alt='blocks.png']")
        say(page, "What is this?")
        page.get_by_role("button", name="Regenerate").click()
        page.get_by_label("Message version 2 of 2").wait_for()
        answer(page)
        first, again = prefilled(daemon)
        assert first > 4
        assert again == 1


def test_the_page_asks_for_the_key(page: Any, make_daemon: MakeDaemon) -> None:
    with make_daemon("-m", "stories", *SMALL, "--api-key", "opensesame") as daemon:
        page.goto(daemon.url + "/")
        page.get_by_role("button", name="Enter API Key").click()
        page.fill("#api-key-input", "wrong")
        page.keyboard.press("Enter")
        page.wait_for_selector("text=Invalid API key")
        page.wait_for_selector("#api-key-input:enabled")
        page.fill("#api-key-input", "opensesame")
        page.keyboard.press("Enter")
        page.wait_for_selector("textarea")
        say(page, "Once upon a time")


def test_a_tenant_chooses_another_model(page: Any, make_daemon: MakeDaemon, tmp_path: Path) -> None:
    """It is loaded, and answers from then on."""
    folder = tmp_path / "models"
    folder.mkdir()
    (folder / "tales.gguf").write_bytes(bundled_model().read_bytes())
    make_scripted_model(folder / "yes-man.gguf", ("Yes", " indeed."))
    keys = ("--api-key", "alice:opensesame", "--api-key", "bob:other")
    with make_daemon("--models-dir", str(folder), *SMALL, *keys) as router:
        page.goto(router.url + "/")
        page.get_by_role("button", name="Enter API Key").click()
        page.fill("#api-key-input", "opensesame")
        page.keyboard.press("Enter")
        page.wait_for_selector("textarea")
        for n, (model, said) in enumerate((("tales", ""), ("yes-man", "Yes indeed.")), 1):
            page.locator("form button:has(.lucide-package)").last.click()
            page.fill("[placeholder='Search models...']", model)
            page.locator(".models-list [role=option]").first.click()
            page.wait_for_selector(f"text=Model loaded: {model}")
            shown = say(page, "Is it so?", n)
            assert said in shown
            assert model in shown
