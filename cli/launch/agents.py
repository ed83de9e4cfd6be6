"""The agents that `towerctl launch` starts: what each is told of a daemon, and what it sends by itself. A new
agent is a row of AGENTS."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from towerd.cli.launch.endpoint import Endpoint

REQUEST_S_MAX = 3600
"""A long prompt that is evaluated on a CPU takes longer than agents wait by themselves."""
OUTPUT_SHARE = 4
"""A reply may take this part of the context."""


@dataclass(frozen=True, slots=True)
class AgentStart:
    """What one start of an agent is given, on top of the user's environment and words."""

    env: Mapping[str, str] = field(default_factory=dict)
    args: tuple[str, ...] = ()
    unset: tuple[str, ...] = ()
    """Variables that would lead it elsewhere."""


@dataclass(frozen=True, slots=True)
class Agent:
    """One program."""

    title: str
    program: str
    """Its name on PATH."""
    install: str
    """The command that installs it."""
    prompt_tokens: int
    """Of a short question's longest prompt: nearly all of it are its instructions and tools. `make
    agents` measures it, and docs/clients.md has it."""
    version: str
    """The one that was measured."""
    connect: Callable[[Endpoint, Path], AgentStart]
    """The folder is empty, and there until the agent ends."""


def _claude(to: Endpoint, folder: Path) -> AgentStart:
    models = ("ANTHROPIC_MODEL", *(f"ANTHROPIC_DEFAULT_{kind}_MODEL" for kind in _KINDS))
    env = {
        "ANTHROPIC_BASE_URL": to.url,
        "ANTHROPIC_AUTH_TOKEN": to.key,
        "API_TIMEOUT_MS": str(REQUEST_S_MAX * 1000),
        "CLAUDE_CODE_AUTO_COMPACT_WINDOW": str(to.n_ctx),
        "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
    }
    return AgentStart(env | dict.fromkeys(models, to.model), unset=_CLAUDE_ELSEWHERE)


_KINDS = ("HAIKU", "SONNET", "OPUS")
_CLAUDE_ELSEWHERE = ("ANTHROPIC_API_KEY", "CLAUDE_CODE_USE_BEDROCK", "CLAUDE_CODE_USE_VERTEX")


def _codex(to: Endpoint, folder: Path) -> AgentStart:
    provider = "model_providers.towerd"
    settings = {
        "model": to.model,
        "model_provider": "towerd",
        "model_context_window": to.n_ctx,
        f"{provider}.name": "towerd",
        f"{provider}.base_url": f"{to.url}/v1",
        f"{provider}.wire_api": "responses",
        f"{provider}.env_key": "TOWERD_LAUNCH_KEY",
        f"{provider}.stream_idle_timeout_ms": REQUEST_S_MAX * 1000,
    }
    # texts and numbers are spelled alike in JSON and in TOML, which -c takes
    words = (f"{name}={json.dumps(value, ensure_ascii=False)}" for name, value in settings.items())
    args = tuple(part for word in words for part in ("-c", word))
    return AgentStart({"TOWERD_LAUNCH_KEY": to.key}, args)


def _opencode(to: Endpoint, folder: Path) -> AgentStart:
    limit = {"context": to.n_ctx, "output": to.n_ctx // OUTPUT_SHARE}
    config = {
        "model": f"towerd/{to.model}",
        "small_model": f"towerd/{to.model}",
        "provider": {
            "towerd": {
                "name": "towerd",
                "npm": "@ai-sdk/openai-compatible",
                "options": {"baseURL": f"{to.url}/v1", "apiKey": to.key, "timeout": False},
                "models": {to.model: {"name": to.model, "limit": limit}},
            }
        },
    }
    return AgentStart({"OPENCODE_CONFIG_CONTENT": json.dumps(config)})


def _qwen(to: Endpoint, folder: Path) -> AgentStart:
    args = ("--auth-type", "openai", "--openai-base-url", f"{to.url}/v1", "--model", to.model)
    return AgentStart({"OPENAI_API_KEY": to.key}, args)


def _aider(to: Endpoint, folder: Path) -> AgentStart:
    about = {
        "litellm_provider": "openai",
        "mode": "chat",
        "max_input_tokens": to.n_ctx,
        "max_tokens": to.n_ctx // OUTPUT_SHARE,
        "input_cost_per_token": 0,
        "output_cost_per_token": 0,
    }
    models = folder / "models.json"
    models.write_text(json.dumps({f"openai/{to.model}": about}))
    return AgentStart(
        {
            "OPENAI_API_BASE": f"{to.url}/v1",
            "OPENAI_API_KEY": to.key,
            "AIDER_MODEL": f"openai/{to.model}",
            "AIDER_MODEL_METADATA_FILE": str(models),
            "AIDER_TIMEOUT": str(REQUEST_S_MAX),
        }
    )


AGENTS: Mapping[str, Agent] = {
    "claude": Agent(
        "Claude Code", "claude", "npm install -g @anthropic-ai/claude-code",
        27_018, "2.1.197", _claude,
    ),
    "codex": Agent(
        "Codex", "codex", "npm install -g @openai/codex",
        8_727, "0.171.0", _codex,
    ),
    "opencode": Agent(
        "opencode", "opencode", "npm install -g opencode-ai",
        9_746, "1.18.33", _opencode,
    ),
    "qwen": Agent(
        "Qwen Code", "qwen", "npm install -g @qwen-code/qwen-code",
        20_652, "0.15.10", _qwen,
    ),
    "aider": Agent(
        "aider", "aider", "pip install aider-chat",
        963, "0.86.2", _aider,
    ),
}  # fmt: skip
"""By their names on the command line."""
