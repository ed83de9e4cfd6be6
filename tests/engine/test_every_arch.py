"""Every architecture that llama.cpp knows resumes as docs/models.md says, or is refused in the sentence that stands there.

A random model of each is asked, its engine restarted, and asked again: for what continues the stored text
and for what leaves it in the middle. Replies are those of monolithic evaluation. All of it runs in
processes of their own."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from arch_table import PAGE, Trial, known, outcome, trials
from architectures import llama_architectures

KNOWN = known(PAGE.read_text())


@pytest.fixture(scope="module")
def program() -> Iterator[Trial]:
    with trials() as started:
        yield started


def test_the_page_has_all_that_llama_cpp_knows() -> None:
    """A newer llama.cpp may know others: `make architectures` tries them."""
    assert sorted(KNOWN) == sorted(llama_architectures())


@pytest.mark.parametrize("arch", sorted(KNOWN))
def test_it_resumes_as_the_page_says(program: Trial, arch: str) -> None:
    assert outcome(program, arch) == KNOWN[arch]
