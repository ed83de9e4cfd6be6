"""The clients of first_hour.sh: a browser on the chat page, and the `openai` package with a tool.

    first_hour.py chat-page URL FOLDER
    first_hour.py tool-model FILE
    first_hour.py tool-call URL

Those that are installed with towerd suffice for `tool-model`; the others take playwright and openai.

Each fails with a sentence where what it needs is missing."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tool_callers import ARGUMENTS, FAMILIES, TOOL

FUNCTION = {
    "name": TOOL,
    "parameters": {
        "type": "object",
        "properties": {"city": {"type": "string"}},
        "required": ["city"],
    },
}
WAIT_MS = 30_000


def chat_page(url: str, folder: str) -> None:
    """Say something on the page at `/`, and take its picture once it shows an answer. The page
    must ask nobody but the daemon for anything."""
    from browser import executable, screenshots
    from playwright.sync_api import Error, sync_playwright

    root = ["--no-sandbox"] if os.getuid() == 0 else []
    with sync_playwright() as playwright:
        try:
            browser = playwright.chromium.launch(executable_path=executable(), args=root)
        except Error as error:
            raise SystemExit(f"no Chromium is here: {str(error).splitlines()[0]}") from None
        page = browser.new_page()
        page.set_default_timeout(WAIT_MS)
        asked: list[str] = []
        page.on("request", lambda request: asked.append(request.url))
        page.goto(url + "/")
        explorer = page.locator("#notice:has-text('make ui')")
        page.wait_for_selector("textarea, #notice:has-text('make ui')")
        if explorer.count():
            raise SystemExit("the daemon has no chat page")
        page.fill("textarea", "Tell me about a purple dog.")
        page.keyboard.press("Enter")
        page.wait_for_selector("text=/[0-9.]+ t\\/s/")
        picture = screenshots(Path(folder)) / "chat-page.png"
        page.screenshot(path=picture)
        browser.close()
    foreign = [one for one in asked if not one.startswith((url, "data:", "blob:"))]
    if foreign:
        raise SystemExit(f"the chat page asks others: {foreign}")
    print(f"{picture.stat().st_size:,} bytes of picture")


def tool_model(path: str) -> None:
    """Write the GGUF of a model that calls the tool whatever it is told, as Qwen3 would."""
    from scripted_model import make_scripted_model

    make_scripted_model(
        Path(path), FAMILIES["NousResearch-Hermes-2-Pro-Llama-3-8B-tool_use"].script
    )


def tool_call(url: str) -> None:
    """Have the model call the tool, and send it the result, after which it calls again."""
    from openai import OpenAI

    tools: Any = [{"type": "function", "function": FUNCTION}]
    messages: list[Any] = [{"role": "user", "content": "How is the weather in Paris?"}]
    with OpenAI(
        base_url=url + "/v1", api_key="none", max_retries=0, timeout=WAIT_MS / 1000
    ) as client:
        for result in ("Sun.", "Rain."):
            reply = client.chat.completions.create(model="any", messages=messages, tools=tools)
            choice = reply.choices[0]
            calls: Any = choice.message.tool_calls or []
            asked = [(call.function.name, json.loads(call.function.arguments)) for call in calls]
            if asked != [(TOOL, json.loads(ARGUMENTS))] or choice.finish_reason != "tool_calls":
                raise SystemExit(f"the model was to call {TOOL}{ARGUMENTS}, and said: {choice}")
            messages.append(choice.message.model_dump(exclude_none=True))
            messages.append({"role": "tool", "tool_call_id": calls[0].id, "content": result})


STEPS: dict[str, Callable[..., None]] = {
    "chat-page": chat_page,
    "tool-model": tool_model,
    "tool-call": tool_call,
}

if __name__ == "__main__":
    STEPS[sys.argv[1]](*sys.argv[2:])
