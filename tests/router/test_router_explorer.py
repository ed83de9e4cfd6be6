"""The explorer in front of several models, in a real browser."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import requests
from browser import open_browser, screenshots
from daemon import Daemon
from routed import MakeRouter, states
from waiting import until

pytestmark = pytest.mark.slow

WAIT_MS = 60_000


def say(router: Daemon, model: str, prompt: str, **more: Any) -> requests.Response:
    """A turn of the session `twin`, which every model has one of."""
    body = {"model": model, "prompt": prompt, "n_predict": 4, "ignore_eos": True, **more}
    headers = {"X-Towerd-Session": "twin"}
    return requests.post(
        router.url + "/completion", json=body, headers=headers, timeout=120, stream=True
    )


def test_models_side_by_side(make_router: MakeRouter, tmp_path: Path) -> None:
    """Looking loads none; requests of all are shown, and lead to their own model's conversation."""
    router = make_router("-c", "32768", "--live-tokens", "65536")
    with open_browser() as browser:
        page = browser.new_page()
        page.set_default_timeout(WAIT_MS)
        page.goto(router.url + "/towerd/#/live")
        page.wait_for_selector("h2:has-text('No model is loaded')")
        assert set(states(router).values()) == {"unloaded"}
        page.click("button:has-text('junk')")
        page.wait_for_selector("#notice:has-text('junk cannot be loaded')")
        page.click("button:has-text('tales')")
        page.wait_for_selector("h2:has-text('Tiers of tales')")
        assert say(router, "tales", "the red otter").status_code == 200
        assert say(router, "dice", "!!! a roll").status_code == 200
        last = page.locator("h3:has-text('Last requests') + div tbody tr")
        for model in ("tales", "dice"):
            last.locator(f":scope:has-text('{model}')").wait_for()
        long = {"n_predict": 30_000, "stream": True}
        with say(router, "dice", "!!! again", **long) as reply:
            parts = reply.iter_content(1)
            assert next(parts)
            page.wait_for_selector("h2:has-text('Running') + div tr:has-text('dice')")
            speed = page.locator("h2:has-text('Running') + div td:last-child")
            speed.filter(has_text=re.compile(r"\d")).wait_for()
            row = page.inner_text("h2:has-text('Running') + div tbody tr").split("\t")
            assert float(row[-1]) > 0
            assert row[6].endswith(" ms")
        page.screenshot(path=screenshots(tmp_path) / "models.png", full_page=True)
        for model, prompt in (("tales", "the red otter"), ("dice", "!!! again")):
            page.goto(router.url + "/towerd/#/live")
            last.locator(f":scope:has-text('{model}') a[href^='#/chat/']").last.click()
            page.wait_for_selector(f"pre.text:has-text('{prompt}')")
            page.wait_for_selector("dd:has-text('on disk'), button:has-text('Freeze')")
            assert page.input_value("#models") == model
        page.click("nav >> text=Settings")
        page.wait_for_selector("h2:has-text('for dice')")
        page.select_option("#models", "tales")
        page.wait_for_selector("h2:has-text('for tales')")
        requests.post(router.url + "/models/unload", json={"model": "tales"}, timeout=30)
        page.wait_for_selector("h2:has-text('for dice')")
        assert states(router) == {"tales": "unloaded", "dice": "loaded", "junk": "unloaded"}


def test_a_tokenizer_names_a_conversation(make_router: MakeRouter) -> None:
    """Whichever model is asked, also the one that has it."""
    router = make_router()
    for model, prompt in (("tales", "the red otter"), ("dice", "!!! a roll")):
        assert say(router, model, prompt).status_code == 200
    for model in ("tales", "dice"):
        found = router.get(f"/towerd/v1/requests?model={model}")
        (request,) = found["finished"]
        which = f"scope={request['scope']}&tokenizer={found['tokenizer']}"
        read = []
        for asked in ("tales", "dice"):
            path = f"/towerd/v1/sessions/{request['session']}"
            query = f"?{which}&model={asked}"
            read.append(router.get(path + query + "&messages=1")["messages"])
            exported = requests.get(router.url + path + "/export" + query, timeout=60)
            assert exported.status_code == 200
        assert read[0] == read[1] != []
    tokenizers = {
        router.get(f"/towerd/v1/requests?model={model}")["tokenizer"] for model in ("tales", "dice")
    }
    assert len(tokenizers) == 2


def test_a_conversation_continues_with_its_own_model(make_router: MakeRouter) -> None:
    """Of two with one name, that of the named model; one that was unloaded is loaded for it."""
    router = make_router()
    for model, prompt in (("tales", "the red otter"), ("dice", "!!! a roll")):
        assert say(router, model, prompt).status_code == 200
    tokenizer = router.get("/towerd/v1/requests?model=tales")["tokenizer"]
    listed = router.get("/towerd/v1/sessions?model=tales")["sessions"]
    assert [(each["model"], bool(each["tokenizer"])) for each in listed] == [
        ("dice", True),
        ("tales", False),
    ]
    requests.post(router.url + "/models/unload", json={"model": "tales"}, timeout=30)
    path = f"{router.url}/towerd/v1/sessions/twin/chat?tokenizer={tokenizer}&model="
    body: Any = {"message": {"content": "swims"}, "max_tokens": 4}
    refused = requests.post(path + "dice", json=body, timeout=60)
    assert (refused.status_code, "another tokenizer" in refused.text) == (400, True)
    reply = requests.post(path + "tales", json=body, timeout=60)
    assert reply.status_code == 200, reply.text
    assert reply.json()["timings"]["cache_n"] > 4
    n_turns = [
        len(router.get(f"/towerd/v1/sessions/twin?model={model}")["turns"])
        for model in ("tales", "dice")
    ]
    assert n_turns == [2, 1]


def test_chats_of_several_models(make_router: MakeRouter, tmp_path: Path) -> None:
    """A new one begins with a model that is not loaded; one of another model continues once that is."""
    router = make_router("--n-predict", "8")
    assert say(router, "tales", "the red otter").status_code == 200
    with open_browser() as browser:
        page = browser.new_page()
        page.set_default_timeout(WAIT_MS)
        page.goto(router.url + "/towerd/#/new")
        page.select_option("main select", "dice")
        page.fill("#write", "!!! a roll")
        page.keyboard.press("Enter")
        page.wait_for_url("**/#/chat/chat-*")
        page.wait_for_selector("button:has-text('Regenerate')")
        assert page.input_value("#models") == "dice"
        assert page.inner_text(".about summary").startswith("dice")
        page.screenshot(path=screenshots(tmp_path) / "models-chat.png")
        requests.post(router.url + "/models/unload", json={"model": "tales"}, timeout=30)
        until(lambda: states(router)["tales"] == "unloaded")
        page.click(".list a:has-text('the red otter')")
        page.wait_for_selector("pre.text:has-text('the red otter')")
        assert not page.is_visible("#write")
        page.click("button:has-text('Continue with tales')")
        page.fill("#write", "swims")
        page.keyboard.press("Enter")
        page.wait_for_selector("[role=status]:has-text('tokens were there')")
        assert page.input_value("#models") == "tales"
        assert len(router.get("/towerd/v1/sessions/twin?model=tales")["turns"]) == 2
