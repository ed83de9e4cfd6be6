from __future__ import annotations

import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import jsonschema
import llama_cpp.llama_cpp as lib
import numpy as np
import pytest

import towerd.engine.base
from towerd.engine.base import SamplingParams
from towerd.engine.embedded.gbnf import REPEAT_MAX, check_gbnf
from towerd.engine.embedded.grammar import json_object_gbnf, schema_to_gbnf
from towerd.engine.embedded.model import init_backend
from towerd.engine.embedded.sampler import Sampler
from towerd.engine.embedded.vocab import Vocab
from towerd.errors import InvalidRequest, NotSupported

BUNDLED = Path(towerd.engine.base.__file__).parents[1] / "data" / "stories260K.gguf"


@pytest.fixture(scope="module")
def vocab() -> Iterator[Vocab]:
    if not BUNDLED.exists():
        pytest.skip("the bundled model is not built")
    init_backend()
    params = lib.llama_model_default_params()
    params.vocab_only = True
    model = lib.llama_model_load_from_file(str(BUNDLED).encode(), params)
    yield Vocab(model)
    lib.llama_model_free(model)


def accepts(vocab: Vocab, gbnf: str, text: str) -> bool:
    """Whether llama.cpp's own grammar lets every token of `text` and then EOS through."""
    sampler = Sampler(SamplingParams(temperature=0, grammar=gbnf), vocab, 64)
    ids = vocab.tokenize(text, False, False).tolist()
    if ids and vocab.pieces[ids[0]].startswith(b" "):  # SentencePiece's own first space
        ids = [i for b in text.encode() for i in [_byte_token(vocab, b)]]
    try:
        for token in [*ids, vocab.eos_id]:
            sampler.accept(token)
    except Exception:
        return False
    finally:
        sampler.close()
    return True


def _byte_token(vocab: Vocab, byte: int) -> int:
    return vocab.pieces.index(bytes([byte]))


SCHEMAS: list[tuple[dict[str, Any], list[Any], list[Any]]] = [
    ({"type": "object"}, [{}, {"a": [1, None, "x"]}], [[], 1]),
    ({}, [{}], ["x"]),
    ({"type": "integer"}, [0, -12], [1.5, "1"]),
    ({"type": ["integer", "null"]}, [3, None], ["x", True]),
    ({"enum": ['a"b', "é😀", "x\\y", 4, None]}, ['a"b', "é😀", "x\\y", 4, None], ["a", 5]),
    ({"const": {"k": [1]}}, [{"k": [1]}], [{"k": [2]}]),
    ({"type": "string", "enum": ["on", "off"]}, ["on"], ["of", 1]),
    ({"type": "string", "minLength": 2, "maxLength": 3}, ["ab", "abc"], ["a", "abcd"]),
    ({"type": "string", "pattern": "^\\d{3}-[a-f]+\\.$"}, ["123-abc."], ["12-abc.", "123-xyz."]),
    ({"type": "array", "items": {"type": "boolean"}, "minItems": 1, "maxItems": 2},
     [[True], [True, False]], [[], [True] * 3, [1]]),
    ({"type": "array", "items": [{"type": "integer"}, {"type": "string"}]}, [[1, "a"]], [["a", 1]]),
    ({"type": "object", "properties": {"x": True}, "required": ["x"]}, [{"x": [1]}, {"x": "s"}], [{}]),
    ({"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "string"}},
      "required": ["a"], "additionalProperties": False},
     [{"a": 1}, {"a": 1, "b": "x"}], [{}, {"b": "x"}, {"a": "1"}, {"a": 1, "c": 2}]),
    ({"type": "object", "properties": {"t": {"$ref": "#/$defs/tree"}}, "required": ["t"],
      "$defs": {"tree": {"type": "array", "items": {"$ref": "#/$defs/tree"}}}},
     [{"t": []}, {"t": [[], [[]]]}], [{"t": [1]}]),
    ({"$ref": "#/definitions/a", "definitions": {"a": {"type": "boolean"}}}, [True], [1]),
    ({"anyOf": [{"$ref": "#/x/string"}, {"$ref": "#/y/string"}],
      "x": {"string": {"type": "integer"}}, "y": {"string": {"type": "null"}}}, [7, None], ["s"]),
    ({"type": "array", "items": {"$ref": "#"}, "maxItems": 2}, [[], [[], [[]]]], [[1]]),
]  # fmt: skip


