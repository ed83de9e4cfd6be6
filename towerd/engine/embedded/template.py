"""Chat requests to prompt text: the model's Jinja template, used as llama-server uses it."""

from __future__ import annotations

import copy
import datetime
import json
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.runtime import Context, LoopContext, Macro
from jinja2.sandbox import ImmutableSandboxedEnvironment

from towerd.engine.embedded.messages import parse_messages, parse_tools, wants_continuation
from towerd.errors import InvalidRequest, ModelError

CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
"""Stands in for a model without a template, as in llama-server."""

_THINK = ("<think>", "</think>")
_THINK_START = re.compile(r"(?:<[^<>\n]*think[^<>\n]*>|\[think\])\s*\Z", re.IGNORECASE)
_MARKUP = re.compile(r"[<>|]")
_MARK = "towerd-mark-5c1f"
_MARK_REASONING = "towerd-mark-82ae"

_OF_DICTS = frozenset(dir(dict))
_HARMLESS: dict[type, frozenset[str]] = {
    LoopContext: frozenset({"first", "last", "index", "index0", "length", "previtem", "nextitem"}),
    str: frozenset({"startswith", "endswith", "strip", "lstrip", "rstrip", "split", "upper"}),
}
"""Attributes that any template may have, of what it meets most."""

Message = dict[str, Any]


class _TemplateRaised(jinja2.TemplateError):
    """The template itself called raise_exception."""


class _Generation(Extension):
    """`{% generation %}` marks the assistant's text for training; here it does nothing."""

    tags = {"generation"}

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class _Sandbox(ImmutableSandboxedEnvironment):
    """Templates may build lists of their own; everything they get is a copy made for them."""

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        if isinstance(obj, list) and attr in ("append", "extend", "insert", "pop"):
            return True
        return super().is_safe_attribute(obj, attr, value)

    def getattr(self, obj: Any, attribute: str) -> Any:
        """A long chat asks for `message.role` and `loop.first` ten thousands of times: what jinja2
        finds, too, after an AttributeError or all its checks."""
        kind = type(obj)
        if kind is dict and attribute not in _OF_DICTS and attribute in obj:
            return obj[attribute]
        if attribute in _HARMLESS.get(kind, ()):
            return getattr(obj, attribute)
        return super().getattr(obj, attribute)

    def call(self, context: Context, obj: Any, /, *args: Any, **kwargs: Any) -> Any:
        """A macro, which is called for every message, takes its arguments as they are: jinja2 looks
        for a dozen other things first."""
        if type(obj) is not Macro:
            return super().call(context, obj, *args, **kwargs)
        kwargs.pop("_loop_vars", None)
        kwargs.pop("_block_vars", None)
        return obj(context.eval_ctx, *args, **kwargs)


class _Lenient(jinja2.ChainableUndefined):
    """Templates count on llama.cpp taking what is absent as empty text."""

    def __add__(self, other: Any) -> Any:
        return other

    __radd__ = __add__


