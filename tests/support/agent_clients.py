"""The agent programs that `agent_sessions.py` tries: where each comes from, how it is told of towerd, and how
one session with it is held. `{url}`, `{home}` and `{work}` stand for the daemon, the program's
home and the folder that it works in."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

NOTES = "notes.txt"
QUESTION = f"What do my notes in {NOTES} say?"
AGAIN = "And once more?"


@dataclass(frozen=True)
class Client:
    """One program, and a session of two questions with it."""

    title: str
    registry: Literal["npm", "PyPI"]
    package: str
    endpoint: str
    first: tuple[str, ...]
    """Asks QUESTION; the program's name is found among what was installed."""
    second: tuple[str, ...]
    """Asks AGAIN in the same session."""
    tool: str = ""
    """The tool that the model calls first; none: it answers at once."""
    arguments: dict[str, Any] = field(default_factory=dict)
    env: dict[str, str] = field(default_factory=dict)
    files: dict[str, str] = field(default_factory=dict)
    """What stands in its home or in the folder before it starts, by path."""


CLIENTS = (
    Client(
        title="Claude Code", registry="npm", package="@anthropic-ai/claude-code",
        endpoint="/v1/messages",
        first=("claude", "-p", QUESTION, "--model", "local"),
        second=("claude", "-p", AGAIN, "--model", "local", "--continue"),
        tool="Read", arguments={"file_path": "{work}/notes.txt"},
        env={
            "ANTHROPIC_BASE_URL": "{url}", "ANTHROPIC_API_KEY": "none",
            "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
        },
    ),
    Client(
        title="Codex", registry="npm", package="@openai/codex", endpoint="/v1/responses",
        first=("codex", "exec", "--skip-git-repo-check", QUESTION),
        second=("codex", "exec", "--skip-git-repo-check", "resume", "--last", AGAIN),
        tool="exec_command", arguments={"cmd": "cat notes.txt"},
        files={
            "{home}/.codex/config.toml": """model = "local"
model_provider = "towerd"

[model_providers.towerd]
name = "towerd"
base_url = "{url}/v1"
wire_api = "responses"
"""
        },
    ),
    Client(
        title="opencode", registry="npm", package="opencode-ai", endpoint="/v1/chat/completions",
        first=("opencode", "run", QUESTION),
        second=("opencode", "run", "--continue", AGAIN),
        tool="read", arguments={"filePath": "{work}/notes.txt"},
        files={
            "{work}/opencode.json": """{
  "model": "towerd/local",
  "provider": {
    "towerd": {
      "npm": "@ai-sdk/openai-compatible",
      "options": {"baseURL": "{url}/v1"},
      "models": {"local": {"limit": {"context": 32768, "output": 4096}}}
    }
  }
}
"""
        },
    ),
    Client(
        title="aider", registry="PyPI", package="aider-chat", endpoint="/v1/chat/completions",
        first=("aider", "--message", QUESTION, NOTES),
        second=("aider", "--restore-chat-history", "--message", AGAIN, NOTES),
        env={"OPENAI_API_BASE": "{url}/v1", "OPENAI_API_KEY": "none"},
        files={
            "{home}/.aider.conf.yml": """model: openai/local
show-model-warnings: false
analytics-disable: true
check-update: false
git: false
yes-always: true
"""
        },
    ),
    Client(
        title="llm", registry="PyPI", package="llm", endpoint="/v1/chat/completions",
        first=("llm", "-m", "towerd", "--functions", "{work}/tools.py", QUESTION),
        second=("llm", "-m", "towerd", "--functions", "{work}/tools.py", "--continue", AGAIN),
        tool="read_notes", arguments={"name": NOTES},
        files={
            "{home}/.config/io.datasette.llm/extra-openai-models.yaml": """- model_id: towerd
  model_name: local
  api_base: {url}/v1
  supports_tools: true
""",
            "{work}/tools.py": '''def read_notes(name: str) -> str:
    """Reads a file of notes."""
    return open(name).read()
''',
        },
    ),
    Client(
        title="LangChain", registry="PyPI", package="langchain-openai",
        endpoint="/v1/chat/completions",
        first=("python", "{work}/agent.py", QUESTION),
        second=("python", "{work}/agent.py", AGAIN),
        tool="read_notes", arguments={"name": NOTES},
        files={
            "{work}/agent.py": '''import pickle, sys
from pathlib import Path
from langchain_core.messages import HumanMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI

@tool
def read_notes(name: str) -> str:
    """Reads a file of notes."""
    return Path(name).read_text()

chat = ChatOpenAI(base_url="{url}/v1", api_key="none", model="local").bind_tools([read_notes])
kept = Path("chat.pickle")
messages = pickle.loads(kept.read_bytes()) if kept.exists() else []
messages.append(HumanMessage(sys.argv[1]))
while not messages[-1].type == "ai" or messages[-1].tool_calls:
    messages.append(chat.invoke(messages))
    messages += [read_notes.invoke(call) for call in messages[-1].tool_calls]
kept.write_bytes(pickle.dumps(messages))
print(messages[-1].content)
'''
        },
    ),
)  # fmt: skip
