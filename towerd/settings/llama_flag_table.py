"""What towerd does with each of llama-server's own flags; llama.cpp itself says which there are, how each is
spelled and what value it takes.

A line is flags, each by one of its spellings, and after a bar what their kind of row needs: why they have no
effect, what to do instead, or which flags of towerd say the same.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Literal, TypeAlias

Use: TypeAlias = Literal["wire", "load", "media", "lora", "ui", "setting", "ignored", "refused"]
"""wire: llama.cpp reads it with a request's defaults, as every flag that has no row below; load: llama.cpp reads it with the model's and the
context's parameters; media, lora, ui: towerd reads it; setting: flags of towerd say the same; ignored: it has
no effect here; refused: it cannot be had here."""


@dataclass(frozen=True, slots=True)
class LlamaFlag:
    """One flag: its spellings, how many values follow it, and what it is used for."""

    names: tuple[str, ...]
    n_values: int
    use: Use
    why: str = ""
    """Why an ignored flag has no effect, or what to do instead of a refused one."""
    words: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Value of the flag (empty for one without) -> flags of towerd that say the same; * stands for any other
    value, {} for the value itself."""

    @property
    def takes(self) -> Literal["int", "float", ""]:
        """What the value has to be, where llama.cpp reads it as a number."""
        from towerd.wire import number_of  # imported late: it loads llama.cpp

        is_plain = self.n_values == 1 and self.names[0] not in _NUMBERS_AND_WORDS
        return number_of(self.names[0]) if is_plain and self.use in _READ else ""


_READ = ("wire", "load", "media")
_NUMBERS_AND_WORDS = ("--spec-draft-ngl", "--spec-synth-rates", "--tensor-split")


@functools.cache
def by_name() -> Mapping[str, LlamaFlag]:
    """Spelling -> flag, of every flag that llama-server has."""
    from towerd.wire import server_flags  # imported late: it loads llama.cpp

    rows = {row.names[0]: row for use, text in _TABLE.items() for row in _rows(use, text)}
    found: dict[str, LlamaFlag] = {}
    for names, n_values in server_flags():
        long = [name for name in names if name.startswith("--")]
        name = next((name for name in names if name in rows), (long or names)[0])
        row = rows.get(name, LlamaFlag((name,), 0, "wire"))
        spellings = (name, *(other for other in names if other != name))
        found |= dict.fromkeys(spellings, replace(row, names=spellings, n_values=n_values))
    return found


def _rows(use: Use, text: str) -> Iterator[LlamaFlag]:
    for line in text.strip().splitlines():
        names, _, note = (part.strip() for part in line.partition("|"))
        for name in names.split():
            if use in ("ignored", "refused"):
                yield LlamaFlag((name,), 0, use, note)
                continue
            pairs = (part.partition(":") for part in note.split(";") if part)
            words = {value.strip(): tuple(same.split()) for value, _, same in pairs}
            yield LlamaFlag((name,), 0, use, words=words)


