"""llama-server's own flags, and how the embedded engine handles each.

llama.cpp's code parses those of sampling and chat itself (`towerd.wire`); flags that are settings
of the daemon are in `towerd.settings.config`; flags without an effect here are accepted and ignored, so that
a llama-server command line works unchanged. The llama-server engine accepts all of them.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

from towerd.errors import ConfigError

Use: TypeAlias = Literal["wire", "media", "lora", "ignored", "unsupported"]


@dataclass(frozen=True, slots=True)
class LlamaFlag:
    """One flag: its spellings, how many values follow it, and what it is used for."""

    names: tuple[str, ...]
    n_values: int
    use: Use


def _rows(use: Use, n_values: int, text: str) -> list[LlamaFlag]:
    return [LlamaFlag(tuple(line.split()), n_values, use) for line in text.strip().splitlines()]


FLAGS = (
    *_rows("wire", 0, """
--verbose --log-verbose -v
--ignore-eos
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
--seed -s
--sampler-seq --sampling-seq
--temp --temperature
--top-k
--top-p
--min-p
--top-nsigma --top-n-sigma
--xtc-probability
--xtc-threshold
--typical --typical-p
--repeat-last-n
--repeat-penalty
--presence-penalty
--frequency-penalty
--dry-multiplier
--dry-base
--dry-allowed-length
--dry-penalty-last-n
--dry-sequence-breaker
--adaptive-target
--adaptive-decay
--dynatemp-range
--dynatemp-exp
--mirostat
--mirostat-lr
--mirostat-ent
--logit-bias -l
--grammar
--grammar-file
--json-schema -j
--json-schema-file -jf
--keep
--reverse-prompt -r
--reasoning-format
--reasoning -rea
--reasoning-effort
--reasoning-budget
--reasoning-budget-message
--chat-template-kwargs
--media-path
--video-ffmpeg-dir
--video-fps
--video-timestamp-interval
--sse-ping-interval
--embd-normalize
--spec-type
--spec-draft-model -md --model-draft
--spec-draft-n-max
--spec-draft-n-min
--draft --draft-n --draft-max
--draft-min --draft-n-min
--spec-draft-p-split --draft-p-split
--spec-draft-p-min --draft-p-min
--spec-draft-threads -td --threads-draft
--spec-draft-threads-batch -tbd --threads-batch-draft
--spec-draft-type-k -ctkd --cache-type-k-draft
--spec-draft-type-v -ctvd --cache-type-v-draft
--spec-draft-override-tensor -otd --override-tensor-draft
--spec-draft-n-cpu-moe --spec-draft-ncmoe -ncmoed --n-cpu-moe-draft
--spec-draft-device -devd --device-draft
--spec-draft-ngl -ngld --gpu-layers-draft --n-gpu-layers-draft
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
--lookup-cache-static -lcs
--lookup-cache-dynamic -lcd
"""),
    *_rows("lora", 0, "--lora-init-without-apply"),
    *_rows("lora", 1, "--lora\n--lora-scaled"),
    *_rows("ignored", 0, """
--cont-batching -cb
--no-cont-batching -nocb
--kv-unified -kvu
--no-kv-unified -no-kvu
--warmup
--escape -e
--no-escape
--perf
--no-perf
--kv-offload -kvo
--no-kv-offload -nkvo
--repack
--no-repack -nr
--op-offload
--no-op-offload
--cache-idle-slots
--no-cache-idle-slots
--ui --webui
--no-ui --no-webui
--log-disable
--log-prefix
--no-log-prefix
--log-timestamps
--no-log-timestamps
--check-tensors
--swa-full
"""),
    *_rows("ignored", 1, """
--prio
--poll
--prio-batch
--poll-batch
--cache-ram -cram
--cache-reuse
--ctx-checkpoints -ctxcp --swa-checkpoints
--checkpoint-min-step -cms
--slot-prompt-similarity -sps
--slot-save-path
--defrag-thold -dt
--threads-http
--timeout -to
--log-colors
--fit -fit
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
--image-min-tokens
--image-max-tokens
"""),
    *_rows("unsupported", 0, """
--embd-gemma-default
"""),
    *_rows("unsupported", 1, """
