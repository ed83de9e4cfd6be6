"""llama-server's own flags, in one table: what towerd does with each.

A line is the spellings of a flag, and after a bar what its kind of row needs: why it has no effect, what to do
instead, or which flags of towerd say the same.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Literal, TypeAlias

Use: TypeAlias = Literal["wire", "load", "media", "lora", "ui", "setting", "ignored", "refused"]
"""wire: llama.cpp reads it with a request's defaults; load: llama.cpp reads it with the model's and the
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
    takes: type[int] | type[float] | None = None
    """What the value has to be, where llama.cpp reads it as a number."""


def _rows(
    use: Use, n_values: int, text: str, takes: type[int] | type[float] | None = None
) -> list[LlamaFlag]:
    rows = (_row(use, n_values, line) for line in text.strip().splitlines())
    return [replace(row, takes=takes) for row in rows]


def _row(use: Use, n_values: int, line: str) -> LlamaFlag:
    names, _, note = (part.strip() for part in line.partition("|"))
    if use in ("ignored", "refused"):
        return LlamaFlag(tuple(names.split()), n_values, use, note)
    pairs = (part.partition(":") for part in note.split(";") if part)
    words = {value.strip(): tuple(same.split()) for value, _, same in pairs}
    return LlamaFlag(tuple(names.split()), n_values, use, words=words)


