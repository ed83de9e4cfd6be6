from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

STREAM_BYTES: int
"""From this size on, the output of one call bypasses the caches, if the memory is not new and the
CPU has instructions for that."""

def available() -> list[str]:
    """Names of the instruction sets that this machine has, best first."""

def formats() -> list[tuple[str, int, int, int, bool]]:
    """(name, type id, block elements, block bytes, rotated) of each format."""

def gittins(
    chances: npt.NDArray[np.float64], widths: npt.NDArray[np.float64]
) -> npt.NDArray[np.float64]:
    """[n, bins]: for each bin of each row, the best ratio over all horizons from the bin's beginning
    of the probability of a return to the mean time spent (Gittins 1979). A return counts as in the
    middle of its bin.

    chances: [n, bins], the probability of a return within a bin, given none before it; widths:
    [bins], the bins' widths in any unit; both contiguous. ValueError for chances outside [0, 1] and
    widths that are not above 0."""

def hazard_chances(
    w1: npt.NDArray[np.float64],
    b1: npt.NDArray[np.float64],
    correction: npt.NDArray[np.float64],
    logits: npt.NDArray[np.float64],
    x: npt.NDArray[np.float64],
    of: Sequence[int],
) -> npt.NDArray[np.float64]:
    """Probabilities of return by bin; the contract is in lab.reference.hazard."""

def populate(start: int, stride: int, n: int, run_bytes: int) -> bool:
    """Have the pages of `n` runs of `run_bytes` bytes in RAM and writable; the first run is at the
    address `start`, each other one `stride` bytes after the one before.

    What is stored in them stays, and other threads may write to them meanwhile. All of it must be
    memory of this process. Returns False where nothing was done, or only a part: elsewhere than on
    Linux, before its version 5.14, or without free memory."""

def decrypt_pages(
    functions: Sequence[int], key: bytes, sealed: Any, plain: Any, page_bytes: int, first: int
) -> bool:
    """Decrypt consecutive pages (AES-256-GCM, the number of a page its nonce) without the GIL. False: one is damaged, and
    what `plain` has then means nothing.

    functions: addresses of a libcrypto's EVP_CIPHER_CTX_new, EVP_CIPHER_CTX_free, EVP_aes_256_gcm, EVP_DecryptInit_ex,
    EVP_DecryptUpdate, EVP_CIPHER_CTX_ctrl and EVP_DecryptFinal_ex, which stays loaded; key: 32 bytes; sealed: buffer of
    pages, each with its tag behind it; plain: writable buffer for these pages of `page_bytes`, the last of which may be
    shorter; first: the number of the first. ValueError for sizes that do not match."""

def check_rope_shift(
    src: npt.NDArray[np.uint8],
    out: npt.NDArray[np.uint8],
    format: str,
    cos: npt.NDArray[np.float32],
    sin: npt.NDArray[np.float32],
    row_table: npt.NDArray[np.int32] | None,
    head_dim: int,
    n_rot: int,
    first: int,
    neox: bool,
    hadamard_block: int,
    n_threads: int = 1,
) -> None:
    """ValueError for arguments that `Kernels.rope_shift` refuses."""

# Arguments are checked in C++: any buffer of the right shape and format is taken. What each kernel
# does is in `dispatch`.
class Kernels:
    """All kernels for one instruction set. ValueError if it is not available."""

    def __init__(self, name: str) -> None: ...
    @property
    def name(self) -> str: ...
    def copy_planes(
        self,
        dst: Any,
        jobs: Sequence[tuple[int, npt.NDArray[np.uint8], npt.NDArray[np.int64] | None]],
        n_threads: int = 1,
    ) -> None: ...
    def transpose(
        self,
        src: npt.NDArray[np.uint8],
        out: npt.NDArray[np.uint8],
        element_bytes: int,
        n_threads: int = 1,
    ) -> None: ...
    def transcode(
        self,
        dst: Any,
        jobs: Sequence[tuple[int, npt.NDArray[np.uint8], npt.NDArray[np.int64] | None, str, str]],
        n_threads: int = 1,
        is_new: bool = False,
    ) -> None: ...
    def transcoded(
        self, rows: npt.NDArray[np.uint8], src_format: str, dst_format: str, n_threads: int = 1
    ) -> npt.NDArray[np.uint8]: ...
    def rope_shift(
        self,
        src: npt.NDArray[np.uint8],
        out: npt.NDArray[np.uint8],
        format: str,
        cos: npt.NDArray[np.float32],
        sin: npt.NDArray[np.float32],
        row_table: npt.NDArray[np.int32] | None,
        head_dim: int,
        n_rot: int,
        first: int,
        neox: bool,
        hadamard_block: int,
        n_threads: int = 1,
    ) -> None: ...
    def attention_mass(
        self,
        queries: npt.NDArray[np.float32],
        keys: npt.NDArray[np.uint8],
        format: str,
        n_seen: npt.NDArray[np.int64],
        head_dim: int,
        scale: float,
        n_threads: int = 1,
        sinks: npt.NDArray[np.float32] | None = None,
        weights: npt.NDArray[np.float32] | None = None,
    ) -> npt.NDArray[np.float32]: ...

