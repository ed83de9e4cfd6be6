"""JSON schemas to GBNF, through llama-cpp-python's converter.

The converter trusts its input: it can be made to loop, recurse or allocate without end, and it
quotes wrongly. So a schema is first copied into a plain form with its sizes checked.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping
from typing import Any
from urllib.parse import unquote

import numpy as np
from llama_cpp.llama_grammar import PRIMITIVE_RULES, RESERVED_NAMES, SchemaConverter

from towerd.engine.embedded.gbnf import REPEAT_MAX, check_gbnf
from towerd.engine.embedded.grammar_cost import STARTS_MAX
from towerd.engine.embedded.int_range import int_range_gbnf
from towerd.errors import InvalidRequest, NotSupported

DEPTH_MAX = 64
NODES_MAX = 5_000
OPTIONAL_MAX = 200
"""Optional properties of one object; the grammar grows with their square."""
REPEATS_MAX = 20_000
"""All minItems, maxItems, minLength, maxLength and quantifiers of a schema together."""
PATH_CHARS_MAX = 1_024
"""Property names on the way from the root to a value; rule names repeat them."""
PATTERN_CHARS_MAX = 4_096
DATA_CHARS_MAX = 256 * 1024
"""All values of enum and const together; json writes each in one go."""

_ANY_TYPES = ("object", "array", "string", "number", "boolean", "null")
_DATA_KEYS = ("const", "enum")
_SCHEMA_LISTS = ("anyOf", "oneOf", "allOf", "prefixItems")
_BOUNDS = ("minItems", "maxItems", "minLength", "maxLength")
_INT_BOUNDS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum")
INTEGER_MAX = 2**63
BOUNDS_KEY = "towerd-bounds"
"""Where the plain form of an integer's schema has (low, high), each an int or None."""
_PATTERN = re.compile(r"(\\.)|(\[(?:\\.|[^\]\\])*\])|(\{[^}]*\}?)|([\]}])|.", re.DOTALL)
_CLASSES = {"d": "0-9", "w": "a-zA-Z0-9_", "s": " \\t\\n\\r"}
_CHAR = r'[^"\\\x7F\x00-\x1F] | [\\] (["\\/bfnrt] | "u" [0-9a-fA-F]{4})'
_DOT = r'[^"\\\x7F\x00-\x1F]'
_GBNF_ESCAPES = {"\\": "\\\\", '"': '\\"', "\n": "\\n", "\r": "\\r"}


def json_object_gbnf() -> str:
    """The grammar of any JSON object."""
    return schema_to_gbnf({"type": "object"})


def schema_to_gbnf(schema: Mapping[str, Any]) -> str:
    """The grammar of the JSON texts that a schema allows; {} allows any object.

    Bounds of integers are enforced; those of other numbers and unknown formats are not, as in
    llama.cpp's own converter.
    Raises InvalidRequest for a schema that is malformed or too large, NotSupported for a remote
    `$ref` (nothing is ever fetched)."""
    if not isinstance(schema, Mapping):
        raise InvalidRequest("The JSON schema must be an object.")
    plain = _Plain(schema).result()
    converter = _Converter(prop_order={}, allow_fetch=False, dotall=False, raw_pattern=False)
    try:
        # resolve_refs and visit recurse; _Plain has bounded the depth.
        converter.visit(converter.resolve_refs(plain, ""), "")
        grammar = str(converter.format_grammar())
    except (AssertionError, AttributeError, IndexError, KeyError, RecursionError, TypeError,
            ValueError) as error:  # fmt: skip
        reason = str(error)[:200] or type(error).__name__
        raise InvalidRequest(f"The JSON schema cannot be converted: {reason}.") from error
    check_gbnf(grammar)
    return grammar


class _Converter(SchemaConverter):  # type: ignore[misc]  # the library has no types
    """The library's converter, made to yield JSON only: literals quoted so that GBNF reads back
    the same text, and no raw control character, quote or backslash inside a string."""

    def visit(self, schema: dict[str, Any], name: str) -> str:
        if BOUNDS_KEY in schema:
            rule = f"({int_range_gbnf(*schema[BOUNDS_KEY])}) space"
            return self._add_rule(f"{name}-" if name in RESERVED_NAMES else name or "root", rule)
        return str(super().visit(schema, name))

    def _add_rule(self, name: str, rule: str) -> str:
        if rule == PRIMITIVE_RULES["char"].content:
            rule = _CHAR
        elif name == "dot":
            rule = _DOT
        return str(super()._add_rule(name, rule))

    def _format_literal(self, literal: str) -> str:
        text = json.dumps(json.loads(literal), ensure_ascii=False)
        return '"' + "".join(_GBNF_ESCAPES.get(c, c) for c in text) + '"'