FLAGS = (
    *_rows("wire", 0, """
--verbose --log-verbose -v | : --log-level debug
--ignore-eos
--escape -e
--no-escape
--special -sp
--spm-infill
--jinja
--no-jinja
--prefill-assistant
--no-prefill-assistant
--skip-chat-parsing
--no-skip-chat-parsing
--reasoning-preserve
--no-reasoning-preserve
--cache-prompt
--no-cache-prompt
--spec-default
--spec-draft-backend-sampling
--no-spec-draft-backend-sampling
--spec-draft-cpu-moe -cmoed --cpu-moe-draft
"""),
    *_rows("wire", 1, """
--samplers
--sampler-seq --sampling-seq
--dry-sequence-breaker
--logit-bias -l
--grammar
--grammar-file
--json-schema -j
--json-schema-file -jf
--reverse-prompt -r
--reasoning-format
--reasoning -rea
--reasoning-effort
--reasoning-budget-message
--chat-template-kwargs
--media-path
--video-ffmpeg-dir
--spec-type
--spec-draft-model -md --model-draft
--spec-draft-type-k -ctkd --cache-type-k-draft
--spec-draft-type-v -ctvd --cache-type-v-draft
--spec-draft-override-tensor -otd --override-tensor-draft
--spec-draft-device -devd --device-draft
--spec-draft-ngl -ngld --gpu-layers-draft --n-gpu-layers-draft
--lookup-cache-static -lcs
--lookup-cache-dynamic -lcd
"""),
    *_rows("wire", 1, """
--temp --temperature
--top-p
--min-p
--top-nsigma --top-n-sigma
--xtc-probability
--xtc-threshold
--typical --typical-p
--repeat-penalty
--presence-penalty
--frequency-penalty
--dry-multiplier
--dry-base
--adaptive-target
--adaptive-decay
--dynatemp-range
--dynatemp-exp
--mirostat-lr
--mirostat-ent
--video-fps
--spec-draft-p-split --draft-p-split
--spec-draft-p-min --draft-p-min
""", takes=float),
    *_rows("wire", 1, """
--seed -s
--top-k
--repeat-last-n
--dry-allowed-length
--dry-penalty-last-n
--mirostat
--keep
--reasoning-budget
--video-timestamp-interval
--sse-ping-interval
--embd-normalize
--spec-draft-n-max
--spec-draft-n-min
--spec-draft-threads -td --threads-draft
--spec-draft-threads-batch -tbd --threads-batch-draft
--spec-draft-n-cpu-moe --spec-draft-ncmoe -ncmoed --n-cpu-moe-draft
--draft --draft-n --draft-max
--draft-min --draft-n-min
--spec-ngram-size-n
--spec-ngram-size-m
--spec-ngram-min-hits
--spec-ngram-mod-n-min
--spec-ngram-mod-n-max
--spec-ngram-mod-n-match
--spec-ngram-simple-size-n
--spec-ngram-simple-size-m
--spec-ngram-simple-min-hits
--spec-ngram-map-k-size-n
--spec-ngram-map-k-size-m
--spec-ngram-map-k-min-hits
--spec-ngram-map-k4v-size-n
--spec-ngram-map-k4v-size-m
--spec-ngram-map-k4v-min-hits
""", takes=int),
    *_rows("load", 0, """
--kv-offload -kvo
--no-kv-offload -nkvo
--repack
--no-repack -nr
--op-offload
--no-op-offload
--no-host
--check-tensors
--cpu-moe -cmoe
"""),
    *_rows("load", 1, """
--override-kv
--override-tensor -ot
--device -dev
--split-mode -sm
--tensor-split -ts
--lazy-mode -lzm
--numa
--rope-scaling
"""),
    *_rows("load", 1, """
--rope-scale
--yarn-ext-factor
--yarn-attn-factor
--yarn-beta-slow
--yarn-beta-fast
""", takes=float),
    *_rows("load", 1, """
--n-cpu-moe -ncmoe
--n-cpu-ffn -ncffn
--main-gpu -mg
--yarn-orig-ctx
""", takes=int),
    *_rows("lora", 0, "--lora-init-without-apply"),
    *_rows("lora", 1, "--lora\n--lora-scaled"),
    *_rows("ui", 1, """
--ui-config --webui-config
--ui-config-file --webui-config-file
"""),
    *_rows("media", 0, """
--mmproj-auto
--no-mmproj --no-mmproj-auto
--mmproj-offload
--no-mmproj-offload
--no-warmup
"""),
    *_rows("media", 1, """
--mmproj -mm
"""),
    *_rows("media", 1, """
--image-min-tokens
--image-max-tokens
""", takes=int),
    *_rows("setting", 0, """
--context-shift | : --retention shift
--no-context-shift | : --retention none
--log-jsonl | : --log-format json
--no-log-jsonl | : --log-format text
--log-disable | : --log-level error
"""),
    *_rows("setting", 1, """
--load-mode -lm | auto: --mmap; none: --no-mmap; mmap: --mmap; mlock: --no-mmap --mlock; mmap+mlock: --mmap --mlock
--verbosity --log-verbosity -lv | 0: --log-level error; 1: --log-level error; 2: --log-level warning; 3: --log-level info; *: --log-level debug
--kv-unified-per-slot | *: --ctx-size {}
"""),
    *_rows("ignored", 0, """
--cont-batching -cb | requests are always evaluated together
--no-cont-batching -nocb | requests are always evaluated together; --parallel 1 takes one at a time
--kv-unified -kvu | conversations always share one context
--no-kv-unified -no-kvu | conversations always share one context; --ctx-size is the limit of each
--warmup | the model is tried at every start
--perf | towerd has timings of its own
--no-perf | towerd has timings of its own
--backend-sampling -bs | towerd samples on the CPU
--cache-idle-slots | idle conversations are always kept, see --hot-bytes
--no-cache-idle-slots | idle conversations are always kept, see --hot-bytes
--ui --webui | towerd's page is always served
--no-ui --no-webui | towerd's page is always served, without a conversation in it until a key that was set is given
--no-ui-mcp-proxy --no-webui-mcp-proxy | there is none
--no-agent -no-ag | there is none
--no-cors-credentials | web pages may never send credentials
--log-prefix | every line has its time and level
--no-log-prefix | every line has its time and level
--log-timestamps | every line has its time and level
--no-log-timestamps | every line has its time and level
--swa-full | sliding windows are always kept whole
"""),
    *_rows("ignored", 1, """
--cpu-mask -C | the operating system places threads: start towerd with taskset
--cpu-range -Cr | the operating system places threads: start towerd with taskset
--cpu-strict | the operating system places threads: start towerd with taskset
--cpu-mask-batch -Cb | the operating system places threads: start towerd with taskset
--cpu-range-batch -Crb | the operating system places threads: start towerd with taskset
--cpu-strict-batch | the operating system places threads: start towerd with taskset
--prio | the operating system ranks threads: start towerd with nice
--prio-batch | the operating system ranks threads: start towerd with nice
--poll | threads wait as OpenMP has them wait
--poll-batch | threads wait as OpenMP has them wait
--spec-draft-cpu-mask -Cd --cpu-mask-draft | the operating system places threads: start towerd with taskset
--spec-draft-cpu-range -Crd --cpu-range-draft | the operating system places threads: start towerd with taskset
--spec-draft-cpu-strict --cpu-strict-draft | the operating system places threads: start towerd with taskset
--spec-draft-cpu-mask-batch -Cbd --cpu-mask-batch-draft | the operating system places threads: start towerd with taskset
--spec-draft-cpu-strict-batch --cpu-strict-batch-draft | the operating system places threads: start towerd with taskset
--spec-draft-prio --prio-draft | the operating system ranks threads: start towerd with nice
--spec-draft-prio-batch --prio-batch-draft | the operating system ranks threads: start towerd with nice
--spec-draft-poll --poll-draft | threads wait as OpenMP has them wait
--spec-draft-poll-batch --poll-batch-draft | threads wait as OpenMP has them wait
--cache-ram -cram | the RAM for idle conversations is --hot-bytes
--cache-reuse | what a prompt begins with is used again, and nothing in its middle
--ctx-checkpoints -ctxcp --swa-checkpoints | state checkpoints are kept on disk, see --boundary-bytes
--checkpoint-min-step -cms | state checkpoints are --boundary-tokens apart
--slot-prompt-similarity -sps | a conversation is found by its tokens
--slot-save-path | every conversation is kept in --store-dir
--defrag-thold -dt | llama.cpp has no use for it any more
--threads-http | one thread serves all connections
--timeout -to | a request takes as long as it needs
--log-colors | lines have no colours
--fit -fit | the context is sized by --ctx-size and --live-tokens
--fit-target -fitt | the context is sized by --ctx-size and --live-tokens
--fit-ctx -fitc | the context is sized by --ctx-size and --live-tokens
--mtmd-batch-max-tokens | a picture is encoded at once
--cors-methods | pages of --cors-origins may use any method of the API
--cors-headers | pages of --cors-origins may send any header
"""),
    *_rows("refused", 0, """
--usage | see towerd serve --help
--version | towerd version says it
--completion-bash | towerctl completion bash prints it
--cache-list -cl | towerd models list shows the models that are here
--list-devices | a llama-server of the same build lists them
--reuse-port | one daemon owns its store: start another one with its own --port and --store-dir
--cors-credentials | a web page sends its key in a header
--ui-mcp-proxy --webui-mcp-proxy |
--agent -ag |
--embd-gemma-default | name a model with -m
--fim-qwen-1.5b-default | name a model with -m
--fim-qwen-3b-default | name a model with -m
--fim-qwen-7b-default | name a model with -m
--fim-qwen-7b-spec | name a model with -m and its draft with -md
--fim-qwen-14b-spec | name a model with -m and its draft with -md
--fim-qwen-30b-default | name a model with -m
--gpt-oss-20b-default | name a model with -m
--gpt-oss-120b-default | name a model with -m
--vision-gemma-4b-default | name a model with -m and its projector with --mmproj
--vision-gemma-12b-default | name a model with -m and its projector with --mmproj
"""),
    *_rows("refused", 2, "--control-vector-layer-range |"),
    *_rows("refused", 1, """
--mmproj-url -mmu |
--mmproj-device -mmdev |
--model-url -mu |
--docker-repo -dr |
--spec-synth-len |
--spec-synth-rates |
--rpc |
--control-vector |
--control-vector-scaled |
--models-preset |
--tools |
--tools-runtime |
--mcp-servers-config |
--mcp-servers-json |
--path | let a web server serve these files, and allow its pages with --cors-origins
--api-prefix | let a reverse proxy in front of towerd take the prefix off
--ssl-key-file | let a reverse proxy in front of towerd speak TLS
--ssl-cert-file | let a reverse proxy in front of towerd speak TLS
--sleep-idle-seconds | the model stays loaded: leave it out
--log-prompts-dir | prompts are never logged: towerctl export writes a conversation
"""),
)  # fmt: skip

BY_NAME = {name: flag for flag in FLAGS for name in flag.names}
