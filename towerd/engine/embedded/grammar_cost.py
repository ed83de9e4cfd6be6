"""What following a grammar costs: the ways into its rules, which llama.cpp walks at every token.

llama.cpp keeps one stack for each terminal that may come next. It compares every new stack with
all others, and tries the tokens of the vocabulary against each. So a grammar is refused when too
many terminals may stand at one place, or when one character may lead to too many of them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import TypeAlias

from towerd.errors import InvalidRequest

TEXT = -1
"""Item of an alternate: a literal of several characters. What matches one character is below it,
see `character`."""

DEPTH_MAX = 10_000
WALKS_MAX = 100_000
"""Ways to descend through the leftmost references; llama.cpp walks every one."""
STARTS_MAX = 4_000
"""Terminals that may come next. With 16,000 each comparison of all takes 0.3 s."""
TRIES_MAX = 128_000_000
"""Terminals that may come next, times tokens of the vocabulary: a second at most."""
PAIRS_MAX = 10_000
"""Terminals that may come next, each with all that may follow it. Grammars of JSON and of
programming languages have less than a hundred."""
_UNITS_A_TRY = 4
"""So many characters of a class are compared in the time that a terminal takes anyway."""

Rules: TypeAlias = Sequence[Sequence[Sequence[int]]]
"""By rule: its alternates of items, each the number of a rule, `TEXT` or a `character`."""


def character(n_units: int) -> int:
    """The item of a terminal that matches one character by comparing it with `n_units`."""
    return TEXT - max(1, -(-n_units // _UNITS_A_TRY))


def check_cost(rules: Rules, names: dict[int, str], n_vocab: int) -> None:
    """Raises InvalidRequest, naming the rule, for left recursion that grows llama.cpp's stacks
    and for a grammar that takes too long to follow with a vocabulary of `n_vocab` tokens."""
    # llama.cpp refuses the cycles it sees; it takes only rules with an empty alternate as empty.
    empty = [any(not items for items in alternates) for alternates in rules]
    for rule, is_cyclic in enumerate(_cyclic(_left_edges(rules, empty))):
        if is_cyclic:
            raise InvalidRequest(f"grammar: rule '{names[rule]}' is left-recursive.")
    nullable = _nullable(rules)
    edges = _left_edges(rules, nullable)
    component = _components([[to for to, _ in out] for out in edges])
    # Components are numbered so that every edge leads to a lower or the same number.
    order = sorted(range(len(rules)), key=lambda rule: component[rule])
    _check_walks(edges, component, order, names)
    _Starts(rules, nullable, order).check(names, n_vocab)


def _check_walks(
    edges: list[list[tuple[int, bool]]],
    component: list[int],
    order: list[int],
    names: dict[int, str],
) -> None:
    # What llama.cpp overlooks is harmless unless something follows the recursive reference.
    walks, depth = [1] * len(edges), [1] * len(edges)
    for rule in order:
        for to, is_tail in edges[rule]:
            if component[to] == component[rule]:
                if not is_tail:
                    raise InvalidRequest(f"grammar: rule '{names[rule]}' is left-recursive.")
                continue
            walks[rule] += walks[to]
            depth[rule] = max(depth[rule], depth[to] + 1)
        if walks[rule] > WALKS_MAX or depth[rule] > DEPTH_MAX:
            raise InvalidRequest(f"grammar: rule '{names[rule]}' is too complex.")


class _Starts:
    """Of each rule, the terminals that it may begin with. A rule that refers to itself is counted
    as if it did so once."""

    def __init__(self, rules: Rules, nullable: list[bool], order: list[int]) -> None:
        n = len(rules)
        self._nullable = nullable
        self.starts = [0] * n
        self.tries = [0] * n
        """The starts, those that take longer to compare counted more."""
        self.pairs = [0] * n
        """Pairs of a start and a terminal that may follow its character within the rule."""
        self.ends = [0] * n
        """Starts with whose character the rule may be over."""
        for _ in range(2):
            for rule in order:
                found = [self._of_alternate(items) for items in rules[rule]]
                self.starts[rule], self.tries[rule], self.pairs[rule], self.ends[rule] = (
                    sum(counts) for counts in zip(*found, strict=True)
                )

    def check(self, names: dict[int, str], n_vocab: int) -> None:
        tries_max = min(STARTS_MAX, TRIES_MAX // n_vocab)
        for rule, n in enumerate(self.tries):
            if n > tries_max:
                raise InvalidRequest(
                    f"grammar: rule '{names[rule]}' can begin in {n} ways; with this vocabulary "
                    f"at most {tries_max} can be followed."
                )
        for rule, n in enumerate(self.pairs):
            if n > PAIRS_MAX:
                raise InvalidRequest(
                    f"grammar: rule '{names[rule]}' can go on in {n} ways after one character; at "
                    f"most {PAIRS_MAX} can be followed."
                )

    def _of_alternate(self, items: Sequence[int]) -> tuple[int, int, int, int]:
        """Starts, tries, pairs and ends of one alternate, from its last item to its first."""
        counts = 0, 0, 0, 0
        may_end = True
        for item in reversed(items):
            own = self._of_item(item, n_next=counts[0], may_end=may_end)
            is_skipped = item >= 0 and self._nullable[item]
            if is_skipped:
                starts, tries, pairs, ends = (a + b for a, b in zip(counts, own, strict=True))
                counts = starts, tries, pairs, ends
            else:
                counts = own
            may_end = may_end and is_skipped
        return counts

    def _of_item(self, item: int, *, n_next: int, may_end: bool) -> tuple[int, int, int, int]:
        """The same of an item that `n_next` terminals may follow, unless it ends its alternate."""
        if item == TEXT:
            return 1, 1, 1, 0
        if item < TEXT:
            return 1, TEXT - item, n_next, int(may_end)
        n_ends = self.ends[item]
        n_pairs = self.pairs[item] + n_ends * n_next
        return self.starts[item], self.tries[item], n_pairs, n_ends * may_end


def _nullable(rules: Rules) -> list[bool]:
    """Which rules can produce the empty text."""
    users: list[list[tuple[int, int]]] = [[] for _ in rules]
    missing: dict[tuple[int, int], int] = {}
    nullable = [False] * len(rules)
    todo: list[int] = []
    for rule, alternates in enumerate(rules):
        for i, items in enumerate(alternates):
            if any(item < 0 for item in items):
                continue
            missing[rule, i] = len(items)
            for item in items:
                users[item].append((rule, i))
            if not items and not nullable[rule]:
                nullable[rule] = True
                todo.append(rule)
    while todo:
        for user in users[todo.pop()]:
            missing[user] -= 1
            if not missing[user] and not nullable[user[0]]:
                nullable[user[0]] = True
                todo.append(user[0])
    return nullable


def _left_edges(rules: Rules, nullable: list[bool]) -> list[list[tuple[int, bool]]]:
    """Per rule: (rule that can stand first, whether nothing follows it in its alternate)."""
    edges: list[list[tuple[int, bool]]] = [[] for _ in rules]
    for rule, alternates in enumerate(rules):
        for items in alternates:
            for i, item in enumerate(items):
                if item < 0:
                    break
                edges[rule].append((item, i == len(items) - 1))
                if not nullable[item]:
                    break
    return edges


def _cyclic(edges: list[list[tuple[int, bool]]]) -> list[bool]:
    """Which rules can reach themselves."""
    component = _components([[to for to, _ in out] for out in edges])
    sizes = Counter(component)
    return [
        sizes[component[rule]] > 1 or any(to == rule for to, _ in out)
        for rule, out in enumerate(edges)
    ]


def _components(graph: list[list[int]]) -> list[int]:
    """Tarjan's strongly connected components, without recursion; callees get lower numbers."""
    n = len(graph)
    order, low, component = [-1] * n, [0] * n, [-1] * n
    path: list[int] = []
    n_seen = n_components = 0
    for start in range(n):
        if order[start] >= 0:
            continue
        work = [(start, iter(graph[start]))]
        order[start] = low[start] = n_seen
        n_seen += 1
        path.append(start)
        while work:
            node, rest = work[-1]
            to = next(rest, None)
            if to is None:
                work.pop()
                if work:
                    low[work[-1][0]] = min(low[work[-1][0]], low[node])
                if low[node] == order[node]:
                    while component[node] < 0:
                        component[path.pop()] = n_components
                    n_components += 1
            elif order[to] < 0:
                order[to] = low[to] = n_seen
                n_seen += 1
                path.append(to)
                work.append((to, iter(graph[to])))
            elif component[to] < 0:
                low[node] = min(low[node], order[to])
    return component