class ChatTemplate:
    """One compiled template; `render` may be called from any thread."""

    def __init__(
        self, source: str, bos: str, eos: str, *, add_bos: bool = False, add_eos: bool = False
    ) -> None:
        """`source` "" or "chatml" is ChatML. `add_bos`, `add_eos`: tokenization adds them, so
        they are cut off the rendered text. Raises ModelError if it does not compile."""
        self.source = CHATML if source in ("", "chatml") else source
        self._bos, self._eos = bos, eos
        self._cut_bos, self._cut_eos = add_bos and bool(bos), add_eos and bool(eos)
        try:
            self._template = _environment().from_string(self.source)
        except jinja2.TemplateError as error:
            raise ModelError(
                f"The chat template does not compile: {error}; give another with "
                "--chat-template-file."
            ) from error
        words = self.source.replace("enable_thinking", "").lower()
        self._can_think = "think" in words
        self.caps = self._probe()
        """What the template can do, under the names of llama-server's chat_template_caps."""
        self._thinking = self._probe_thinking()

    def render(self, body: Mapping[str, Any]) -> str:
        """The prompt for a chat request's `messages`, `tools`, `add_generation_prompt`,
        `continue_final_message` and `chat_template_kwargs`.

        Raises InvalidRequest naming the field or the template's complaint; NotSupported for
        images and other media."""
        messages = parse_messages(body.get("messages"))
        tools = parse_tools(body.get("tools"))
        variables = _variables(body)
        last = wants_continuation(body, messages)
        if last is None:
            add = body.get("add_generation_prompt", True) is not False
            return self._apply(messages, tools, variables, add)
        text = self._apply(messages[:-1], tools, variables, False)
        return text + self._opening(messages[:-1], tools, variables, last)

    # ---- rendering --------------------------------------------------------------------------

    def _apply(
        self, messages: list[Message], tools: Any, variables: Mapping[str, Any], add: bool
    ) -> str:
        try:
            text = self._execute(
                self._adapt(messages), copy.deepcopy(tools), copy.deepcopy(variables), add
            )
        except jinja2.TemplateError as error:
            raise InvalidRequest(f"The chat template refused the messages: {error}") from error
        except (ArithmeticError, LookupError, RecursionError, TypeError, ValueError,
                AttributeError, MemoryError) as error:  # fmt: skip
            raise InvalidRequest(f"The chat template failed: {error}") from error
        if self._cut_bos:
            text = text.removeprefix(self._bos)
        return text.removesuffix(self._eos) if self._cut_eos else text

    def _execute(
        self, messages: list[Message], tools: Any, variables: Mapping[str, Any], add: bool
    ) -> str:
        # As in llama-server: absent, not false or empty, so that `is defined` tells.
        context = {
            "messages": messages,
            "bos_token": self._bos,
            "eos_token": self._eos,
            "enable_thinking": self._can_think,
            **({"tools": tools} if tools else {}),
            **variables,
            **({"add_generation_prompt": True} if add else {}),
        }
        return self._template.render(context)

    def _opening(
        self, messages: list[Message], tools: Any, variables: Mapping[str, Any], last: Message
    ) -> str:
        """The begun reply: what opens an assistant's turn, then the text there is so far."""
        without = self._apply(messages, tools, variables, False)
        opened = self._apply(messages, tools, variables, True)
        common = 0
        for a, b in zip(without, opened, strict=False):
            if a != b:
                break
            common += 1
        opening = opened[common:]
        reasoning, content = last.get("reasoning_content", ""), last["content"]
        if isinstance(content, list):
            content = "\n\n".join(part["text"] for part in content)
        if self._thinking is not None:
            start, end = self._thinking
            opening = opening.partition(start.strip())[0] + start + reasoning
            if content or not reasoning:
                opening += end
        else:
            # Some templates open the visible text with markup that the generation prompt lacks.
            marked = [*messages, {"role": last["role"], "content": _MARK}]
            own = self._apply(marked, tools, variables, False).partition(_MARK)[0]
            header = own[len(without) :]
            if opening and header.startswith(opening) and _MARKUP.search(header, len(opening)):
                opening = header
        return opening + str(content)

    def _adapt(self, messages: list[Message]) -> list[Message]:
        """Bring messages into the form the template understands."""
        out = [_copy(message) for message in messages]
        if "<|channel|>" not in self.source:
            for message in out:
                if message["role"] == "developer":
                    message["role"] = "system"
        caps = self.caps
        takes_text, by_object = caps["supports_string_content"], caps["supports_object_arguments"]
        for message in out:
            if not takes_text or type(message["content"]) is not str:
                message["content"] = _content(message["content"], caps)
            if by_object:
                _objects_for_arguments(message)
        if not caps["supports_system_role"] and out and out[0]["role"] == "system":
            first = out.pop(0)
            if out and isinstance(out[0]["content"], str) and isinstance(first["content"], str):
                out[0]["content"] = first["content"] + "\n" + out[0]["content"]
        return out

    # ---- what the template can do -----------------------------------------------------------

    def _probe(self) -> dict[str, bool]:
        user = {"role": "user", "content": _MARK}
        typed: Message = {"role": "user", "content": [{"type": "text", "text": _MARK}]}
        filler: Message = {"role": "user", "content": "x"}
        takes_string = self._shows([user])
        rendered = self._try([typed])
        takes_typed = _MARK in rendered and "'text'" not in rendered and '"text"' not in rendered
        if not takes_string and takes_typed:
            filler = {"role": "user", "content": [{"type": "text", "text": "x"}]}
        system = {**(typed if takes_typed and not takes_string else user), "role": "system"}
        arguments = {"arg": _MARK}
        by_object = self._shows([filler, _call(arguments), _RESULT])
        by_string = by_object or self._shows([filler, _call(json.dumps(arguments)), _RESULT])
        twice = _call(arguments if by_object else json.dumps(arguments))
        twice["tool_calls"] *= 2
        return {
            "supports_string_content": takes_string or not takes_typed,
            "supports_typed_content": takes_typed,
            "supports_tools": self._shows([filler], tools=[_TOOL]),
            "supports_tool_calls": by_string,
            "supports_parallel_tool_calls": by_string and self._try([filler, twice, _RESULT]) != "",
            "supports_system_role": self._shows([system, filler]),
            "supports_object_arguments": by_object,
        }

    def _probe_thinking(self) -> tuple[str, str] | None:
        """What the template puts before and after an assistant's reasoning, if it has any."""
        reply = {"role": "assistant", "content": _MARK, "reasoning_content": _MARK_REASONING}
        text = self._try([{"role": "user", "content": "x"}, reply], add=False)
        before, _, rest = text.partition(_MARK_REASONING)
        end, found, _ = rest.partition(_MARK)
        start = _THINK_START.search(before)
        if found and start:
            return start[0], end
        return _THINK if all(tag in self.source for tag in _THINK) else None

    def _try(self, messages: list[Message], tools: Any = None, add: bool = True) -> str:
        try:
            return self._execute(copy.deepcopy(messages), tools, {}, add)
        except Exception:  # a template may fail in any way when probed with what it cannot do
            return ""

    def _shows(self, messages: list[Message], tools: Any = None) -> bool:
        return _MARK in self._try(messages, tools)