_TABLE: Mapping[Use, str] = {
    "wire": """
--verbose | : --log-level debug
--spec-draft-ngl
""",
    "load": """
--kv-offload --no-kv-offload --repack --no-repack --op-offload --no-op-offload --no-host --check-tensors
--cpu-moe --override-kv --override-tensor --device --split-mode --tensor-split --lazy-mode --numa
--rope-scaling --rope-scale --yarn-ext-factor --yarn-attn-factor --yarn-beta-slow --yarn-beta-fast --n-cpu-moe
--n-cpu-ffn --main-gpu --yarn-orig-ctx
""",
    "lora": """
--lora-init-without-apply --lora --lora-scaled
""",
    "ui": """
--ui-config --ui-config-file
""",
    "media": """
--mmproj-auto --no-mmproj --mmproj-offload --no-mmproj-offload --no-warmup --mmproj --image-min-tokens
--image-max-tokens
""",
    "setting": """
--context-shift | : --retention shift
--no-context-shift | : --retention none
--log-jsonl | : --log-format json
--no-log-jsonl | : --log-format text
--log-disable | : --log-level error
--load-mode | auto: --mmap; none: --no-mmap; mmap: --mmap; mlock: --no-mmap --mlock; mmap+mlock: --mmap --mlock
--verbosity | 0: --log-level error; 1: --log-level error; 2: --log-level warning; 3: --log-level info; *: --log-level debug
--kv-unified-per-slot | *: --ctx-size {}
""",
    "ignored": """
--cont-batching | requests are always evaluated together
--no-cont-batching | requests are always evaluated together; --parallel 1 takes one at a time
--kv-unified | conversations always share one context
--no-kv-unified | conversations always share one context; --ctx-size is the limit of each
--warmup | the model is tried at every start
--perf --no-perf | towerd has timings of its own
--backend-sampling | towerd samples on the CPU
--cache-idle-slots --no-cache-idle-slots | idle conversations are always kept, see --hot-bytes
--ui | towerd's page is always served
--no-ui | towerd's page is always served, without a conversation in it until a key that was set is given
--no-agent | there is none
--log-prefix --no-log-prefix --log-timestamps --no-log-timestamps | every line has its time and level
--swa-full | sliding windows are always kept whole
--cpu-mask --cpu-range --cpu-strict --cpu-mask-batch --cpu-range-batch --cpu-strict-batch --spec-draft-cpu-mask | the operating system places threads: start towerd with taskset
--spec-draft-cpu-range --spec-draft-cpu-strict --spec-draft-cpu-mask-batch --spec-draft-cpu-strict-batch | the operating system places threads: start towerd with taskset
--prio --prio-batch --spec-draft-prio --spec-draft-prio-batch | the operating system ranks threads: start towerd with nice
--poll --poll-batch --spec-draft-poll --spec-draft-poll-batch | threads wait as OpenMP has them wait
--cache-ram | the RAM for idle conversations is --hot-bytes
--ctx-checkpoints | state checkpoints are kept on disk, see --checkpoint-bytes
--checkpoint-min-step | state checkpoints are --checkpoint-tokens apart
--slot-prompt-similarity | a conversation is found by its tokens
--defrag-thold | llama.cpp has no use for it any more
--threads-http | one thread serves all connections
--timeout | a request takes as long as it needs
--log-colors | lines have no colours
--fit --fit-target --fit-ctx | the context is sized by --ctx-size and --live-tokens
--mtmd-batch-max-tokens | a picture is encoded at once
""",
    "refused": """
--usage | see towerd serve --help
--version | towerd version says it
--completion-bash | towerctl completion bash prints it
--cache-list | towerd models list shows the models that are here
--list-devices | a llama-server of the same build lists them
--reuse-port | one daemon owns its store: start another one with its own --port and --store-dir
--agent --control-vector-layer-range --mmproj-url --mmproj-device --model-url --docker-repo |
--rpc --control-vector --control-vector-scaled --models-preset --tools |
--tools-runtime --mcp-servers-config --mcp-servers-json |
--embd-gemma-default --fim-qwen-1.5b-default --fim-qwen-3b-default --fim-qwen-7b-default --fim-qwen-30b-default | name a model with -m
--gpt-oss-20b-default --gpt-oss-120b-default | name a model with -m
--fim-qwen-7b-spec --fim-qwen-14b-spec | name a model with -m and its draft with -md
--vision-gemma-4b-default --vision-gemma-12b-default | name a model with -m and its projector with --mmproj
--path | let a web server serve these files, and allow its pages with --cors-origins
--api-prefix | let a reverse proxy in front of towerd take the prefix off
--ssl-key-file --ssl-cert-file | let a reverse proxy in front of towerd speak TLS
--log-prompts-dir | prompts are never logged: towerctl export writes a conversation
""",
}  # fmt: skip