def mixer_state_size(n_tokens: int) -> int:
    """Numbers in the state of a Mixer."""

class RangeEncoder:
    """Decisions to bits, as constriction's range encoder writes them."""

    def __init__(self) -> None: ...
    def put(self, bits: npt.NDArray[np.int32], chances: npt.NDArray[np.float64]) -> None:
        """Append decisions, each with its probability of being 1, a multiple of 1 / 65536."""

    def finish(self) -> bytes:
        """The bytes of all decisions, without zeros at their end."""

class RangeDecoder:
    """Decisions out of bits, as constriction's range decoder reads them."""

    def __init__(self, data: bytes) -> None: ...
    def take(self, probability: int) -> int:
        """The next decision, which is 1 with `probability` out of 65536."""

class Mixer:
    """Context mixing; the contract is in lab.reference.mix."""

    def __init__(
        self,
        weights: npt.NDArray[np.uint32],
        tables: Sequence[tuple[npt.NDArray[np.uint32], npt.NDArray[np.uint16]]],
        state: npt.NDArray[np.uint32],
        kinds: npt.NDArray[np.uint8],
    ) -> None: ...
    def reset(self, lanes: int = 1, table_bits: int = 16) -> None:
        """Go back to the initial state."""

    def begin(self, lane: int, counts: npt.NDArray[np.uint32] | None = None) -> int:
        """Start the next token of a lane; P(1) of its first decision, times 65536."""

    def step(self, bit: int) -> int:
        """Learn a decision; P(1) of the next one times 65536, or -1 - rank."""

    def encode(
        self,
        lane: int,
        ranks: npt.NDArray[np.int32],
        counts: npt.NDArray[np.uint32] | None = None,
    ) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.float64]]:
        """(decisions, their P(1)) of tokens; learns from them."""

    def decode(
        self,
        lane: int,
        decoder: RangeDecoder,
        n: int,
        counts: npt.NDArray[np.uint32] | None = None,
    ) -> npt.NDArray[np.int32]:
        """The next n tokens of a lane; learns from them."""

    def learn(self, lane: int, ranks: npt.NDArray[np.int32]) -> None:
        """Learn from tokens without coding them."""

    def state(self) -> npt.NDArray[np.uint32]:
        """A copy of everything that was learned."""

def read_side_by_side(
    models: list[Lm],
    mixer: Mixer,
    decoders: list[RangeDecoder],
    sizes: list[int],
    order: npt.NDArray[np.int64],
    first: int,
    instead: int,
) -> list[list[int]]:
    """The ranks of coded texts, one per lane of the mixer; a thread for each model."""

class Lm:
    """A small language model; the contract is in lab.reference.lm."""

    def __init__(
        self,
        name: str,
        sizes: Sequence[int],
        norm_eps: float,
        matrices: Sequence[tuple[str, npt.NDArray[np.uint8]]],
        norms: Sequence[npt.NDArray[np.float32]],
        cos: npt.NDArray[np.float32],
        sin: npt.NDArray[np.float32],
    ) -> None: ...
    def reset(self) -> None:
        """Forget all texts."""

    def step(
        self, lanes: npt.NDArray[np.int32], tokens: npt.NDArray[np.int32], n_threads: int = 1
    ) -> npt.NDArray[np.float32]:
        """Append tokens to lanes; the logits of the next tokens."""

    def counts(self, logits: npt.NDArray[np.float32]) -> npt.NDArray[np.uint32]:
        """The distribution of each row, as integers."""

class DciKeys:
    """Where the keys of a tree lie; see `dci.keys_at`."""

    def __init__(
        self,
        planes: Sequence[npt.NDArray[np.uint8]],
        formats: Sequence[str],
        which: npt.NDArray[np.int32],
        numbers: npt.NDArray[np.int32],
        n_dims: int,
    ) -> None: ...
    def __len__(self) -> int: ...