@pytest.mark.parametrize(("schema", "good", "bad"), SCHEMAS)
def test_schema_grammars_accept_exactly_what_they_should(
    vocab: Vocab, schema: dict[str, Any], good: list[Any], bad: list[Any]
) -> None:
    gbnf = schema_to_gbnf(schema)
    for value in good:
        if schema:
            jsonschema.Draft7Validator(schema).validate(value)
        text = json.dumps(value, ensure_ascii=False)
        assert accepts(vocab, gbnf, text), text
    for value in bad:
        assert not accepts(vocab, gbnf, json.dumps(value, ensure_ascii=False)), value


def test_generated_text_is_json_whatever_the_model_wants(vocab: Vocab) -> None:
    schema = {
        "type": "object",
        "properties": {
            "name": {"type": "string", "maxLength": 8},
            "tags": {"type": "array", "items": {"enum": ["a", "b"]}, "maxItems": 3},
            "n": {"type": "integer"},
        },
        "required": ["name", "tags", "n"],
    }
    gbnf = schema_to_gbnf(schema)
    # Tokens of a single byte can spell what is no UTF-8; that is not the grammar's business.
    readable = [t for t in range(vocab.n_vocab) if vocab.pieces[t].isascii()]
    for seed in range(10):
        rng = random.Random(seed)
        sampler = Sampler(SamplingParams(temperature=0, grammar=gbnf), vocab, 64)
        out = b""
        for _ in range(400):
            allowed = [t for t in readable if sampler._allows(t)]
            token = vocab.eos_id if vocab.eos_id in allowed else rng.choice(allowed)
            sampler.accept(token)
            if token == vocab.eos_id:
                break
            out += vocab.rendered(token)
        else:
            continue  # digits may go on for long; what counts is that nothing invalid ended
        jsonschema.validate(json.loads(out), schema)


def test_no_raw_control_characters_in_strings(vocab: Vocab) -> None:
    assert not accepts(vocab, json_object_gbnf(), '{"a":"x\ny"}')
    assert accepts(vocab, json_object_gbnf(), '{"a":"x\\ny\\/\\u00e9"}')


DEEP: dict[str, Any] = {"type": "string"}
for _ in range(70):
    DEEP = {"type": "array", "items": DEEP}


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "foo"},
        {"type": 7},
        {"anyOf": []},
        {"enum": []},
        {"enum": "x"},
        {"type": "array", "items": False},
        {"type": "object", "properties": []},
        {"type": "object", "properties": {"": {}}},
        {"required": 3},
        {"type": "string", "pattern": "^]$"},
        {"type": "string", "pattern": "^*$"},
        {"type": "string", "pattern": "x"},
        {"type": "string", "pattern": "^\\p{L}$"},
        {"type": "string", "pattern": "^a{999999999999}$"},
        {"type": "string", "pattern": "^" + "(" * 100 + "$"},
        {"type": "string", "minLength": -1},
        {"type": "string", "minLength": 1 << 40},
        {"type": "string", "minLength": "3"},
        {"type": "string", "minLength": 4, "maxLength": 2},
        {"$ref": "#/nowhere"},
        {"$ref": 3},
        {"$ref": {"a": 1}},
        {"$ref": "#"},
        {"$ref": "#/a", "a": {"$ref": "#/a"}},
        {"type": "object", "properties": {"x": 3}},
        {"type": "object", "properties": {f"p{i}": {} for i in range(300)}},
        {"allOf": [{"anyOf": [3]}]},
        {"const": "\ud800"},
        {"enum": ["x" * (1 << 21)]},
        {"enum": [f"v{i}" for i in range(4001)]},
        {"enum": [{"a": [1.5] * 1_000_000}]},
        {"const": {"x" * (1 << 20): 1}},
        {"anyOf": [{"enum": [f"{i}-{j}" for j in range(3000)]} for i in range(3)]},
        {"anyOf": [{"type": "string", "maxLength": 2000}] * 20},
        DEEP,
        {"$ref": "#/d/0", "d": [{"anyOf": [{"$ref": f"#/d/{i + 1}"}]} for i in range(3000)]},
    ],
)
def test_bad_schemas_are_refused(schema: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequest):
        schema_to_gbnf(schema)