_TOOL = {
    "type": "function",
    "function": {"name": _MARK, "description": "x", "parameters": {"type": "object"}},
}
_RESULT = {"role": "tool", "content": "x", "tool_call_id": "call00001"}


def _call(arguments: Any) -> Message:
    function = {"name": "f", "arguments": arguments}
    call = {"id": "call00001", "type": "function", "function": function}
    return {"role": "assistant", "content": "", "tool_calls": [call]}


def _environment() -> ImmutableSandboxedEnvironment:
    env = _Sandbox(
        undefined=_Lenient,
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=["jinja2.ext.loopcontrols", _Generation],
    )
    env.filters["tojson"] = _tojson
    env.globals["raise_exception"] = _raise
    env.globals["strftime_now"] = _strftime_now
    return env


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
        default=_plain,
    )


def _plain(value: Any) -> Any:
    if isinstance(value, jinja2.Undefined):
        return None
    if isinstance(value, Iterable):
        return list(value)
    raise TypeError(f"{type(value).__name__} is not JSON")


def _raise(message: str) -> str:
    raise _TemplateRaised(message)


def _strftime_now(pattern: str) -> str:
    return datetime.datetime.now().strftime(pattern)


def _variables(body: Mapping[str, Any]) -> dict[str, Any]:
    """Template variables besides messages and tools; the client's are plain JSON values."""
    kwargs = body.get("chat_template_kwargs")
    if kwargs is not None and not isinstance(kwargs, Mapping):
        raise InvalidRequest("chat_template_kwargs must be an object.")
    out = {
        "datetime": _strftime_now("%b %d %Y"),
        "date_string": _strftime_now("%d %b %Y"),
        **(kwargs or {}),
    }
    if "enable_thinking" in out and not isinstance(out["enable_thinking"], bool):
        raise InvalidRequest('chat_template_kwargs: "enable_thinking" must be a boolean.')
    effort = body.get("reasoning_effort")
    if effort == "none":
        out["enable_thinking"] = False
        out.pop("reasoning_effort", None)
    elif isinstance(effort, str) and effort:
        out["reasoning_effort"] = effort
    return out


def _copy(message: Message) -> Message:
    """A message of its own: a template may change lists, never objects or texts."""
    is_flat = type(message["content"]) is str and "tool_calls" not in message
    return dict(message) if is_flat else copy.deepcopy(message)


def _content(content: Any, caps: Mapping[str, bool]) -> Any:
    """Parts to text joined by newlines, or text to parts, where the template needs it."""
    if isinstance(content, list) and not caps["supports_typed_content"]:
        return "\n".join(part["text"] for part in content)
    if isinstance(content, str) and not caps["supports_string_content"]:
        return [{"type": "text", "text": content}]
    return content


def _objects_for_arguments(message: Message) -> None:
    if "tool_calls" not in message:
        return
    load: Callable[[str], Any] = json.loads
    calls = []
    for call in message["tool_calls"]:
        function = dict(call["function"])
        try:
            function["arguments"] = load(function["arguments"])
        except ValueError as error:
            raise InvalidRequest(f"Tool call arguments are not JSON: {error}.") from error
        calls.append({**call, "function": function})
    message["tool_calls"] = calls
