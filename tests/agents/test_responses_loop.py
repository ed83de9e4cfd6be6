"""An agent on /v1/responses, which sends back what it was given, item by item, as Codex does."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from agent_model import make_agent_model
from daemon import Daemon
from openai import OpenAI

TEMPLATE = Path(__file__).resolve().parents[2] / "towerd" / "data" / "templates" / "Qwen3.jinja"
CALL = json.dumps({"name": "read", "arguments": {"path": "notes.txt"}})
SCRIPT = ("<think>\nI", " read.\n</think>\n\n", "<tool_", "call>\n", CALL, "\n</tool_call>")
ANSWER = ("<think>\nNow", " I know.\n</think>\n\n", "Forty-", "two.")
TOOL: Any = {
    "type": "function",
    "name": "read",
    "description": "Reads a file.",
    "strict": False,
    "parameters": {
        "type": "object",
        "properties": {"path": {"type": "string"}},
        "required": ["path"],
    },
}
NEW_TOKENS_MAX = 100
"""A tool's answer or a question, with what the template puts around it."""


def test_responses_loop(tmp_path: Path) -> None:
    """A call, the tool's answer, a second question, streamed and not: each request evaluates what
    was added."""
    make_agent_model(tmp_path / "agent.gguf", SCRIPT, ANSWER)
    flags = (
        "-m",
        str(tmp_path / "agent.gguf"),
        "--ctx-size",
        "4096",
        "--threads",
        "1",
        "--chat-template-file",
        str(TEMPLATE),
    )
    with (
        Daemon(tmp_path / "d", *flags) as daemon,
        OpenAI(base_url=f"{daemon.url}/v1", api_key="none") as client,
    ):
        items: list[Any] = [{"role": "user", "content": "What do my notes say?"}]
        reply = client.responses.create(model="m", input=items, tools=[TOOL])
        thought, call = reply.output
        assert thought.type == "reasoning"
        assert call.type == "function_call"
        assert json.loads(call.arguments) == {"path": "notes.txt"}
        items += [
            *(item.model_dump(exclude_none=True) for item in reply.output),
            {"type": "function_call_output", "call_id": call.call_id, "output": "42."},
        ]
        with client.responses.create(model="m", input=items, tools=[TOOL], stream=True) as stream:
            last: Any = list(stream)[-1]
        assert last.type == "response.completed"
        assert last.response.output_text == "Forty-two."
        assert new_tokens(last.response.usage) <= NEW_TOKENS_MAX
        items += [
            *(item.model_dump(exclude_none=True) for item in last.response.output),
            {"role": "user", "content": "And once more?"},
        ]
        reply = client.responses.create(model="m", input=items, tools=[TOOL])
        assert reply.output_text == "Forty-two."
        assert new_tokens(reply.usage) <= NEW_TOKENS_MAX


def new_tokens(usage: Any) -> int:
    """Tokens of a prompt that were evaluated."""
    return int(usage.input_tokens - usage.input_tokens_details.cached_tokens)