class DciTree:
    """Multi-level prioritized DCI; the contract is in lab.reference.dci. A tree holds no keys but the few
    that others hang below, so each call gets them. Those that were removed may be missing."""

    def __init__(
        self,
        n_dims: int,
        directions: npt.NDArray[np.float32],
        ratio: float,
        page_rows: int,
        seed: int,
        visits_max: int,
        beam: int,
        isa: str | None = None,
    ) -> None: ...
    def __len__(self) -> int: ...
    @property
    def n_levels(self) -> int: ...
    @property
    def n_pages(self) -> int: ...
    @property
    def nbytes(self) -> int: ...
    def add(self, keys: DciKeys) -> None:
        """Insert the keys behind those that are there."""

    def remove(self, gone: npt.NDArray[np.uint8]) -> None:
        """Find these keys no more, uint8[n]; their rows are not read again."""

    def search(
        self,
        keys: DciKeys,
        queries: npt.NDArray[np.float32],
        k: int,
        visits_max: int,
        beam: int,
    ) -> npt.NDArray[np.int64]:
        """Numbers of the k keys with the largest inner products, for each query."""

    def vote(
        self,
        keys: DciKeys,
        queries: npt.NDArray[np.float32],
        k: int,
        visits_max: int,
        beam: int,
        others: npt.NDArray[np.float32],
        there: npt.NDArray[np.uint8],
    ) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.float32]]:
        """Keys in the pages of the k nearest ones, and the attention that they get."""

    def levels(self) -> npt.NDArray[np.int64]:
        """The level of each key."""

    def parents(self) -> npt.NDArray[np.int64]:
        """The key that each one hangs below, or -1."""

    def pages(self) -> npt.NDArray[np.int64]:
        """The page of each key; -1: it was removed."""

    def copy(self) -> DciTree:
        """The same tree, apart from now on."""

def common_before(a: bytes, i: int, b: bytes, j: int, n: int) -> int:
    """The number of tokens, at most n, before a[i] and b[j] that agree; a and b are int32."""

def common_after(a: bytes, i: int, b: bytes, j: int, n: int) -> int:
    """The number of tokens, at most n, from a[i] and b[j] on that agree; a and b are int32."""

TOKEN_INDEX_CONTEXT: int
"""Tokens that determine which window of them is sampled."""

TOKEN_INDEX_PLACES: int
"""Most places that are known of a window under one key."""

TOKEN_INDEX_SHARDS: int
"""Parts of a TokenIndex that are compacted one by one."""

class TokenIndex:
    """Where in stored paths windows of tokens occur; the contract is in lab.reference.token_index."""

    def __init__(self, seed: int) -> None: ...
    def __len__(self) -> int: ...
    @property
    def nbytes(self) -> int: ...
    def add(self, runs: Sequence[tuple[int, int, int, int, int, bytes, bytes]]) -> None:
        """Enter the sampled windows of nodes."""

    def find(self, keys: Sequence[int], ids: bytes, start: int, stop: int) -> npt.NDArray[np.int64]:
        """[n, 3]: where a window ends in the prompt, an owner, where it ends in the owner's path."""

    def compact(self, live: npt.NDArray[np.int64], start: int, stop: int) -> None:
        """Forget the places of other owners in these shards."""

class NodeTap:
    """Copies tensors out of a compute graph; see lab.reference.taps."""

    def __init__(self, name: int, n_bytes: int, n_elements: int, get: int) -> None: ...
    @property
    def callback(self) -> int: ...
    @property
    def user_data(self) -> int: ...
    @property
    def error(self) -> str: ...
    def watch(self, names: Sequence[str]) -> None:
        """Forget what was collected; collect tensors of these names."""

    def places(self) -> list[tuple[str, int]]:
        """(name, layer) of what was collected."""

    def read(
        self, name: str, layer: int
    ) -> tuple[tuple[int, ...], tuple[int, ...], npt.NDArray[np.uint8]]:
        """(shape, strides in bytes, data) of a tensor. KeyError if it is not there."""

class RowTransform:
    """A learned linear transform of rows; see lab.reference.row_transform."""

    def __init__(
        self,
        vectors: npt.NDArray[np.uint16],
        mean: npt.NDArray[np.float32],
        weights: npt.NDArray[np.float32],
    ) -> None: ...
    @property
    def n_components(self) -> int: ...
    @property
    def n_elements(self) -> int: ...

class Quantizer:
    """How components are rounded and written; see lab.reference.row_transform."""

    def __init__(
        self,
        step: float,
        dead_zone: float,
        shrink: float,
        classes: npt.NDArray[np.uint8],
        shifts: npt.NDArray[np.uint8],
        frequencies: npt.NDArray[np.uint16],
    ) -> None: ...

PAGE_ROWS_MAX: int

def row_components(
    transform: RowTransform,
    planes: Sequence[npt.NDArray[np.uint8]],
    format: str,
    n_threads: int,
    isa: str,
) -> npt.NDArray[np.float32]:
    """The components of rows, float32[n, n_components]."""

def encode_row_pages(
    jobs: Sequence[tuple[RowTransform, Quantizer, Sequence[npt.NDArray[np.uint8]]]],
    format: str,
    n_threads: int,
    isa: str,
) -> list[bytes]:
    """The page of each (transform, quantizer, planes)."""

def decode_row_pages(
    jobs: Sequence[tuple[RowTransform, Quantizer, Any, Sequence[npt.NDArray[np.uint8]]]],
    format: str,
    n_threads: int,
    isa: str,
) -> list[bool]:
    """Whether each (transform, quantizer, page, planes) could be read into its planes."""
