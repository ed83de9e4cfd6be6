"""The items of OpenAI's Responses as they are kept and shown: each with an id, a type and a status."""

from __future__ import annotations

import secrets
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import msgspec
from aiohttp import web

from towerd.api.http.fields import integer_query, wrong_type
from towerd.api.http.reply import encode
from towerd.errors import InvalidRequest, NotFound
from towerd.store.sessions.conversations import ContextItem

ITEMS_SHOWN_MAX = 100
_PREFIXES = {
    "message": "msg",
    "function_call": "fc",
    "function_call_output": "fco",
    "custom_tool_call": "ctc",
    "custom_tool_call_output": "ctco",
    "reasoning": "rs",
}
"""The kinds of items that a model can be told, and what their ids begin with."""
_TEXTS = {
    "function_call": ("call_id", "name", "arguments"),
    "function_call_output": ("call_id",),
    "custom_tool_call": ("call_id", "name", "input"),
    "custom_tool_call_output": ("call_id",),
}
"""The fields of each kind that are texts."""
_PARTS: dict[str, tuple[str, bool]] = {
    "message": ("content", True),
    "function_call_output": ("output", True),
    "custom_tool_call_output": ("output", True),
    "reasoning": ("summary", False),
}
"""The field of each kind that is a list of parts, and whether it may be a text."""
_PART_TEXTS = {
    "input_text": "text",
    "output_text": "text",
    "text": "text",
    "summary_text": "text",
    "reasoning_text": "text",
    "refusal": "refusal",
}
"""The kinds of parts, and the text that each needs."""
_GIVEN_PARTS = _PART_TEXTS | {"input_image": "image_url"}
"""Those of what a model did not say itself."""
ROLES = ("user", "system", "developer", "assistant")


def named_items(items: Iterable[bytes]) -> list[ContextItem]:
    """Items with an id and a type each, of which those that a request gave may lack."""
    return [_named(msgspec.json.decode(item)) for item in items]


def _named(item: dict[str, Any]) -> ContextItem:
    kind = item.get("type")
    if not isinstance(kind, str):
        kind = item["type"] = "message"
    if kind == "message":
        item.setdefault("status", "completed")
        if isinstance(text := item.get("content"), str):
            item["content"] = [_part(text, item.get("role"))]
    id = item.get("id")
    if isinstance(id, str) and id:
        return ContextItem(id, encode(item))
    id = item["id"] = f"{_PREFIXES.get(kind, 'item')}_{secrets.token_hex(24)}"
    return ContextItem(id, encode(item), is_named=False)


def _part(text: str, role: Any) -> dict[str, Any]:
    if role == "assistant":
        return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}
    return {"type": "input_text", "text": text}


def checked_items(items: Any, *, is_needed: bool) -> list[ContextItem]:
    """The items of a body, named. Raises InvalidRequest for what no model can be told."""
    if items is None and not is_needed:
        return []
    if not isinstance(items, list):
        raise wrong_type("items", "array", items)
    for place, item in enumerate(items):
        _check(item, f"items[{place}]")
    return [_named(item) for item in items]


def _check(item: Any, place: str) -> None:
    if not isinstance(item, Mapping):
        raise wrong_type(place, "object", item)
    kind = item.get("type", "message")
    if not isinstance(kind, str) or kind not in _PREFIXES:
        raise _refused(f"{place}.type", f"must be one of {', '.join(_PREFIXES)}")
    for name in _TEXTS.get(kind, ()):
        if not isinstance(item.get(name), str):
            raise _refused(f"{place}.{name}", "is required: a text")
    if kind == "message" and item.get("role") not in ROLES:
        raise _refused(f"{place}.role", f"must be one of {', '.join(ROLES)}")
    if kind in _PARTS:
        name, may_be_text = _PARTS[kind]
        if not (may_be_text and isinstance(item.get(name), str)):
            is_said = kind == "reasoning" or item.get("role") == "assistant"
            kinds = _PART_TEXTS if is_said else _GIVEN_PARTS
            _check_parts(item.get(name), f"{place}.{name}", kinds, may_be_text=may_be_text)
    if kind == "reasoning" and item.get("content") is not None:
        _check_parts(item["content"], f"{place}.content", _PART_TEXTS, may_be_text=False)