--mmproj-url -mmu
--mmproj-device -mmdev
--model-url -mu
--docker-repo -dr
--spec-synth-len
--spec-synth-rates
--rpc
--device -dev
--override-tensor -ot
--override-kv
--split-mode -sm
--tensor-split -ts
--main-gpu -mg
--rope-scaling
--rope-scale
--yarn-orig-ctx
--control-vector
--control-vector-scaled
--models-preset
--tools
--mcp-servers-config
--mcp-servers-json
--path
--api-prefix
--ssl-key-file
--ssl-cert-file
--sleep-idle-seconds
"""),
)  # fmt: skip

BY_NAME = {name: flag for flag in FLAGS for name in flag.names}


@dataclass(frozen=True, slots=True)
class AdapterFile:
    """A LoRA adapter to load, and its scale."""

    path: str
    scale: float


def adapter_files(args: Sequence[str]) -> tuple[list[AdapterFile], bool]:
    """The LoRA adapters of a llama-server command line, in their order, and whether they are
    applied from the start. Raises ConfigError."""
    files: list[AdapterFile] = []
    applied = True
    for flag, words in _split(args):
        if words[0] == "--lora-init-without-apply":
            applied = False
        elif flag.use == "lora":
            files += [_adapter_file(words[0], text) for text in words[1].split(",") if text]
    return files, applied


def _adapter_file(name: str, text: str) -> AdapterFile:
    if name == "--lora":
        return AdapterFile(text, 1.0)
    path, _, scale = text.rpartition(":")
    try:
        value = float(scale)
    except ValueError:
        value = math.nan
    if not path or not math.isfinite(value):
        raise ConfigError(f"--lora-scaled takes FILE:SCALE, not {text!r}.")
    return AdapterFile(path, value)


def wire_words(args: Sequence[str]) -> list[str]:
    """The words of a llama-server command line that `towerd.wire` parses for the embedded engine.

    Raises ConfigError that names the first flag that this engine does not accept."""
    out: list[str] = []
    for flag, words in _split(args):
        if flag.use == "unsupported":
            raise refusal(words[0])
        if flag.use == "wire":
            out += words
    return out


@dataclass(frozen=True, slots=True)
class MediaFlags:
    """The media options of a command line."""

    path: str = ""
    """Path of the projector; empty: there is none."""
    offload: bool = True
    image_min_tokens: int = -1
    image_max_tokens: int = -1
    warmup: bool = True


def media_flags(args: Sequence[str]) -> MediaFlags:
    """The media options of a llama-server command line. Raises ConfigError."""
    values: dict[str, str] = {}
    off: set[str] = set()
    for flag, words in _split(args):
        if flag.use == "media" and flag.n_values:
            values[flag.names[0]] = words[1]
        elif flag.use == "media":
            name = flag.names[0].replace("--no-", "--").removesuffix("-auto")
            if flag.names[0].startswith("--no-"):
                off.add(name)
            else:
                off.discard(name)
    return MediaFlags(
        path="" if "--mmproj" in off else values.get("--mmproj", ""),
        offload="--mmproj-offload" not in off,
        image_min_tokens=_integer("--image-min-tokens", values),
        image_max_tokens=_integer("--image-max-tokens", values),
        warmup="--warmup" not in off,
    )


def _integer(name: str, values: Mapping[str, str]) -> int:
    value = values.get(name, "-1")
    try:
        return int(value)
    except ValueError:
        raise ConfigError(f"{name} takes a whole number, not {value!r}.") from None


def refusal(name: str) -> ConfigError:
    """The error for a flag that only a llama-server accepts."""
    return ConfigError(
        f"{name} is not taken by the embedded engine: leave it out, or use --engine llama-server "
        f"and put {name} after --."
    )


def _split(args: Sequence[str]) -> Iterator[tuple[LlamaFlag, list[str]]]:
    words = iter(args)
    for word in words:
        name, is_joined, value = word.partition("=")
        flag = BY_NAME.get(name.replace("_", "-") if name.startswith("--") else name)
        if flag is None:
            raise refusal(word)
        values = (
            [value] if is_joined else [v for _, v in zip(range(flag.n_values), words, strict=False)]
        )
        if len(values) != flag.n_values:
            raise ConfigError(f"{name} takes {flag.n_values or 'no'} value.")
        yield flag, [name, *values]
