"""Running a call that recurses deeply in a thread with room for it.

Several pre-tokenizers of llama.cpp go through std::regex, which recurses once per character of
an unbroken run (measured: up to 400 bytes of stack each). A base64 attachment of 40 kB would
overflow an ordinary stack and end the process.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import numpy as np

from towerd.errors import InvalidRequest

T = TypeVar("T")

RUN_BYTES_SAFE = 2_000
"""Runs up to this length fit any thread's stack."""
RUN_BYTES_MAX = 256 << 10
_STACK_BYTES_PER_BYTE = 2_048
_STACK_BYTES_BASE = 8 << 20

_HAND_SPLIT = frozenset({
    "command-r", "dbrx", "falcon-h1", "falcon3", "gemma4", "gpt-2", "hunyuan", "lfm2", "llama-bpe",
    "llama-v3", "llama3", "mpt", "olmo", "phi-2", "pixtral", "qwen2", "qwen35", "refact",
    "smaug-bpe", "smollm", "stablelm2", "starcoder",
})  # fmt: skip
_LINE_RUNS = frozenset({"exaone-moe"})  # its regex runs on across single spaces
_stack_size_lock = threading.Lock()


def needs_deep_stack(pre_tokenizer: str) -> bool:
    """Whether llama.cpp splits text for this `tokenizer.ggml.pre` with std::regex.

    Names it splits by hand are known; any other is assumed not to be among them."""
    return pre_tokenizer not in _HAND_SPLIT


def longest_run(text: bytes, pre_tokenizer: str) -> int:
    """Bytes of the longest stretch that one regex match can cover: all whitespace or none."""
    data = np.frombuffer(text, np.uint8)
    if pre_tokenizer in _LINE_RUNS:
        breaks = data == 10
    else:
        breaks = (data == 32) | ((data >= 9) & (data <= 13))
    edges = np.flatnonzero(breaks[1:] != breaks[:-1])
    ends = np.concatenate(([-1], edges, [len(data) - 1]))
    return int(np.diff(ends).max()) if len(data) else 0


def call_deep(work: Callable[[], T], run_bytes: int) -> T:
    """`work()` on a stack large enough for a run of `run_bytes`; its exceptions pass through.

    Raises InvalidRequest when the run is longer than `RUN_BYTES_MAX`."""
    if run_bytes <= RUN_BYTES_SAFE:
        return work()
    if run_bytes > RUN_BYTES_MAX:
        raise InvalidRequest(
            f"The text has {run_bytes} bytes without a break; this model's tokenizer takes "
            f"{RUN_BYTES_MAX}."
        )
    with ThreadPoolExecutor(1, "towerd-deep-tokenize") as thread:
        with _stack_size_lock:
            before = threading.stack_size(_STACK_BYTES_BASE + run_bytes * _STACK_BYTES_PER_BYTE)
            try:
                result = thread.submit(work)  # starts the thread
            finally:
                threading.stack_size(before)
        return result.result()