class _Plain:
    """A checked deep copy of a schema in the subset that the converter understands."""

    def __init__(self, root: Mapping[str, Any]) -> None:
        self._root = root
        self._refs: dict[str, str] = {}
        self._todo: list[str] = []
        self._n_nodes = 0
        self._n_repeats = 0
        self._n_data_chars = 0

    def result(self) -> dict[str, Any]:
        out = self._schema(self._root, "", 0)
        defs: dict[str, Any] = {}
        for ref in self._todo:  # grows while it is walked
            defs[self._refs[ref]] = self._schema(self._resolve(ref), "", 1)
        if defs:
            if "$ref" in out:  # the converter does not look beside a $ref
                out = {"anyOf": [out]}
            out["$defs"] = defs
        return out

    def _schema(self, node: Any, path: str, depth: int) -> dict[str, Any]:
        self._n_nodes += 1
        if depth > DEPTH_MAX or self._n_nodes > NODES_MAX or len(path) > PATH_CHARS_MAX:
            raise InvalidRequest(
                f"The JSON schema is too large: it may nest {DEPTH_MAX} deep, with {NODES_MAX} "
                f"subschemas and {PATH_CHARS_MAX} characters of property names on one path."
            )
        if node is True:
            return {"anyOf": [{"type": name} for name in _ANY_TYPES]}
        if not isinstance(node, Mapping):
            raise InvalidRequest(f"JSON schema{_at(path)}: expected an object.")
        if "$ref" in node:
            return {"$ref": self._hoist(node["$ref"], path)}
        out = {k: v for k, v in node.items() if k in _DATA_KEYS or not isinstance(v, dict | list)}
        for key in _DATA_KEYS:
            if isinstance(out.get(key), np.ndarray):  # many integers, as a body's decoder has them
                out[key] = out[key].tolist()
        self._count_data([out[key] for key in _DATA_KEYS if key in out], path)
        self._copy_subschemas(node, out, path, depth)
        self._check_values(node, out, path)
        return out

    def _copy_subschemas(
        self, node: Mapping[str, Any], out: dict[str, Any], path: str, depth: int
    ) -> None:
        for key in _SCHEMA_LISTS:
            if key in node:
                parts = node[key]
                if not isinstance(parts, list) or not parts:
                    raise InvalidRequest(f"JSON schema{_at(path)}: {key} must be a filled list.")
                out[key] = [self._schema(p, f"{path}/{key}", depth + 1) for p in parts]
        if "properties" in node:
            out["properties"] = self._properties(node, path, depth)
        items = node.get("items")
        if isinstance(items, list):
            out["prefixItems"] = [self._schema(p, f"{path}/items", depth + 1) for p in items]
            out.pop("items", None)
        elif "items" in node:
            if items is False:
                raise InvalidRequest(f"JSON schema{_at(path)}: items: false is not supported.")
            out["items"] = self._schema(items, f"{path}/items", depth + 1)
        extra = node.get("additionalProperties")
        if extra is True or isinstance(extra, Mapping):
            out["additionalProperties"] = self._schema(extra, f"{path}/*", depth + 1)

    def _properties(self, node: Mapping[str, Any], path: str, depth: int) -> dict[str, Any]:
        properties, required = node["properties"], node.get("required", [])
        if not isinstance(properties, Mapping) or not isinstance(required, list):
            raise InvalidRequest(
                f"JSON schema{_at(path)}: properties must be an object, required a list."
            )
        names = {name for name in required if isinstance(name, str)}
        n_optional = sum(name not in names for name in properties)
        if n_optional > OPTIONAL_MAX:
            raise InvalidRequest(
                f"JSON schema{_at(path)}: {n_optional} optional properties; the limit is "
                f"{OPTIONAL_MAX}."
            )
        if "" in properties:
            raise InvalidRequest(f"JSON schema{_at(path)}: a property needs a name.")
        return {k: self._schema(v, f"{path}/{k}", depth + 1) for k, v in properties.items()}

    def _check_values(self, node: Mapping[str, Any], out: dict[str, Any], path: str) -> None:
        if "required" in node:
            if not isinstance(node["required"], list):
                raise InvalidRequest(f"JSON schema{_at(path)}: required must be a list.")
            names = {k for k in node["required"] if isinstance(k, str)}
            out["required"] = [name for name in out.get("properties", ()) if name in names]
        kind = node.get("type")
        if isinstance(kind, list):
            self._split_types(out, kind, path)
        elif kind is not None and kind not in (*_ANY_TYPES, "integer"):
            raise InvalidRequest(f"JSON schema{_at(path)}: unknown type {str(kind)[:40]!r}.")
        for key in ("enum", "const"):
            if key in node:
                out.pop("type", None)  # the values say it already
        if "enum" in node and (not isinstance(out["enum"], list) or not out["enum"]):
            raise InvalidRequest(f"JSON schema{_at(path)}: enum must be a filled list.")
        if len(out.get("enum", ())) > STARTS_MAX:
            raise InvalidRequest(f"JSON schema{_at(path)}: enum may have {STARTS_MAX} values.")
        if out.get("type") == "integer":
            bounds = _int_bounds(out, path)
            if bounds != (None, None):
                out[BOUNDS_KEY] = bounds
        for key in _BOUNDS:
            if key in node:
                self._bound(out, key, path)
        for low, high in (("minItems", "maxItems"), ("minLength", "maxLength")):
            if high in out and out[high] < out.get(low, 0):
                raise InvalidRequest(f"JSON schema{_at(path)}: {high} is below {low}.")
        if "pattern" in node:
            out["pattern"] = self._pattern(node["pattern"], path)
        if not isinstance(out.get("format", ""), str):
            raise InvalidRequest(f"JSON schema{_at(path)}: format must be a string.")

    def _count_data(self, values: list[Any], path: str) -> None:
        for value in values:  # grows while it is walked
            is_object = isinstance(value, dict)
            self._n_data_chars += 1 + (len(value) if isinstance(value, str | list | dict) else 0)
            self._n_data_chars += sum(map(len, value)) if is_object else 0
            if self._n_data_chars > DATA_CHARS_MAX:
                raise InvalidRequest(
                    f"JSON schema{_at(path)}: enum and const may have {DATA_CHARS_MAX} characters "
                    "together."
                )
            values += value.values() if is_object else value if isinstance(value, list) else ()

    def _split_types(self, out: dict[str, Any], kinds: list[Any], path: str) -> None:
        """A list of types becomes alternatives that keep the other keywords."""
        if "enum" in out or "const" in out:
            return
        if not kinds or any(k not in (*_ANY_TYPES, "integer") for k in kinds):
            raise InvalidRequest(f"JSON schema{_at(path)}: type must name JSON types.")
        common = {k: v for k, v in out.items() if k != "type"}
        out.clear()
        out["anyOf"] = [{**_only(common, kind), "type": kind} for kind in kinds]
        for part in out["anyOf"]:
            if part["type"] == "integer" and (bounds := _int_bounds(part, path)) != (None, None):
                part[BOUNDS_KEY] = bounds

    def _bound(self, out: dict[str, Any], key: str, path: str) -> None:
        value = out.get(key)
        if value is None:
            return
        if isinstance(value, float) and value.is_integer():
            value = int(value)
        if isinstance(value, bool) or not isinstance(value, int) or value < 0:
            raise InvalidRequest(f"JSON schema{_at(path)}: {key} must be a whole number >= 0.")
        if value > REPEAT_MAX and key.startswith("min"):
            raise InvalidRequest(f"JSON schema{_at(path)}: {key} may be {REPEAT_MAX} at most.")
        if value > REPEAT_MAX:
            del out[key]  # llama.cpp drops such a maximum too
            return
        out[key] = value
        self._repeat(value)

    def _repeat(self, n: int) -> None:
        self._n_repeats += n
        if self._n_repeats > REPEATS_MAX:
            raise InvalidRequest(f"The JSON schema repeats things over {REPEATS_MAX} times.")

    def _pattern(self, pattern: Any, path: str) -> str:
        if not isinstance(pattern, str) or len(pattern) > PATTERN_CHARS_MAX:
            raise InvalidRequest(
                f"JSON schema{_at(path)}: pattern must be a string of at most "
                f"{PATTERN_CHARS_MAX} characters."
            )
        if not (len(pattern) > 1 and pattern.startswith("^") and pattern.endswith("$")):
            raise InvalidRequest(f"JSON schema{_at(path)}: pattern must start with ^ and end $.")
        return "^" + "".join(self._pattern_units(pattern[1:-1], path)) + "$"

    def _pattern_units(self, pattern: str, path: str) -> Iterator[str]:
        nesting = 0
        for found in _PATTERN.finditer(pattern):
            escape, klass, braces, stray = found.groups()
            for number in re.findall(r"\d+", braces or ""):
                self._repeat(int(number[:9]))
            nesting += found[0] == "("
            if stray or nesting > DEPTH_MAX:
                raise InvalidRequest(
                    f"JSON schema{_at(path)}: unbalanced {stray!r} in pattern."
                    if stray
                    else f"JSON schema{_at(path)}: over {DEPTH_MAX} groups in pattern."
                )
            if escape:
                yield f"[{_class_unit(escape, path)}]"
            elif klass:
                unit = re.compile(r"\\.|.", re.DOTALL)
                yield f"[{''.join(_class_unit(u, path) for u in unit.findall(klass[1:-1]))}]"
            else:
                yield found[0]

    def _hoist(self, ref: Any, path: str) -> str:
        """Give every local reference its own unambiguous definition."""
        if not isinstance(ref, str):
            raise InvalidRequest(f"JSON schema{_at(path)}: $ref must be a string.")
        if not ref.startswith("#"):
            raise NotSupported(f"JSON schema: {ref[:80]!r} is a remote $ref; none is fetched.")
        if ref not in self._refs:
            self._refs[ref] = f"towerd-ref-{len(self._refs)}"
            self._todo.append(ref)
        return f"#/$defs/{self._refs[ref]}"

    def _resolve(self, ref: str) -> Any:
        target: Any = self._root
        for part in unquote(ref[1:]).split("/")[1:]:
            key = part.replace("~1", "/").replace("~0", "~")
            if isinstance(target, Mapping) and key in target:
                target = target[key]
            elif isinstance(target, list) and key.isdecimal() and int(key) < len(target):
                target = target[int(key)]
            else:
                raise InvalidRequest(f"JSON schema: $ref {ref[:80]!r} leads nowhere.")
        return target


