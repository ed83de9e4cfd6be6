"""Chat templates of the GGUFs that are made here, prefix-stable as `towerd.models.known` says."""

from __future__ import annotations

from towerd.models.known import TEXT

CHATML = (
    TEXT
    + """\
{%- for message in messages -%}
{{- '<|im_start|>' + message.role + '\\n' + text(message.content) + '<|im_end|>' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n' -}}{%- endif -%}
"""
)
"""ChatML without the line break after `<|im_end|>`: a reply that ended by itself ends in exactly
that token, so nothing has to be guessed about what follows it."""

STORY = (
    TEXT
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
