"""The agent programs that `agent_sessions.py` tries: where each comes from, how it is told of towerd, and how
one session with it is held. `{url}`, `{home}` and `{work}` stand for the daemon, the program's
home and the folder that it works in."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

NOTES = "notes.txt"
OPEN_WEBUI = str(Path(__file__).resolve().parents[1] / "agents" / "open_webui_session.py")
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
    setup: tuple[str, ...] = ()
    """A command that tells it of towerd, once."""
    shown: tuple[str, ...] = ()
    """What a person types, if it is not `first`."""
    remark: str = ""
    """What a reader of the table has to know."""
    launch: str = ""
    """Its name for `towerctl launch`; none: it has none."""
    launch_words: tuple[str, ...] = ()
    """What else stands before the words of `first` and `second` there, in place of its files."""


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
        launch="claude",
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
        launch="codex",
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
        launch="opencode",
    ),
    Client(
        title="Qwen Code", registry="npm", package="@qwen-code/qwen-code",
        endpoint="/v1/chat/completions",
        first=("qwen", "--auth-type", "openai", "-p", QUESTION),
        second=("qwen", "--auth-type", "openai", "--continue", "-p", AGAIN),
        tool="read_file", arguments={"file_path": "{work}/notes.txt"},
        env={"OPENAI_BASE_URL": "{url}/v1", "OPENAI_API_KEY": "none", "OPENAI_MODEL": "local"},
        launch="qwen",
        remark="After each answer it asks once more, with other instructions of 9,600 tokens. These are evaluated.",
    ),
    Client(
        title="Cline", registry="npm", package="cline", endpoint="/v1/chat/completions",
        setup=(
            "cline", "auth", "-p", "openai-compatible", "-k", "none", "-m", "local",
            "-b", "{url}/v1",
        ),
        first=("cline", QUESTION),
        second=("cline", f"{QUESTION} {AGAIN}"),
        tool="read_files", arguments={"files": [{"path": "{work}/notes.txt"}]},
        remark="This is its command line. It resumes a session only in a terminal, so the second question begins a new session.",
    ),
    Client(
        title="Continue", registry="npm", package="@continuedev/cli",
        endpoint="/v1/chat/completions",
        first=("cn", "-p", "--config", "{home}/.continue/config.yaml", QUESTION),
        second=("cn", "-p", "--config", "{home}/.continue/config.yaml", "--resume", AGAIN),
        tool="Read", arguments={"filepath": "{work}/notes.txt"},
        files={
            "{home}/.continue/config.yaml": """name: local
version: 0.0.1
schema: v1
models:
  - name: local
    provider: openai
    model: local
    apiBase: {url}/v1
    apiKey: none
    roles: [chat]
