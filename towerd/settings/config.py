"""All settings of a daemon, in one frozen value.

`towerd.settings.sources` reads it from flags, variables and towerd.toml. What the bytes of a stored
segment depend on is in `towerd.slots.row_identity` instead.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from towerd.errors import ConfigError
from towerd.policy import NAMES as POLICIES
from towerd.settings.addresses import is_http_url, is_loopback
from towerd.settings.llama_flags import check_flags, words_of
from towerd.settings.setting import Setting
from towerd.settings.setting import config_field as _set
from towerd.settings.vertex import Vertex
from towerd.system import paths
from towerd.system.machine import container_ram_max, free_bytes, ram_bytes, usable_cores
from towerd.tiers.formats.fidelity import FIDELITIES, LevelFormats

ENGINES = ("embedded", "llama-server")
AUTO = "auto"
"""Stands for one of the engines until it is known what there is."""
CACHE_TYPES = ("f32", "f16", "bf16", "q8_0", "q4_0", "q4_1", "iq4_nl", "q5_0", "q5_1")
SHARED_SCHEMES = ("s3", "gs", "az", "file")
RETENTIONS = ("none", "shift", "streaming", "h2o", "snapkv", "buzz", "latem", "icecache")
"""The policies of towerd.retention whose signals the embedded engine provides, and `shift`."""
UNBOUNDED = ("none", "shift")
"""Those without a budget."""
RETENTION_SCOPES = ("layer", "head", "all")
WATCHING = ("h2o", "snapkv", "buzz", "latem", "icecache")
"""Those that observe attention."""
POOLINGS = ("none", "mean", "cls", "last", "rank")
UNQUANTIZED = ("f32", "f16", "bf16")
TEXT_BYTES_MAX = 16 * 2**20
TEXT_BYTES_PER_TOKEN = 16
SOCKET_PATH_BYTES_MAX = 103
"""The capacity of sun_path on macOS; Linux allows four more."""
WARM_BYTES_MAX = 32 * 2**30
HOT_BYTES = 32 * 2**20
"""Rows on disk are read from the system's page cache, about as fast as from memory of our own."""
_SWITCH = {
    **dict.fromkeys(("1", "true", "enabled"), "on"),
    **dict.fromkeys(("0", "false", "disabled"), "off"),
    "-1": "auto",
}
"""llama-server's other words for on, off and auto."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    """Settings of one daemon. Construction resolves defaults that depend on the machine (`auto`),
    so that readers only see the values in force. Raises ConfigError.
    """

    # fmt: off
    host: str = _set("127.0.0.1", "text", "--host",
        "Address to listen on; several are separated by commas. Beyond loopback an API key is required.")
    port: int = _set(8080, "int", "--port",
        "TCP port to listen on; 0 takes a free one.", low=0, high=65535)
    socket: Path | None = _set(None, "path", "--socket",
        "Unix socket to listen on as well; towerctl uses it.",
        auto="towerd/towerd.sock in the user's runtime directory; with another store, towerd-HASH.sock there")
    model: Path | None = _set(None, "path", "--model -m",
        "GGUF to serve: a path, or a name that towerd models shows; names may be shortened.",
        auto="smollm2, else stories")
    models_dir: Path | None = _set(None, "path", "--models-dir",
        "Directory of GGUFs to serve several models from; a request's model picks one. With --model, only that model is served.")
    models_max: int = _set(4, "int", "--models-max",
        "Models that are loaded at once; 0: as many as --memory holds.", low=0, high=1024)
    models_autoload: bool = _set(True, "bool", "--models-autoload",
        "Load a model when a request names it.", off="--no-models-autoload")
    memory: int = _set(-1, "size", "--memory",
        "RAM for the models that are loaded at once, each with its context and its share of --hot-bytes.", low=-1,
        auto="four fifths of the RAM")
    ram_max: int = _set(-1, "size", "--ram-max",
        "RAM that all of towerd may take, such as 6G: models, contexts, conversations, requests, processes that it "
        "starts. Contexts and caches whose size is not set are made to fit. When all of the RAM is taken, new requests "
        "wait, and then get 503. 0: no limit.", low=-1,
        auto="0.93 of the limit of the container or unit, if that is less than the RAM; mapped weights that take "
        "more are served without a limit")
    hf_repo: str | None = _set(None, "text", "--hf-repo -hf -hfr",
        "Model to fetch from Hugging Face, as OWNER/REPO:QUANT; with its projector, unless --no-mmproj is given. "
        "The default quantization is Q4_K_M, else Q8_0, else that of the first file.")
    hf_file: str | None = _set(None, "text", "--hf-file -hff",
        "File of this repository to serve, whatever its quantization.")
    hf_repo_draft: str | None = _set(None, "text", "--hf-repo-draft -hfd -hfrd --spec-draft-hf",
        "Draft model to fetch from Hugging Face, as OWNER/REPO:QUANT.")
    hf_token: str | None = _set(None, "text", "--hf-token -hft",
        "Token for repositories that need one.", auto="HF_TOKEN, else the one of hf auth login", secret=True)
    offline: bool = _set(False, "bool", "--offline",
        "Fetch nothing; serve only what is on this machine.", off="--no-offline")
    alias: str | None = _set(None, "text", "--alias -a",
        "Name of the model for clients; several are separated by commas.", auto="its file name")
    tags: tuple[str, ...] = _set((), "list", "--tags",
        "Tags of the model in GET /v1/models.")
    store_dir: Path = _set(None, "path", "--store-dir",
        "Directory of the store; one daemon at a time.", auto="store in the user's data directory")
    api_keys: tuple[tuple[str, str], ...] = _set((), "keys", "--api-key",
        "Key that clients must present, or tenant:key; repeatable, or separated by commas.")
    api_key_file: Path | None = _set(None, "path", "--api-key-file",
        "File with one key, or tenant:key, per line.")
    ctx_size: int = _set(0, "int", "--ctx-size -c",
        "Tokens that one conversation may hold.", low=0, high=2**31 - 1,
        auto="what the model was trained for, up to 32768")
    live_tokens: int = _set(0, "size", "--live-tokens",
        "Tokens that the live context holds for all conversations together.", low=0,
        high=2**31 - 1, auto="up to four times ctx-size, as memory allows")
    parallel: int = _set(8, "int", "--parallel -np",
        "Requests that are evaluated at once.", low=1, high=128, words={"-1": "8"})
    live_sequences: int = _set(64, "int", "--live-sequences",
        "Conversations that stay in the live context; at least as many as parallel.", low=1, high=255)
    batch_size: int = _set(512, "int", "--batch-size -b",
        "Prompt tokens evaluated before running streams get their next turn.", low=1, high=2**20)
    ubatch_size: int = _set(512, "int", "--ubatch-size -ub",
        "Tokens in one computation, up to batch-size.", low=1, high=2**20)
    threads: int = _set(0, "int", "--threads -t",
        "CPU threads for generating.", low=0, high=1024, auto="one per physical core", words={"-1": "0"})
    threads_batch: int = _set(0, "int", "--threads-batch -tb",
        "CPU threads for prompts.", low=0, high=1024, auto="as many as threads", words={"-1": "0"})
    cache_type_k: str = _set("f16", "text", "--cache-type-k -ctk",
        "Type of the cached keys.", choices=CACHE_TYPES)
    cache_type_v: str = _set("f16", "text", "--cache-type-v -ctv",
        "Type of the cached values; a quantized one needs flash attention.", choices=CACHE_TYPES)
    flash_attn: str = _set("auto", "text", "--flash-attn -fa",
        "Flash attention. auto is off on a CPU, where it makes one long conversation slower; "
        "many short ones at once are faster with it.", choices=("auto", "on", "off"), words=_SWITCH)
    gpu_layers: int = _set(-1, "int", "--gpu-layers --n-gpu-layers -ngl",
        "Layers to put on the GPU, in a build that has one; -1 puts all.", low=-1, high=10000,
        words={"auto": "-1", "all": "-1"})
    mmap: bool = _set(True, "bool", "--mmap",
        "Map the model file instead of reading it.", off="--no-mmap")
    mlock: bool = _set(False, "bool", "--mlock",
        "Keep the model in RAM, never swapped.", off="--no-mlock")
    rope_freq_base: float = _set(0.0, "float", "--rope-freq-base",
        "RoPE base frequency.", low=0, auto="from the model")
    rope_freq_scale: float = _set(0.0, "float", "--rope-freq-scale",
        "RoPE frequency factor; 1/N stretches the context N-fold.", low=0, auto="from the model")
    hot_bytes: int = _set(-1, "size", "--hot-bytes",
        "RAM for conversations that are not live; those on disk are also in the page cache. Pinned ones may take an "
        "eighth of the RAM (with several models, for each).", low=-1,
        auto="32 MiB; an eighth of the RAM if warm-bytes is 0 or writing is limited")
    warm_bytes: int = _set(-1, "size", "--warm-bytes",
        "Disk for the attention state of conversations.", low=-1,
        auto="32 GiB, but at most half of what is free")
    disk_max: int = _set(0, "size", "--disk-max",
        "Bytes that all of the store may take on the disk, including its index and journal, such as 50G. Attention state "
        "is deleted to keep to it, and then the oldest pictures and sounds; tokens never are, and when they alone take all of it, requests are refused. 0: no limit.",
        low=0)
    keep_media: bool = _set(True, "bool", "--keep-media",
        "Keep the pictures and sounds of conversations, up to 32 MiB each, so that they can be shown on any device, and evaluated again when their "
        "attention state is gone.", off="--no-keep-media")
    encrypt: str | None = _set(None, "text", "--encrypt",
        "Encrypt what the store has on the disk, with a key from the system's keyring (keyring), a file (file:PATH, made if "
        "it is missing), or a passphrase (passphrase, from TOWERD_PASSPHRASE or the terminal). A store with "
        "content is encrypted at the next start, and stays encrypted. Without the key its conversations are lost.")
    write_budget: int = _set(0, "size", "--write-budget",
        "Bytes that may be written to the store per day, such as 20G, to spare an SSD. Conversations are always written; "
        "their attention state is written later, in fewer copies, or not at all. 0: no limit.", low=0)
    checkpoint_bytes: int = _set(-1, "size", "--checkpoint-bytes --boundary-bytes",
        "Disk for state checkpoints, from which models with recurrent layers resume; with several "
        "models, for each.", low=-1,
        auto="a quarter of warm-bytes")
    checkpoint_tokens: int = _set(512, "int", "--checkpoint-tokens --boundary-tokens",
        "Tokens between state checkpoints near the end of a long prompt.", low=16, high=2**20)
    fidelity: str = _set("near", "text", "--fidelity",
        "How faithfully unused attention state is stored on disk: as computed, or within a measured bound. In front "
        "of a llama-server, where nothing is measured, it is stored as computed.",
        choices=FIDELITIES)
    cache_reuse: int = _set(64, "int", "--cache-reuse",
        "The shortest run of tokens whose state is kept, and checked, when the text before it changes, on "
        "either engine; the embedded one makes it exact in idle time. What this costs is measured first: in idle "
        "time, or, for a llama-server, by towerctl calibrate. 0: only the beginning of a prompt is reused, "
        "as always with --fidelity exact.", low=0, high=2**20)
    level_formats: str | None = _set(None, "text", "--level-formats",
        "Stored formats to use, by level, such as 0=q4h,1=q6h,2=q8.", auto="what calibration finds")
    shrink_after_s: float = _set(600.0, "float", "--shrink-after",
        "Seconds without use after which state is stored in its level's format; 0: at once.",
        low=0)
    transform_after_s: float = _set(86400.0, "float", "--transform-after",
        "Seconds without use after which state is transform-coded to between a seventh and a tenth of its size, with a basis "
        "learned and measured for the model in idle time; sooner if disk space is short. -1: never.",
        low=-1)
    freeze_after_s: float = _set(3600.0, "float", "--freeze-after",
        "Seconds without use after which a conversation is also kept as coded text, a thousandth of "
        "its size. Only that copy stays when its state leaves for want of space. -1: never.",
        low=-1)
    codec_model: Path | None = _set(None, "path", "--codec-model",
        "Small GGUF of the llama architecture, such as towerctl train distill writes. It codes conversations "
        "if they become smaller than with the bundled one.")
    shared: str | None = _set(None, "text", "--shared",
        "URL of an object store in which machines share conversations and precached prompts, encrypted: s3://BUCKET/PREFIX, "
        "gs://..., az://... or file:///FOLDER. Its credentials come from the environment.")
    shared_key: Path | None = _set(None, "path", "--shared-key",
        "File with the key of the --shared store, the same on all machines.",
        auto="shared.key in the store, made at the first start")
    policy: str = _set("foresight", "text", "--policy",
        "Policy that chooses what leaves the live context, RAM and disk first when they are full.",
        choices=tuple(POLICIES))
    predictor: Path | None = _set(None, "path", "--predictor",
        "Predictor that towerctl train predictor wrote, for foresight and pbkv.",
        auto="learned while the daemon runs")
    anticipate: bool = _set(True, "bool", "--anticipate",
        "Evaluate in idle time the beginning of a chat's next prompt, if its template "
        "renders the last answer differently from how it was generated. Also evaluate exactly what was answered "
        "from state kept after changed text.", off="--no-anticipate")
    anticipate_tokens_max: int = _set(2048, "int", "--anticipate-tokens-max",
        "At most this many tokens are evaluated ahead for one answer.", low=1, high=2**20)
    prefetch_bytes: int = _set(0, "size", "--prefetch-bytes",
        "Bytes of attention state a second that may be restored or evaluated ahead, while the engine is idle, for "
        "the step that a workflow is likely to take next, such as 64MiB; 0: none.", low=0)
    search: bool = _set(True, "bool", "--search",
        "Keep a full-text index of all conversations, from which their titles also come. "
        "With --no-search the index is deleted.", off="--no-search")
    record: Path | None = _set(None, "path", "--record",
        "File to append a trace of all requests to, for towerctl lab replay; texts stay secret. With "
        "several models each has its own beside it: trace.NAME.jsonl for trace.jsonl.")
    retention: str = _set("none", "text", "--retention",
        "What happens when a chat outgrows its context: an error (none), dropping its oldest turns (shift), "
        "or a policy that keeps it within --live-budget.", choices=RETENTIONS)
    live_budget: int = _set(0, "int", "--live-budget",
        "Tokens of one chat that stay in the live context under a --retention policy.", low=0,
        high=2**31 - 1, auto="half of ctx-size")
    retention_scope: str = _set("layer", "text", "--retention-scope",
        "Whether a --retention policy chooses the live tokens once for all layers, separately for each "
        "layer, or for each KV head of each layer.", choices=RETENTION_SCOPES)
    prompt_tokens_max: int = _set(2**20, "int", "--prompt-tokens-max",
        "Tokens that the prompts of one request may have in total if --retention lets them be "
        "longer than the context.", low=1, high=2**31 - 1)
    recall_every: int = _set(64, "int", "--recall-every",
        "Generated tokens after which --retention icecache or latem chooses the live tokens again; 0: only at each prompt.",
        low=0, high=2**31 - 1)
    recall_layer_step: int = _set(3, "int", "--recall-layer-step",
        "Read the keys of every N-th layer for --retention icecache or latem; 1: all layers, but not icecache's first two.", low=1, high=1024)
    recall_bytes: int = _set(-1, "size", "--recall-bytes",
        "RAM for the rows and index that --retention icecache or latem can recall for one running chat; older rows go to disk. Chats that do not run share twice as much.",
        low=-1, auto="a 12th of the RAM")
    recall_disk_bytes: int = _set(-1, "size", "--recall-disk-bytes",
        "Disk for rows of one chat beyond --recall-bytes; when it is full, the oldest are dropped. 0: none.",
        low=-1, auto="four times recall-bytes, at most a quarter of warm-bytes")
    embeddings: bool = _set(False, "bool", "--embeddings --embedding",
        "Serve POST /embeddings, from a second context beside the one that chats.", off="--no-embeddings")
    reranking: bool = _set(False, "bool", "--reranking --rerank",
        "Serve POST /rerank; the model must be made for it.", off="--no-reranking")
    pooling: str | None = _set(None, "text", "--pooling",
        "How the rows of a text's tokens are pooled into an embedding.", choices=POOLINGS, auto="the model's own")
    n_predict: int = _set(-1, "int", "--n-predict --predict -n",
        "Tokens generated if a request sets no limit; -1: until the model stops or its context is full.", low=-1,
        high=2**31 - 1)
    chat_template: str | None = _set(None, "text", "--chat-template",
        "Jinja chat template to use.", auto="the model's own")
    chat_template_file: Path | None = _set(None, "path", "--chat-template-file",
        "File with the Jinja chat template to use.")
    slots_endpoint: bool = _set(True, "bool", "--slots",
        "Serve GET /slots.", off="--no-slots")
    metrics_endpoint: bool = _set(True, "bool", "--metrics",
        "Serve GET /metrics.", off="--no-metrics")
    props_endpoint: bool = _set(True, "bool", "--props",
        "Serve GET /props.", off="--no-props")
    slot_save_path: Path | None = _set(None, "path", "--slot-save-path",
        "Directory of the files that POST /slots/ID?action=save writes, and restore reads.")
    cors_origins: tuple[str, ...] = _set((), "list", "--cors-origins",
        "Origins whose web pages may call the API, besides this machine's own; * means any, localhost no others.")
    cors_methods: str = _set("GET, POST, PATCH, DELETE, OPTIONS", "text", "--cors-methods",
        "Methods of the API that web pages may use.")
    cors_headers: str | None = _set(None, "text", "--cors-headers",
        "Headers that web pages may send.", auto="those that they ask for")
    cors_credentials: bool = _set(False, "bool", "--cors-credentials",
        "Let these web pages send the browser's credentials, for a reverse proxy that asks for them; towerd "
        "itself takes only keys.", off="--no-cors-credentials")
    ui_mcp_proxy: bool = _set(False, "bool", "--ui-mcp-proxy --webui-mcp-proxy",
        "Serve /cors-proxy, through which only the chat page reaches MCP servers.",
        off="--no-ui-mcp-proxy --no-webui-mcp-proxy")
    sleep_idle_seconds: float = _set(-1.0, "float", "--sleep-idle-seconds",
        "Seconds without a request after which the model is unloaded; the next request loads it again. With several "
        "models, this holds for each, unless its table has idle_s. -1: never.", low=-1)
    request_bytes_max: int = _set(64 * 2**20, "size", "--request-bytes-max",
        "Largest request body, unpacked. All bodies that are not yet parsed or passed on may together take four times as much.", low=1024, high=2**31)
    engine: str = _set(None, "text", "--engine",
        "What evaluates the model: llama.cpp inside the daemon, or a llama-server behind it. auto takes the "
        "llama-server if it can use a GPU and the daemon cannot, or if the daemon refuses the model.",
        choices=(*ENGINES, AUTO), auto="embedded; with --upstream llama-server")
    llama_server_bin: Path | None = _set(None, "path", "--llama-server-bin",
        "The llama-server to start.", auto="the one in PATH, else towerd's own")
    llama_server_args: tuple[str, ...] = _set((), "args", "--llama-server-args",
        "More of llama-server's own flags, as on its command line; they may also stand among towerd's, or after --.")
    upstream: str | None = _set(None, "text", "--upstream",
        "URL of a running llama-server to use instead of starting one.")
    upstream_key: str | None = _set(None, "text", "--upstream-key",
        "The key that this llama-server requires.", secret=True)
    slot_dir: Path | None = _set(None, "path", "--slot-dir",
        "Directory for slot files; with --upstream, that server's --slot-save-path.",
        auto="one in memory, made at start and removed at the end")
    allow_vulnerable: bool = _set(False, "bool", "--allow-vulnerable",
        "Use a llama-server of b4882 to b9058, whose restore overflows (CVE-2026-43629).",
        off="--no-allow-vulnerable")
    queue_max: int = _set(256, "int", "--queue-max",
        "Requests that may wait; further ones get 503.", low=0, high=2**20)
    log_level: str = _set("info", "text", "--log-level",
        "How much to log.", choices=("debug", "info", "warning", "error"))
    log_format: str = _set("text", "text", "--log-format",
        "Lines for people, or one JSON object per line.", choices=("text", "json"))
    log_file: Path | None = _set(None, "path", "--log-file",
        "File to append the log to, in addition to the terminal.")
    # fmt: on
    vertex: Vertex | None = None
    """Not for people: where Vertex AI calls this process; None: it does not."""
    catalog_fd: int | None = None
    """Not for people: the socket, inherited from the router, of the store's catalog; None: this
    process opens the catalog."""
    behind_router: bool = False
    """Not for people: a router started this process, which listens on its socket alone and takes
    callers to be who the router says they are."""
    progress_fd: int | None = None
    """Not for people: the pipe to the router that is told how far loading is; None: nobody is."""

    def __post_init__(self) -> None:
        self._resolve()
        for name, spec in settings().items():
            value = getattr(self, name)
            if value is not None:
                spec.check(value, name)
        self._check_together()

    @property
    def ram_bytes(self) -> int:
        """Bytes of RAM that towerd may have: --ram-max, or what there is."""
        there_is = ram_bytes()
        return min(there_is, self.ram_max) if self.ram_max > 0 else there_is

    @property
    def has_container_limit(self) -> bool:
        """Whether --ram-max is what it is without being set."""
        return 0 < self.ram_max == container_ram_max() and not self.behind_router

    @property
    def hosts(self) -> tuple[str, ...]:
        """The addresses to listen on, in the given order."""
        return tuple(host.strip() for host in self.host.split(","))

    @property
    def load_words(self) -> list[str]:
        """What llama-server's flags say about how the embedded engine makes the model and its context."""
        return words_of(self.llama_server_args, "load") if self.engine == "embedded" else []

    @property
    def aliases(self) -> tuple[str, ...]:
        """The model's names that were set, in llama-server's order (sorted)."""
        names = (self.alias or "").split(",")
        return tuple(sorted({name.strip() for name in names} - {""}))

    def text_bytes_max(self, n_ctx: int) -> int:
        """Bytes of text that are tokenized at once: llama.cpp takes some fifty times as many, and
        no prompt that is allowed is so long."""
        return max(TEXT_BYTES_MAX, TEXT_BYTES_PER_TOKEN * max(n_ctx, self.prompt_tokens_max))

    def chat_template_source(self) -> str | None:
        """The chat template that was set, read from its file if need be; None: the model's own.
        Raises ConfigError if the file cannot be read."""
        if self.chat_template_file is None:
            return self.chat_template
        try:
            return self.chat_template_file.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(
                f"Cannot read the chat template {self.chat_template_file}: {error}."
            ) from error

    def _resolve(self) -> None:
        """Replace the values that stand for "auto" by those in force."""
        auto: dict[str, Any] = {}
        if self.ram_max == -1:
            object.__setattr__(self, "ram_max", container_ram_max())
        ram = self.ram_bytes
        if self.store_dir is None:
            auto["store_dir"] = paths.store_dir()
        if self.socket is None:
            auto["socket"] = paths.runtime_socket(auto.get("store_dir", self.store_dir))
        if self.engine is None:
            auto["engine"] = "embedded" if self.upstream is None else "llama-server"
        if self.upstream is not None:
            auto["upstream"] = self.upstream.rstrip("/")
        if self.threads == 0:
            auto["threads"] = usable_cores()
        if self.threads_batch == 0:
            auto["threads_batch"] = auto.get("threads", self.threads)
        if self.memory == -1:
            auto["memory"] = ram * 4 // 5
        if self.recall_bytes == -1:
            auto["recall_bytes"] = ram // 12
        if self.warm_bytes == -1:
            free = free_bytes(auto.get("store_dir", self.store_dir))
            auto["warm_bytes"] = min(self.disk_max or WARM_BYTES_MAX, free // 2)
        if self.hot_bytes == -1:
            on_disk = auto.get("warm_bytes", self.warm_bytes) > 0 and not self.write_budget
            auto["hot_bytes"] = min(HOT_BYTES, ram // 8) if on_disk else ram // 8
        if self.recall_disk_bytes == -1:
            most = auto.get("warm_bytes", self.warm_bytes) // 4
            most = min(most, self.disk_max // 4) if self.disk_max else most
            auto["recall_disk_bytes"] = min(4 * auto.get("recall_bytes", self.recall_bytes), most)
        if self.checkpoint_bytes == -1:
            most = auto.get("warm_bytes", self.warm_bytes) // 4
            auto["checkpoint_bytes"] = min(most, self.disk_max // 4) if self.disk_max else most
        for name, value in auto.items():
            object.__setattr__(self, name, value)

    def _check_together(self) -> None:
        """Check combinations of fields."""
        for host in self.hosts:
            if "/" in host:
                raise ConfigError(
                    f"--host {host} is not an address: --socket takes the path of a Unix socket."
                )
        is_local = all(is_loopback(host) for host in self.hosts)
        if not self.api_keys and not is_local and self.vertex is None:
            raise ConfigError(
                f"Listening on {self.host} lets other machines in: set a key with --api-key or "
                "--api-key-file, or listen on 127.0.0.1."
            )
        if self.live_sequences < self.parallel:
            raise ConfigError(
                f"live_sequences {self.live_sequences} is less than parallel {self.parallel}: "
                "every running request needs a live sequence."
            )
        if self.flash_attn == "off" and self.cache_type_v not in UNQUANTIZED:
            raise ConfigError(
                f"cache_type_v {self.cache_type_v} needs flash attention: leave flash_attn at auto."
            )
        if self.level_formats is not None:
            LevelFormats.parse(self.level_formats)
            if self.fidelity == "exact":
                raise ConfigError(
                    "fidelity exact stores rows as computed: leave level_formats out."
                )
        if self.chat_template is not None and self.chat_template_file is not None:
            raise ConfigError("Set chat_template or chat_template_file, not both.")
        if self.disk_max and self.recall_disk_bytes + self.checkpoint_bytes > self.disk_max // 2:
            raise ConfigError(
                "--recall-disk-bytes and --checkpoint-bytes may be half of --disk-max together: lower them."
            )
        self._check_shared()
        self._check_model()
        self._check_sleep()
        self._check_engine()
        if self.socket is not None and len(os.fsencode(self.socket)) > SOCKET_PATH_BYTES_MAX:
            raise ConfigError(
                f"The socket path {self.socket} is longer than {SOCKET_PATH_BYTES_MAX} bytes: "
                "give a shorter one with --socket."
            )

    def _check_shared(self) -> None:
        """A URL of an object store, without credentials: other users see the command line."""
        if self.shared is None:
            if self.shared_key is not None:
                raise ConfigError("--shared-key is for a --shared URL; there is none.")
            return
        scheme, found, place = self.shared.partition("://")
        if not found or scheme not in SHARED_SCHEMES or not place.strip("/"):
            raise ConfigError(
                f"--shared takes a URL such as {', '.join(f'{each}://...' for each in SHARED_SCHEMES)}."
            )
        if scheme == "file" and not place.startswith("/"):
            raise ConfigError("--shared file:// takes an absolute path: file:///FOLDER.")
        if "@" in place or "?" in place:
            raise ConfigError(
                "--shared takes a URL without credentials: set those of the store in the environment."
            )

    def _check_sleep(self) -> None:
        """A model that sleeps is one that towerd loads."""
        if self.sleep_idle_seconds != -1 and self.sleep_idle_seconds <= 0:
            raise ConfigError("--sleep-idle-seconds must be more than 0, or -1 for never.")
        if self.sleep_idle_seconds > 0 and self.upstream is not None:
            raise ConfigError(
                "--sleep-idle-seconds is for a model that towerd loads: give it to the llama-server at "
                f"{self.upstream}."
            )

    def _check_model(self) -> None:
        """One model is named, in one way."""
        if self.model is not None and self.hf_repo is not None:
            raise ConfigError("Name a model with --model or with --hf-repo, not with both.")
        if self.hf_file is not None and self.hf_repo is None:
            raise ConfigError(
                "--hf-file is a file of a repository: also give --hf-repo OWNER/REPO."
            )
        if self.upstream is not None and self.hf_repo_draft:
            raise ConfigError(
                "A draft model of --hf-repo-draft is for an engine that towerd starts: leave it out."
            )

    def _check_retention(self) -> None:
        """Only the embedded engine can drop single positions, and only a policy needs a budget."""
        if self.retention in UNBOUNDED:
            if self.live_budget:
                raise ConfigError(
                    f"--live-budget needs a policy that keeps to it: set --retention to one of "
                    f"{', '.join(name for name in RETENTIONS if name not in UNBOUNDED)}."
                )
        elif self.engine == "llama-server":
            raise ConfigError(
                f"--retention {self.retention} needs the embedded engine; a llama-server takes "
                "none or shift."
            )

    def _check_engine(self) -> None:
        """Check the engine's settings: a llama-server is either started or attached to."""
        self._check_retention()
        if self.engine == AUTO and self.upstream is not None:
            raise ConfigError("--upstream needs --engine llama-server.")
        if self.engine == "embedded":
            for name in ("upstream", "llama_server_bin", "slot_dir"):
                if getattr(self, name):
                    flag = settings()[name].flags[0]
                    raise ConfigError(f"{flag} needs --engine llama-server.")
            check_flags(self.llama_server_args, own_flags())
        if self.upstream is None:
            if self.upstream_key is not None:
                raise ConfigError("--upstream-key is the key of an --upstream; there is none.")
            return
        if not is_http_url(self.upstream):
            raise ConfigError(
                f"The upstream {self.upstream!r} is not a URL such as http://127.0.0.1:8081."
            )
        for name in ("llama_server_bin", "llama_server_args"):
            if getattr(self, name):
                raise ConfigError(
                    f"{settings()[name].flags[0]} is for a llama-server that towerd starts; "
                    "the one at --upstream runs already."
                )
        if self.slot_dir is None:
            raise ConfigError(
                "An --upstream needs --slot-dir: start that llama-server with "
                "--slot-save-path DIR and give towerd the same directory."
            )


def settings() -> dict[str, Setting]:
    """Field name -> its Setting, in the order of the class."""
    return {item.name: item.metadata["setting"] for item in fields(Config) if item.metadata}


def own_flags() -> dict[str, str]:
    """Flag -> the field that it sets."""
    return {
        flag: name for name, spec in settings().items() for flag in (*spec.flags, *spec.off_flags)
    }


def defaults() -> dict[str, Any]:
    """Field name -> the default as written in the class, before "auto" is resolved."""
    return {item.name: item.default for item in fields(Config) if item.metadata}


def with_server_args(config: Config, words: tuple[str, ...]) -> Config:
    """`config` with `words` after its llama_server_args. Raises ConfigError."""
    return replace(config, llama_server_args=(*config.llama_server_args, *words))


def pinned_bytes(config: Config) -> int:
    """RAM for rows of precached and pinned prompts, where it is more than --hot-bytes."""
    return config.ram_bytes // 8


def parked_bytes(config: Config) -> int:
    """RAM for rows of chats that a retention made partial and that left the context."""
    return 2 * config.recall_bytes


def partial_bytes(config: Config) -> int:
    """RAM for all that a retention keeps of chats outside the context: 0 without one."""
    return 0 if config.retention == "none" else config.recall_bytes + parked_bytes(config)


def chats_bytes(config: Config) -> int:
    """RAM for rows outside the live context that are not pinned."""
    return config.hot_bytes + partial_bytes(config)
