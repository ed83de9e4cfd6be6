"""Chat templates of the GGUFs of this package, and of models whose own template is replaced.

Reuse of a conversation needs every template here to be *prefix-stable*: the prompt of turn k+1
starts with the prompt of turn k, the reply as it was generated, and, if the reply ended by itself,
the token that ended it. `tests/models/test_templates.py` checks this.
"""

from __future__ import annotations

_TEXT = """\
{%- macro text(content) -%}
{%- if content is string -%}{{ content }}
{%- elif content -%}{%- for part in content -%}{{ part.text }}{%- endfor -%}
{%- endif -%}
{%- endmacro -%}
"""
"""A macro for the text of a message, which may be in parts."""

CHATML = (
    _TEXT
    + """\
{%- for message in messages -%}
{{- '<|im_start|>' + message.role + '\\n' + text(message.content) + '<|im_end|>' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n' -}}{%- endif -%}
"""
)
"""ChatML without the line break after `<|im_end|>`: a reply that ended by itself ends in exactly
that token, so nothing has to be guessed about what follows it."""

CHATML_LINES = (
    _TEXT
    + """\
{%- for message in messages -%}
{{- '<|im_start|>' + message.role + '\\n' + text(message.content) + '<|im_end|>\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n' -}}{%- endif -%}
"""
)
"""ChatML with the line break that published models were trained on. A chat without a system
message gets none."""

STORY = (
    _TEXT
    + """\
{%- for message in messages -%}
{%- if message.role == 'assistant' -%}{{- text(message.content) -}}
{%- else -%}
{%- if not loop.first -%}{{- bos_token -}}{%- endif -%}
{{- text(message.content) + '\\n' -}}
{%- if message.role == 'system' -%}{{- '\\n' -}}{%- endif -%}
{%- endif -%}
{%- endfor -%}
"""
)
"""For a model that only continues stories. The user's message opens a story, the reply continues it
on the next line, and `<s>` separates stories, exactly as in its training text. The model ends
a story with that same `<s>`, which is therefore both the end of a reply and the start of the next
turn. The first `<s>` is left to the tokenizer (`add_bos_token`). The line break keeps the tokens
of a prompt and of its reply apart: no piece of this vocabulary contains one."""
