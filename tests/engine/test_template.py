from __future__ import annotations

import copy
import json
import os
import re
import socket
import subprocess
import sys
import time
import urllib.request
from pathlib import Path
from typing import Any

import pytest
from jinja2.sandbox import ImmutableSandboxedEnvironment

import towerd.engine.base
from towerd.engine.embedded import template
from towerd.engine.embedded.template import ChatTemplate
from towerd.errors import InvalidRequest, ModelError, NotSupported

TEMPLATE_DIR = os.environ.get("TOWERD_TEST_TEMPLATES", "")
"""A folder of Jinja chat templates, such as `models/templates` of llama.cpp's source."""
TEMPLATES = sorted(Path(TEMPLATE_DIR).glob("*.jinja")) if TEMPLATE_DIR else []

BUNDLED = Path(towerd.engine.base.__file__).parents[1] / "data" / "stories260K.gguf"
SERVER = Path(sys.prefix, "lib", f"python3.{sys.version_info.minor}", "site-packages", "bin",
              "llama-server")  # fmt: skip

PLAIN = (
    "{{ bos_token }}{% for message in messages %}\n"
    "[{{ message['role'] }}] {{ message['content'] }}{{ eos_token }}\n"
    "{% endfor %}\n"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)
TYPED = (
    "{% for m in messages %}{{ m.role }}:{% for p in m.content %}<{{ p.text }}>{% endfor %};"
    "{% endfor %}"
)
THINKING = (
    "{% for m in messages %}<|{{ m.role }}|>"
    "{% if m.role == 'assistant' and m.reasoning_content %}"
    "<think>\n{{ m.reasoning_content }}\n</think>\n\n{% endif %}{{ m.content }}<|end|>"
    "{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% if not enable_thinking %}"
    "<think>\n\n</think>\n\n{% endif %}{% endif %}"
)
NO_SYSTEM = (
    "{% for m in messages %}{% if m.role == 'system' %}"
    "{{ raise_exception('System role not supported') }}{% endif %}"
    "{{ m.role }}={{ m.content }};{% endfor %}"
)
TOOLS = (
    "{% if tools %}TOOLS{{ tools | tojson }}{% endif %}{% for m in messages %}"
    "{% for c in m.tool_calls or [] %}CALL {{ c.function.name }} "
    "{% for k, v in c.function.arguments.items() %}{{ k }}={{ v }} {% endfor %}{% endfor %}"
    "{{ m.role }}:{{ m.content }};{% endfor %}"
)


def user(content: Any = "Hi") -> dict[str, Any]:
    return {"role": "user", "content": content}