"""
        },
        remark="This is its command line. The VS Code extension reads the same file.",
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
        launch="aider",
        launch_words=(
            "--no-show-model-warnings", "--analytics-disable", "--no-check-update", "--no-git",
            "--yes-always",
        ),
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
    Client(
        title="Open WebUI", registry="PyPI", package="open-webui", endpoint="/v1/chat/completions",
        first=("python", OPEN_WEBUI, QUESTION),
        second=("python", OPEN_WEBUI, AGAIN),
        shown=("open-webui", "serve", "--port", "8081"),
        tool="read_notes", arguments={"name": "{work}/notes.txt"},
        env={
            "OPENAI_API_BASE_URL": "{url}/v1", "OPENAI_API_KEY": "none", "WEBUI_AUTH": "False",
        },
        remark="Tried with a tool in its own format, and asked over HTTP as its page does, including titles and tags. Its Ollama connection works as well: set `OLLAMA_BASE_URL=http://127.0.0.1:8080` and `ENABLE_OPENAI_API=False` instead of the first two variables. Titles, tags and follow-up questions are asked beside a chat and do not disturb its rows. It runs on another port because its default, 8080, is towerd's.",
    ),
    Client(
        title="openai", registry="PyPI", package="openai", endpoint="/v1/chat/completions",
        first=("python", "{work}/chat.py", QUESTION),
        second=("python", "{work}/chat.py", AGAIN),
        tool="read_notes", arguments={"name": NOTES},
        files={
            "{work}/chat.py": '''import json, sys
from pathlib import Path
from openai import OpenAI

schema = {"type": "object", "properties": {"name": {"type": "string"}}, "required": ["name"]}
tool = {"name": "read_notes", "description": "Reads a file of notes.", "parameters": schema}
client = OpenAI(base_url="{url}/v1", api_key="none")
kept = Path("chat.json")
messages = json.loads(kept.read_text()) if kept.exists() else []
messages.append({"role": "user", "content": sys.argv[1]})
while messages[-1]["role"] != "assistant":
    with client.chat.completions.stream(
        model="local", messages=messages, tools=[{"type": "function", "function": tool}]
    ) as stream:
        for event in stream:
            if event.type == "content.delta":
                print(event.delta, end="", flush=True)
        reply = stream.get_final_completion().choices[0].message
    messages.append(reply.model_dump(exclude_none=True))
    for call in reply.tool_calls or []:
        text = Path(json.loads(call.function.arguments)["name"]).read_text()
        messages.append({"role": "tool", "tool_call_id": call.id, "content": text})
kept.write_text(json.dumps(messages))
'''
        },
        remark="Your own agent in a few lines, streamed.",
    ),
    Client(
        title="anthropic", registry="PyPI", package="anthropic", endpoint="/v1/messages",
        first=("python", "{work}/chat.py", QUESTION),
        second=("python", "{work}/chat.py", AGAIN),
        tool="read_notes", arguments={"name": NOTES},
        files={
            "{work}/chat.py": '''import pickle, sys
from pathlib import Path
from anthropic import Anthropic

schema = {"type": "object", "properties": {"name": {"type": "string"}}, "required": ["name"]}
tool = {"name": "read_notes", "description": "Reads a file of notes.", "input_schema": schema}
client = Anthropic(base_url="{url}", api_key="none")
kept = Path("chat.pickle")
messages = pickle.loads(kept.read_bytes()) if kept.exists() else []
messages.append({"role": "user", "content": sys.argv[1]})
while messages[-1]["role"] == "user":
    with client.messages.stream(
        model="local", max_tokens=1024, messages=messages, tools=[tool]
    ) as stream:
        for text in stream.text_stream:
            print(text, end="", flush=True)
        reply = stream.get_final_message()
    messages.append({"role": "assistant", "content": reply.content})
    results = [
        {"type": "tool_result", "tool_use_id": block.id, "content": Path(block.input["name"]).read_text()}
        for block in reply.content
        if block.type == "tool_use"
    ]
    if results:
        messages.append({"role": "user", "content": results})
kept.write_bytes(pickle.dumps(messages))
'''
        },
        remark="Your own agent in a few lines, streamed.",
    ),
    Client(
        title="llm-ollama", registry="PyPI", package="llm-ollama", endpoint="/api/chat",
        first=("llm", "-m", "ollama/model.gguf", "--functions", "{work}/tools.py", QUESTION),
        second=(
            "llm", "-m", "ollama/model.gguf", "--functions", "{work}/tools.py", "--continue", AGAIN,
        ),
        tool="read_notes", arguments={"name": NOTES},
        env={"OLLAMA_HOST": "{url}"},
        files={
            "{work}/tools.py": '''def read_notes(name: str) -> str:
    """Reads a file of notes."""
    return open(name).read()
''',
        },
        remark="Name the model as `/api/tags` lists it.",
    ),
    Client(
        title="ollama", registry="PyPI", package="ollama", endpoint="/api/chat",
        first=("python", "{work}/chat.py", QUESTION),
        second=("python", "{work}/chat.py", AGAIN),
        tool="read_notes", arguments={"name": NOTES},
        files={
            "{work}/chat.py": '''import json, sys
from pathlib import Path
from ollama import Client

def read_notes(name: str) -> str:
    """Reads a file of notes."""
    return Path(name).read_text()

client = Client(host="{url}")
kept = Path("chat.json")
messages = json.loads(kept.read_text()) if kept.exists() else []
messages.append({"role": "user", "content": sys.argv[1]})
while messages[-1]["role"] != "assistant":
    reply = {"role": "assistant", "content": "", "thinking": "", "tool_calls": []}
    for part in client.chat(model="local", messages=messages, tools=[read_notes], stream=True):
        print(part.message.content, end="", flush=True)
        reply["content"] += part.message.content
        reply["thinking"] += part.message.thinking or ""
        reply["tool_calls"] += [call.model_dump() for call in part.message.tool_calls or []]
    messages.append(reply)
    for call in reply["tool_calls"]:
        text = read_notes(**call["function"]["arguments"])
        messages.append({"role": "tool", "tool_name": "read_notes", "content": text})
kept.write_text(json.dumps(messages))
'''
        },
        remark="Your own agent in a few lines, streamed.",
    ),
)  # fmt: skip
