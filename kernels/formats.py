"""The ggml types that a KV cache may hold, one row each."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Format:
    """How one ggml type lays out a row: blocks of `block_elements` in `block_bytes` bytes."""

    name: str
    """llama-server's word for it (`--cache-type-k NAME`)."""
    ggml_type: int
    block_elements: int
    block_bytes: int

    @property
    def is_quantized(self) -> bool:
        """True when a block holds more than one element."""
        return self.block_elements > 1

    def row_bytes(self, n_elements: int) -> int:
        """Bytes of a row of `n_elements`; ValueError unless it is a whole number of blocks."""
        if n_elements <= 0 or n_elements % self.block_elements:
            raise ValueError(
                f"n_elements: {n_elements} is not a positive multiple of {self.block_elements}"
            )
        return n_elements // self.block_elements * self.block_bytes

    def n_elements(self, row_bytes: int) -> int:
        """Elements in a row of `row_bytes`; ValueError unless it is a whole number of blocks."""
        if row_bytes <= 0 or row_bytes % self.block_bytes:
            raise ValueError(
                f"row_bytes: {row_bytes} is not a positive multiple of {self.block_bytes}"
            )
        return row_bytes // self.block_bytes * self.block_elements


FORMATS: tuple[Format, ...] = (
    Format("f32", 0, 1, 4),
    Format("f16", 1, 1, 2),
    Format("q4_0", 2, 32, 18),
    Format("q4_1", 3, 32, 20),
    Format("q5_0", 6, 32, 22),
    Format("q5_1", 7, 32, 24),
    Format("q8_0", 8, 32, 34),
    Format("iq4_nl", 20, 32, 18),
    Format("bf16", 30, 1, 2),
)

BY_TYPE: dict[int, Format] = {row.ggml_type: row for row in FORMATS}
BY_NAME: dict[str, Format] = {row.name: row for row in FORMATS}