def _class_unit(unit: str, path: str) -> str:
    """One unit of a regular expression as part of a GBNF character class."""
    if len(unit) == 1:
        return unit
    char = unit[1]
    if char in _CLASSES:
        return _CLASSES[char]
    if char in "nrt\\]-[":
        return unit
    if char.isalnum():
        raise InvalidRequest(f"JSON schema{_at(path)}: {unit} in a pattern is not supported.")
    return f"\\x{ord(char):02X}" if char.isascii() else char


def _int_bounds(node: Mapping[str, Any], path: str) -> tuple[int | None, int | None]:
    """The least and the greatest integer that the four keywords allow."""
    for key in _INT_BOUNDS:
        value = node.get(key)
        if value is not None and not (isinstance(value, int | float) and abs(value) < INTEGER_MAX):
            raise InvalidRequest(
                f"JSON schema{_at(path)}: {key} must be a number between -2^63 and 2^63."
            )
    at_least, at_most, above, below = (node.get(key) for key in _INT_BOUNDS)
    if isinstance(above, bool):  # draft 4: a property of `minimum`
        at_least, above = (None, at_least) if above else (at_least, None)
    if isinstance(below, bool):
        at_most, below = (None, at_most) if below else (at_most, None)
    lows = [] if at_least is None else [math.ceil(at_least)]
    lows += [] if above is None else [math.floor(above) + 1]
    highs = [] if at_most is None else [math.floor(at_most)]
    highs += [] if below is None else [math.ceil(below) - 1]
    low, high = max(lows, default=None), min(highs, default=None)
    if low is not None and high is not None and low > high:
        raise InvalidRequest(f"JSON schema{_at(path)}: no integer is within its bounds.")
    return low, high


def _only(keywords: dict[str, Any], kind: str) -> dict[str, Any]:
    """The keywords that mean something for one type."""
    relevant = {
        "object": ("properties", "required", "additionalProperties", "allOf"),
        "array": ("items", "prefixItems", "minItems", "maxItems"),
        "string": ("pattern", "format", "minLength", "maxLength"),
        "integer": _INT_BOUNDS,
    }.get(kind, ())
    return {k: v for k, v in keywords.items() if k in relevant}


def _at(path: str) -> str:
    return f" at {path[:200]}" if path else ""