@pytest.mark.parametrize("schema", [[], "x", None, 3])
def test_a_schema_is_an_object(schema: Any) -> None:
    with pytest.raises(InvalidRequest):
        schema_to_gbnf(schema)


def test_remote_references_are_never_fetched(monkeypatch: pytest.MonkeyPatch) -> None:
    import requests

    monkeypatch.setattr(requests, "get", lambda *_: pytest.fail("fetched"))
    for ref in ("https://example.com/x.json", "http://example.com", "file:///etc/passwd", "x.json"):
        with pytest.raises(NotSupported):
            schema_to_gbnf({"type": "object", "properties": {"a": {"$ref": ref}}})


def test_the_callers_schema_is_not_changed() -> None:
    schema = {"$ref": "#/a", "a": {"type": "array", "items": {"$ref": "#/a"}}}
    before = json.dumps(schema)
    schema_to_gbnf(schema)
    assert json.dumps(schema) == before


GOOD_GBNF = [
    'root ::= "a"',
    "root ::= [a-z]+ # comment\n",
    'root ::= ("a" | b)* "c"{2,3}\nb ::= [^\\x00-\\x1F"] | .',
    'root ::= a\na ::= "(" a ")" | ""',
    'root ::= item+\nitem ::= ("x" "?")? "\\n"',
    'root ::= ("a"?)*',
    'root ::= "\\u00e9\\U0001F600\\t\\r\\n\\\\\\"\\[\\]\\-"',
    "root ::= [\\]a-] [-x] []",
    'root ::= "a"{0,5000}',
    "root ::= <[3]> !<[4]>",
    "root ::=\n  (\n  [a]\n  |\n [b]\n  )\n",
]

BAD_GBNF = {
    "no root": ('a ::= "x"', "named root"),
    "undefined": ('root ::= "a"\nb ::= nope', "line 2.*nope"),
    "open string": ('root ::= "abc', "string is not closed"),
    "bad escape": ('root ::= "\\q"', "unknown escape"),
    "open class": ("root ::= [abc", "class is not closed"),
    "open group": ('root ::= ("a"', r"expected '\)'"),
    "stray": ('root ::= "a" )', "unexpected"),
    "no definition": ('root = "a"', "::="),
    "no name": ('::= "a"', "name of a rule"),
    "nothing to repeat": ("root ::= *", "nothing before"),
    "inverted": ('root ::= "a"{5,2}', "below its minimum"),
    "too many": ('root ::= "a"{2001}', "at most"),
    "bad braces": ('root ::= "a"{x}', "repetition must look"),
    "left recursion": ('root ::= root "a" | "b"', "left-recursive"),
    "hidden left recursion": (
        'root ::= a root "x" | "y"\na ::= b\nb ::= c c\nc ::= ""', "left-recursive"),
    "indirect": ('root ::= a "x"\na ::= b "y"\nb ::= root', "left-recursive"),
    "nesting": ("root ::= " + "(" * 3000 + '"a"' + ")" * 3000, "nest more than"),
    "size": ('root ::= "' + "a" * 1000 + '"{1000}', "more than"),
    "bytes": ("root ::= " + '"a" ' * 300_000, "longer than"),
    "paths": ("root ::= r0\n" + "".join(f"r{i} ::= r{i+1} | r{i+1}\n" for i in range(60))
              + 'r60 ::= "x"', "too complex"),
    "chain": ("root ::= r0\n" + "".join(f"r{i} ::= r{i+1}\n" for i in range(20_000))
              + 'r20000 ::= "x"', "too complex"),
    "nul": ('root ::= "a"\0', "NUL"),
    "surrogate": ('root ::= "\ud800"', "Unicode"),
    "token": ("root ::= <[999999]>", "not in the vocabulary"),
    "token text": ("root ::= <no such token>", "not one token"),
    "alternatives": (
        "root ::= " + " | ".join(f'"{i}"' for i in range(30_000)), "can begin in 30000 ways"),
    "rules": ("root ::= " + " | ".join(f"r{i}" for i in range(5000)) + "\n"
              + "".join(f'r{i} ::= "x{i}"\n' for i in range(5000)), "can begin in 5000 ways"),
    "optional": ("root ::= " + '"a"? ' * 900, "go on in 404550 ways"),
    "pairs": ('root ::= "{" a\na ::= ' + '"x" b | ' * 300 + '"y"\nb ::= '
              + " | ".join(f'"x{i}"' for i in range(300)), "go on in 90000 ways"),
    "repeated": ("root ::= (" + " | ".join(f'"\\x{i:02X}"' for i in range(1, 256)) + ")+",
                 "go on in"),
    "class": ("root ::= [" + "a" * 100_000 + "]", "can begin in 25000 ways"),
    "long token id": ("root ::= <[99999999999999999999999]>", "not in the vocabulary"),
}  # fmt: skip


