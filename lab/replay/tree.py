"""Builds a tree of segments from lists of block ids.

A block id names a block together with everything before it, so it has one parent. Blocks that
are always used together (no request ends between them, none branches off) become one segment,
cut at a maximum length: the unit that a cache keeps or evicts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from lab.replay.trace import TraceError

_NONE = -1


@dataclass(frozen=True, slots=True)
class BlockPrompt:
    """The input of one request inside a builder: all its blocks in order."""

    index: int
    blocks: list[int]


class TreeBuilder:
    """Collects prompts, each given as a change of an earlier one, and builds the tree and the
    paths.

    The caller numbers blocks 0, 1, 2, ... in order of first appearance."""

    def __init__(self) -> None:
        self._parent: list[int] = []
        self._is_end: list[bool] = []
        self._prompts: list[tuple[int, int, list[int]]] = []

    def add(self, before: BlockPrompt | None, n_kept: int, new: Sequence[int]) -> BlockPrompt:
        """The prompt that begins with the first `n_kept` blocks of `before`, then has `new`.
        Raises TraceError for a block with two different predecessors (which includes cycles), for
        n_kept beyond `before`, and for a prompt without blocks."""
        old = before.blocks if before is not None else []
        if not 0 <= n_kept <= len(old):
            raise TraceError(f"a request keeps {n_kept} blocks of one that has {len(old)}")
        blocks = old[:n_kept]
        at = blocks[-1] if blocks else _NONE
        for block in new:
            if block == len(self._parent):
                self._parent.append(at)
                self._is_end.append(False)
            elif not 0 <= block < len(self._parent):
                raise TraceError(f"block {block} is out of order")
            elif self._parent[block] != at:
                raise TraceError("a block id follows two different blocks; ids must name prefixes")
            at = block
        blocks.extend(new)
        if not blocks:
            raise TraceError("a request has no blocks")
        self._is_end[at] = True
        index = len(self._prompts)
        self._prompts.append((before.index if before is not None else _NONE, n_kept, list(new)))
        return BlockPrompt(index, blocks)

    @property
    def n_blocks(self) -> int:
        return len(self._parent)

    def finish(self, segment_blocks_max: int) -> tuple[list[int], list[int], list[tuple[int, ...]]]:
        """(parents, lengths in blocks, path of every prompt), segments numbered parents first."""
        if segment_blocks_max < 1:
            raise ValueError(f"segment_blocks_max is {segment_blocks_max}")
        segment_of, parents, lengths = self._segments(segment_blocks_max)
        paths: list[tuple[int, ...]] = []
        for before, n_kept, new in self._prompts:
            path: list[int] = []
            n_covered = 0
            for segment in paths[before] if before >= 0 else ():
                if n_covered >= n_kept:
                    break
                path.append(segment)
                n_covered += lengths[segment]
            last = path[-1] if path else _NONE
            for block in new:
                if segment_of[block] != last:
                    last = segment_of[block]
                    path.append(last)
            paths.append(tuple(path))
        return parents, lengths, paths

    def _segments(self, blocks_max: int) -> tuple[list[int], list[int], list[int]]:
        n_children = [0] * len(self._parent)
        for parent in self._parent:
            if parent >= 0:
                n_children[parent] += 1
        segment_of: list[int] = []
        parents: list[int] = []
        lengths: list[int] = []
        for parent in self._parent:
            above = segment_of[parent] if parent >= 0 else _NONE
            goes_on = above >= 0 and n_children[parent] == 1 and not self._is_end[parent]
            if goes_on and lengths[above] < blocks_max:
                lengths[above] += 1
                segment_of.append(above)
                continue
            segment_of.append(len(parents))
            parents.append(above)
            lengths.append(1)
        return segment_of, parents, lengths
