"""How the models of many families call a tool: the text that each of them generates for its chat
template, in pieces, and what of it its template renders again when the call comes back."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

TOOL = "get_weather"
ARGUMENTS = '{"city": "Paris"}'
CALL = f'{{"name": "{TOOL}", "arguments": {ARGUMENTS}}}'
_XML_CALL = f"<tool_call>\n<function={TOOL}>\n<parameter=city>\n"


@dataclass(frozen=True)
class Family:
    """A call as models of a family generate it.

    A template renders it as it was generated unless `ahead`: then what the next prompt has instead
    has to be evaluated, which is done in idle time. `thinking`: the reply begins with thoughts,
    which some clients send back and others do not."""

    script: tuple[str, ...]
    thinking: bool = False
    ahead: bool = False
    is_rendered: bool = True
    """False: the template leaves calls out of the history."""


FAMILIES: Mapping[str, Family] = MappingProxyType({
    "ByteDance-Seed-OSS": Family((
        "<seed:tool_", "call>\n", "<function=get_weather>\n", "<parameter=city>", "Paris",
        "</parameter>\n</function>\n", "</seed:tool_call>",
    )),
    "deepseek-ai-DeepSeek-V3.1": Family(
        (
            "The city is known.", "</think>", "<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>", TOOL,
            "<｜tool▁sep｜>", ARGUMENTS, "<｜tool▁call▁end｜>", "<｜tool▁calls▁end｜>",
        ),
        thinking=True, ahead=True,
    ),
    "GLM-4.6": Family(
        (
            "\n<think></think>\n", "<tool_call>", "get_weather\n", "<arg_key>city</arg_key>\n",
            "<arg_value>Paris</arg_value>\n", "</tool_call>",
        ),
    ),
    "google-gemma-4-31B-it": Family(
        ("<|tool_call>", "call:get_weather{city:", '<|"|>', "Paris", '<|"|>}', "<tool_call|>")
    ),
    "ibm-granite-granite-4.0": Family(("<tool_", "call>\n", CALL, "\n</tool_call>")),
    "LFM2-8B-A1B": Family(
        ("<|tool_call_start|>", "[get_weather(", 'city="Paris")]', "<|tool_call_end|>"),
        ahead=True, is_rendered=False,
    ),
    "meetkai-functionary-medium-v3.2": Family(("get_weather\n", ARGUMENTS)),
    "meta-llama-Llama-3.1-8B-Instruct": Family(
        ('{"name": "get_weather", ', '"parameters": ', ARGUMENTS, "}")
    ),
    "MiniMax-M2": Family(
        (
            "The city is known.\n", "</think>\n\n", "<minimax:tool_", "call>\n",
            '<invoke name="get_weather">\n<parameter name="city">', "Paris", "</parameter>\n</invoke>\n",
            "</minimax:tool_call>",
        ),
        thinking=True, ahead=True,
    ),
    "moonshotai-Kimi-K2": Family((
        "<|tool_calls_section_begin|>", "<|tool_call_begin|>", "functions.get_weather:0",
        "<|tool_call_argument_begin|>", ARGUMENTS, "<|tool_call_end|>", "<|tool_calls_section_end|>",
    )),
    "NousResearch-Hermes-2-Pro-Llama-3-8B-tool_use": Family(
        ("<tool_", "call>\n", CALL, "\n</tool_call>"), ahead=True
    ),
    "NVIDIA-Nemotron-Nano-v2": Family(
        ("The city is known.\n", "</think>\n\n", "<TOOLCALL>[", CALL, "]</TOOLCALL>"),
        thinking=True, ahead=True,
    ),
    "openai-gpt-oss-120b": Family(
        (
            "<|channel|>analysis", "<|message|>The city is known.", "<|end|>",
            "<|start|>assistant to=functions.get_weather", "<|channel|>commentary json", "<|message|>",
            ARGUMENTS, "<|call|>", "<|return|>",
        ),
        thinking=True, ahead=True,
    ),
    "Qwen-Qwen2.5-7B-Instruct": Family(("<tool_", "call>\n", CALL, "\n</tool_call>")),
    "Qwen-Qwen3-0.6B": Family(
        ("<think>\nThe city", " is known.\n</think>\n\n", "<tool_", "call>\n", CALL, "\n</tool_call>"),
        thinking=True, ahead=True,
    ),
    "Qwen3-Coder": Family((_XML_CALL, "Paris", "\n</parameter>\n</function>\n</tool_call>")),
})  # fmt: skip
"""Chat template of llama.cpp's collection -> how its model calls the tool for Paris."""
