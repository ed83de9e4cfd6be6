"""The chat template of models whose own is replaced.

Reuse of a conversation needs a template to be *prefix-stable*: the prompt of turn k+1 starts with the
prompt of turn k, the reply as it was generated, and, if the reply ended by itself, the token that
ended it. `tests/models/test_templates.py` checks this.
"""

from __future__ import annotations

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
"""ChatML with the line break that published models were trained on. A chat without a system
message gets none."""