LARGE_GBNF = [
    "root ::= " + " | ".join(f'"{i}"' for i in range(4000)),
    "root ::= (" + " | ".join(f'"word {i} "' for i in range(2000)) + ")+",
    "root ::= " + '"a"? ' * 100,
    "root ::= [" + "".join(chr(0x4E00 + i) for i in range(3000)) + "]+",
    schema_to_gbnf({"properties": {f"p{i}": {} for i in range(200)}}),
    schema_to_gbnf({"enum": [f"v{i}" for i in range(4000)]}),
    schema_to_gbnf({"enum": np.arange(1000)}),
]


@pytest.mark.parametrize("gbnf", LARGE_GBNF, ids=range(len(LARGE_GBNF)))
def test_large_grammars_are_followed(vocab: Vocab, gbnf: str) -> None:
    """What people may mean, up to the limits."""
    Sampler(SamplingParams(grammar=gbnf), vocab, 64).close()


class Wide:
    """A vocabulary that is as large as they come."""

    n_vocab = 262_144


def test_a_large_vocabulary_allows_fewer_ways(vocab: Vocab) -> None:
    """Every token is tried in every way."""
    gbnf = "root ::= " + " | ".join(f'"{i}"' for i in range(1000))
    check_gbnf(gbnf, vocab)
    with pytest.raises(InvalidRequest, match="at most 488 can be followed"):
        check_gbnf(gbnf, cast(Vocab, Wide()))


@pytest.mark.parametrize("gbnf", GOOD_GBNF)
def test_good_grammars_pass_and_llama_takes_them(vocab: Vocab, gbnf: str) -> None:
    check_gbnf(gbnf, vocab)
    Sampler(SamplingParams(grammar=gbnf), vocab, 64).close()


@pytest.mark.parametrize("name", BAD_GBNF)
def test_bad_grammars_are_named(vocab: Vocab, name: str) -> None:
    gbnf, message = BAD_GBNF[name]
    with pytest.raises(InvalidRequest, match=message):
        Sampler(SamplingParams(grammar=gbnf), vocab, 64)


def test_the_deepest_grammar_allowed_does_not_overflow(vocab: Vocab) -> None:
    n = 1990
    Sampler(SamplingParams(grammar="root ::= " + "(" * n + '"a"' + ")" * n), vocab, 64).close()
    n = 9000
    chain = "root ::= r0\n" + "".join(f"r{i} ::= r{i + 1}\n" for i in range(n)) + f'r{n} ::= "x"'
    Sampler(SamplingParams(grammar=chain), vocab, 64).close()


def test_limits_are_what_the_converter_needs() -> None:
    assert len(schema_to_gbnf({"type": "string", "maxLength": REPEAT_MAX})) > REPEAT_MAX
    with pytest.raises(InvalidRequest):
        schema_to_gbnf({"type": "string", "minLength": REPEAT_MAX + 1})