def assistant(content: Any = "Yo", **more: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": content, **more}


def render(source: str, *messages: Any, **body: Any) -> str:
    return ChatTemplate(source, "<s>", "</s>").render({"messages": list(messages), **body})


@pytest.mark.parametrize("source", ["", "chatml"])
def test_without_a_template_it_is_chatml(source: str) -> None:
    out = render(source, {"role": "system", "content": "S"}, user())
    assert out == (
        "<|im_start|>system\nS<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    )


def test_blocks_are_trimmed_and_the_generation_prompt_is_optional() -> None:
    assert render(PLAIN, user()) == "<s>[user] Hi</s>\n[assistant]"
    assert render(PLAIN, user(), add_generation_prompt=False) == "<s>[user] Hi</s>\n"
    assert render(PLAIN, user(), add_generation_prompt=None) == "<s>[user] Hi</s>\n[assistant]"


def test_bos_and_eos_are_not_doubled() -> None:
    source = "{{ bos_token }}{{ messages[0].content }}{{ eos_token }}"
    assert render(source, user()) == "<s>Hi</s>"
    cut = ChatTemplate(source, "<s>", "</s>", add_bos=True, add_eos=True)
    assert cut.render({"messages": [user()]}) == "Hi"
    assert ChatTemplate("x", "", "", add_bos=True).render({"messages": []}) == "x"


def test_a_begun_reply_is_continued() -> None:
    assert render(PLAIN, user(), assistant("The sky")) == "<s>[user] Hi</s>\n[assistant]The sky"
    assert render("", user(), assistant("The sky")).endswith("<|im_start|>assistant\nThe sky")
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert render("", user(), assistant(parts)).endswith("assistant\na\n\nb")


def test_a_begun_reply_of_a_thinking_model() -> None:
    opened = "<|user|>Hi<|end|><|assistant|>"
    assert render(THINKING, user()) == opened
    assert render(THINKING, user(), assistant("A")) == opened + "<think>\n\n</think>\n\nA"
    assert (
        render(THINKING, user(), assistant("A", reasoning_content="R"))
        == opened + "<think>\nR\n</think>\n\nA"
    )
    assert render(THINKING, user(), assistant("", reasoning_content="R")) == opened + "<think>\nR"


def test_markup_before_the_visible_text_belongs_to_a_begun_reply() -> None:
    source = (
        "{% for m in messages %}<|{{ m.role }}|>{% if m.role == 'assistant' %}<|final|>{% endif %}"
        "{{ m.content }}<|end|>{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
    )
    want = "<|user|>Hi<|end|><|assistant|><|final|>Yo"
    assert render(source, user(), assistant()) == want


def test_contradictory_continuations_are_refused() -> None:
    with pytest.raises(InvalidRequest, match="2 or more assistant"):
        render("", user(), assistant(), assistant())
    with pytest.raises(InvalidRequest, match="both"):
        render("", user(), assistant(), continue_final_message=True)
    call = {"type": "function", "function": {"name": "f", "arguments": "{}"}}
    with pytest.raises(InvalidRequest, match="tool calls"):
        render(TOOLS, user(), assistant("x", tool_calls=[call]))
    out = render("", user(), assistant(), continue_final_message=True, add_generation_prompt=False)
    assert out.endswith("assistant\nYo")


def test_text_parts_are_joined_by_newlines_or_passed_on() -> None:
    parts = [{"type": "text", "text": "A"}, {"type": "text", "text": "B"}]
    assert "[user] A\nB</s>" in render(PLAIN, user(parts))
    assert render(TYPED, user(parts)) == "user:<A><B>;"
    assert render(TYPED, user("A")) == "user:<A>;", "text becomes a part where parts are needed"
    assert "[user] </s>" in render(PLAIN, user([]))
    assert "[user] </s>" in render(PLAIN, user(None))


def test_a_system_message_joins_the_first_one_where_the_role_is_unknown() -> None:
    system = {"role": "system", "content": "S"}
    assert render(NO_SYSTEM, system, user()) == "user=S\nHi;"
    assert render(NO_SYSTEM, system) == ""
    assert render(PLAIN, {"role": "developer", "content": "D"}).startswith("<s>[system] D")


def test_tools_and_calls() -> None:
    tool = {"type": "function", "function": {"name": "get", "parameters": {"type": "object"}}}
    call = {"id": "1", "type": "function", "function": {"name": "get", "arguments": '{"x": "é"}'}}
    out = render(
        TOOLS, user(), assistant(None, tool_calls=[call]),
        {"role": "tool", "tool_call_id": "1", "content": "42"}, tools=[tool],
    )  # fmt: skip
    assert out == (
        'TOOLS[{"type": "function", "function": {"name": "get", "description": "", '
        '"parameters": {"type": "object"}}}]user:Hi;CALL get x=é assistant:;tool:42;'
    )
    broken = {"type": "function", "function": {"name": "get", "arguments": "{"}}
    with pytest.raises(InvalidRequest, match="not JSON"):
        render(TOOLS, user(), assistant("", tool_calls=[broken]), user())


def test_kwargs_are_variables() -> None:
    source = "{{ style }}{% if enable_thinking %}T{% endif %}<think>{{ reasoning_effort }}"
    kwargs = {"style": {"a": 1}}
    assert render(source, chat_template_kwargs=kwargs) == "{'a': 1}T<think>"
    assert render(source, chat_template_kwargs={"enable_thinking": False}) == "<think>"
    assert render(source, reasoning_effort="none") == "<think>"
    assert render(source, reasoning_effort="high") == "T<think>high"
    with pytest.raises(InvalidRequest):
        render(source, chat_template_kwargs=[1])
    with pytest.raises(InvalidRequest, match="boolean"):
        render(source, chat_template_kwargs={"enable_thinking": "yes"})


def test_helpers_of_chat_templates() -> None:
    assert render("{{ {'a': '<é>'} | tojson }}") == '{"a": "<é>"}'
    assert render("{{ [1] | tojson(indent=2) }}") == "[\n  1\n]"
    assert len(render("{{ strftime_now('%Y') }}")) == 4
    assert (
        render("{% for i in [1,2,3] %}{% if i == 2 %}{% break %}{% endif %}{{ i }}{% endfor %}")
        == "1"
    )
    assert render("{% generation %}x{% endgeneration %}") == "x"
    assert render("{% set l = [] %}{% set _ = l.append(1) %}{{ l }}") == "[1]"
    assert render("{{ 'a' + nothing.at.all + 'b' }}") == "ab"


def test_the_template_may_refuse() -> None:
    with pytest.raises(InvalidRequest, match="not like this"):
        render("{{ raise_exception('not like this') }}")
    with pytest.raises(InvalidRequest, match="failed"):
        render("{{ 1 / 0 }}")


@pytest.mark.parametrize(
    "source",
    [
        "{{ ''.__class__.__mro__ }}",
        "{{ messages.__class__.__base__.__subclasses__() }}",
        "{{ raise_exception.__globals__ }}",
        "{{ cycler.__init__.__globals__.os }}",
        "{% for i in range(99999999) %}{% endfor %}",
    ],
)
def test_the_sandbox_holds(source: str) -> None:
    try:
        out = render(source, user())
    except InvalidRequest:
        return
    assert out == "", "attributes of Python's own do not exist"


def test_client_data_is_not_a_template() -> None:
    assert "{{ 1 + 1 }}" in render(PLAIN, user("{{ 1 + 1 }}"))


def test_a_broken_template_is_named_at_load() -> None:
    with pytest.raises(ModelError, match="does not compile"):
        ChatTemplate("{% for %}", "", "")


def test_the_request_is_not_changed() -> None:
    call = {"type": "function", "function": {"name": "f", "arguments": "{}"}}
    body = {"messages": [user(), assistant(None, tool_calls=[call]), user()]}
    before = copy.deepcopy(body)
    source = "{% for m in messages %}{% set _ = (m.tool_calls or []).append(1) %}{% endfor %}"
    ChatTemplate(source, "", "").render(body)
    assert body == before


@pytest.mark.parametrize(
    ("messages", "where"),
    [
        (None, "'messages' is required"),
        ({"role": "user"}, "'messages' must be an array"),
        (["x"], r"messages\[0\] must be an object"),
        ([user(), {"content": "x"}], r"messages\[1\].role"),
        ([{"role": 3, "content": "x"}], r"messages\[0\].role"),
        ([{"role": "user"}], r"messages\[0\] must have content"),
        ([{"role": "assistant"}], r"content or tool_calls"),
        ([user(3)], r"messages\[0\].content must be"),
        ([user(["x"])], r"messages\[0\].content\[0\]"),
        ([user([{"text": "x"}])], r"content\[0\] must be an object with a type"),
        ([user([{"type": "text"}])], r"content\[0\].text"),
        ([user([{"type": "odd"}])], r"content\[0\].type 'odd'"),
        ([assistant(tool_calls={})], r"tool_calls must be an array"),
        ([assistant(tool_calls=[{"type": "function"}])], r"tool_calls\[0\].function"),
        ([assistant(reasoning_content=3)], r"reasoning_content must be a string"),
    ],
)
def test_bad_messages_are_named(messages: Any, where: str) -> None:
    with pytest.raises(InvalidRequest, match=where):
        ChatTemplate("", "", "").render({"messages": messages})


@pytest.mark.parametrize("tools", [3, [3], [{"type": "x"}], [{"type": "function"}]])
def test_bad_tools_are_refused(tools: Any) -> None:
    with pytest.raises(InvalidRequest, match="tools"):
        render("", user(), tools=tools)


@pytest.mark.parametrize("kind", ["image_url", "input_audio", "input_video"])
def test_media_are_not_supported(kind: str) -> None:
    with pytest.raises(NotSupported, match=kind):
        render("", user([{"type": kind, kind: {"url": "data:,"}}]))


ORACLE_BODIES: list[dict[str, Any]] = [
    {"messages": [user("Hi é")]},
    {"messages": [{"role": "system", "content": "S"}, user(), assistant(), user("more")]},
    {"messages": [user([{"type": "text", "text": "A"}, {"type": "text", "text": "B"}])]},
    {"messages": [user()], "add_generation_prompt": False},
    {"messages": [user(), assistant("The sky")]},
    {"messages": [user()], "chat_template_kwargs": {"enable_thinking": False}},
]


@pytest.mark.parametrize("source", ["", PLAIN, TYPED, THINKING, NO_SYSTEM, TOOLS])
def test_the_same_prompts_as_llama_server(source: str, tmp_path: Path) -> None:
    if not SERVER.exists() or not BUNDLED.exists():
        pytest.skip("llama-server is not installed")
    (tmp_path / "t.jinja").write_text(source or "chatml")
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port = sock.getsockname()[1]
    command = [str(SERVER), "-m", str(BUNDLED), "--port", str(port), "-c", "256", "-np", "1",
               "-t", "1", "--no-warmup", "--no-webui", "--jinja", "--chat-template-file",
               str(tmp_path / "t.jinja")]  # fmt: skip
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    url = f"http://127.0.0.1:{port}"
    try:
        props = _get(url + "/props", process)
        template = ChatTemplate(source, props["bos_token"], props["eos_token"], add_bos=True)
        for body in ORACLE_BODIES:
            data = json.dumps(body).encode()
            headers = {"Content-Type": "application/json"}
            request = urllib.request.Request(url + "/apply-template", data, headers)
            with urllib.request.urlopen(request, timeout=30) as reply:
                assert template.render(body) == json.load(reply)["prompt"], body
    finally:
        process.terminate()
        process.wait(10)


def _get(url: str, process: subprocess.Popen[bytes]) -> dict[str, Any]:
    for _ in range(600):
        assert process.poll() is None, "llama-server ended"
        try:
            with urllib.request.urlopen(url, timeout=2) as reply:
                answer: dict[str, Any] = json.load(reply)
                return answer
        except OSError:
            time.sleep(0.05)
    raise AssertionError("llama-server did not start")


@pytest.mark.model
@pytest.mark.parametrize("path", TEMPLATES or [None], ids=lambda p: p.stem if p else "none")
def test_real_templates_render(path: Path | None) -> None:
    if path is None:
        pytest.skip("TOWERD_TEST_TEMPLATES is not set")
    template = ChatTemplate(path.read_text(), "<s>", "</s>")
    history = [user("First"), assistant("Answer"), user("Second")]
    out = template.render({"messages": history})
    positions = [out.find(word) for word in ("First", "Second")]
    assert -1 < positions[0] < positions[1]
    again = template.render({"messages": history, "add_generation_prompt": False})
    assert out.startswith(again[: positions[1]])
    assert template.render({"messages": [user("First"), assistant("So I")]}).endswith("So I")


class Plain(template._Sandbox):
    """jinja2's own way to attributes and macros."""

    getattr = ImmutableSandboxedEnvironment.getattr
    call = ImmutableSandboxedEnvironment.call


@pytest.mark.parametrize(
    "source",
    [
        "{{ m.role }}{{ m.content }}{{ m.gone }}{{ m.gone.deeper }}{{ m.items() | list }}",
        "{{ m.get('role') }}{{ m.keys }}{{ m.update }}{{ m.__class__ }}{{ m._x }}{{ m.mro }}",
        "{% for x in n %}{{ loop.first }}{{ loop.last }}{{ loop.index }}{{ loop.index0 }}"
        "{{ loop.length }}{{ loop.previtem }}{{ loop.nextitem }}{{ loop._iterable }}"
        "{{ loop.cycle(1, 2) }}{{ loop.changed(x) }}{% endfor %}",
        "{{ m.content.startswith('H') }}{{ m.content.strip() }}{{ m.content.upper() }}"
        "{{ m.content.format }}{{ m.content.__len__ }}{{ '{0.__class__}'.format(m) }}",
        "{% macro f(a, b=2) %}{{ a }}{{ b }}{{ varargs }}{{ kwargs }}{{ caller is defined }}"
        "{% endmacro %}{{ f(1) }}{{ f(1, 3, 4) }}{{ f(a=1, context=5, obj=6) }}"
        "{% for x in n %}{{ f(x, loop.index) }}{% endfor %}"
        "{% call f(7) %}x{% endcall %}",
        "{% macro g(a) %}{{ caller() }}{{ a }}{% endmacro %}{% call g(1) %}y{% endcall %}",
        "{% macro h(a) %}{{ a }}{% endmacro %}{{ h(1, 2) }}",
        "{% macro h(a) %}{{ a }}{% endmacro %}{{ h(b=2) }}",
        "{% macro h(a) %}{{ raise_exception('no') }}{% endmacro %}{{ h(1) }}",
        "{% set ns = namespace(a=1) %}{% for x in n %}{% set ns.a = x %}{% endfor %}{{ ns.a }}",
        "{{ n.append(4) }}{{ n }}{{ m.pop('role') }}",
    ],
)
def test_the_short_ways_change_nothing(source: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Attributes and macros are what jinja2 makes of them, errors included."""
    said = []
    for kind in (template._Sandbox, Plain):
        monkeypatch.setattr(template, "_Sandbox", kind)
        made = template._environment().from_string(source)
        try:
            said.append(made.render(m={"role": "user", "content": " Hi "}, n=[1, 2, 3]))
        except Exception as error:
            said.append(f"{type(error).__name__}: {error}")
    assert re.sub(r"0x\w+", "", said[0]) == re.sub(r"0x\w+", "", said[1])


def test_a_template_cannot_change_what_it_got() -> None:
    """Not even lists, which it may change for itself: the conversation is rendered again."""
    source = "{% for m in messages %}{{ m.content.append(m.content[0]) }}{% endfor %}{{ messages }}"
    messages = [user([{"type": "text", "text": "a"}]), user([{"type": "text", "text": "b"}])]
    before = copy.deepcopy(messages)
    made = ChatTemplate(TYPED, "", "")
    made._template = template._environment().from_string(source)
    assert made.render({"messages": messages}) == made.render({"messages": messages})
    assert messages == before