def _check_parts(parts: Any, place: str, kinds: Mapping[str, str], *, may_be_text: bool) -> None:
    if not isinstance(parts, list):
        either = "a text, or " if may_be_text else ""
        raise _refused(place, f"is required: {either}a list of parts")
    for number, part in enumerate(parts):
        at = f"{place}[{number}]"
        if not isinstance(part, Mapping):
            raise _refused(at, "must be an object")
        kind = part.get("type")
        if not isinstance(kind, str) or kind not in kinds:
            raise _refused(f"{at}.type", f"must be one of {', '.join(kinds)}")
        if not isinstance(part.get(kinds[kind]), str):
            raise _refused(f"{at}.{kinds[kind]}", "is required: a text")


def _refused(place: str, why: str) -> InvalidRequest:
    return InvalidRequest(f"Field '{place}' {why}", param=place)


METADATA_PAIRS_MAX = 16
METADATA_KEY_CHARS_MAX = 64
METADATA_VALUE_CHARS_MAX = 512


def checked_metadata(value: Any) -> dict[str, str]:
    """What a client notes of a response or a conversation; null is nothing. Raises InvalidRequest."""
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise wrong_type("metadata", "object", value)
    is_right = len(value) <= METADATA_PAIRS_MAX and all(
        isinstance(text, str)
        and len(key) <= METADATA_KEY_CHARS_MAX
        and len(text) <= METADATA_VALUE_CHARS_MAX
        for key, text in value.items()
    )
    if not is_right:
        raise InvalidRequest(
            f"Field 'metadata' may have {METADATA_PAIRS_MAX} keys of {METADATA_KEY_CHARS_MAX} characters, "
            f"with texts of {METADATA_VALUE_CHARS_MAX}",
            param="metadata",
        )
    return value


# ---- pages of items ------------------------------------------------------------------------------


class ItemQuery(msgspec.Struct, frozen=True):
    """Which items are asked for."""

    after: str
    limit: int
    oldest_first: bool

    @classmethod
    def of(cls, request: web.Request) -> ItemQuery:
        """That of a request's query. Raises InvalidRequest."""
        order = request.query.get("order", "desc")
        if order not in ("asc", "desc"):
            raise InvalidRequest("Query parameter 'order' must be asc or desc", param="order")
        limit = integer_query(request, "limit", 20, 1, ITEMS_SHOWN_MAX)
        return cls(request.query.get("after", ""), limit, order == "asc")

    def page(self, items: Sequence[bytes]) -> bytes:
        """The page of these items, which are all, the oldest first. Raises NotFound."""
        named = _told_apart(named_items(items))
        if not self.oldest_first:
            named.reverse()
        start = 0
        if self.after:
            names = [item.name for item in named]
            if self.after not in names:
                raise NotFound(f"Item with id '{self.after[:100]}' not found.", param="after")
            start = names.index(self.after) + 1
        shown = named[start : start + self.limit]
        return listed([item.body for item in shown], has_more=start + self.limit < len(named))


def _told_apart(items: Iterable[ContextItem]) -> list[ContextItem]:
    """These items with unique ids: a later one of an id that is taken gets one made of it, the same each time."""
    apart: dict[str, ContextItem] = {}
    counts: Counter[str] = Counter()
    for item in items:
        name = item.name
        while name in apart:
            counts[item.name] += 1
            name = f"{item.name}_{counts[item.name] + 1}"
        apart[name] = item if name == item.name else item.renamed(name)
    return list(apart.values())


class _NamedItem(msgspec.Struct):
    id: str


def listed(items: Sequence[bytes], *, has_more: bool = False) -> bytes:
    """JSON of a page of items."""
    ends = (
        [msgspec.json.decode(items[at], type=_NamedItem).id for at in (0, -1)]
        if items
        else [None] * 2
    )
    data = msgspec.Raw(b"[" + b",".join(items) + b"]")
    return encode(
        {
            "object": "list",
            "data": data,
            "first_id": ends[0],
            "last_id": ends[1],
            "has_more": has_more,
        }
    )
