"""`towerctl lab bench unseen`: sessions of sources that the codec was not trained on, by source.

A figure of a source whose other records are in the table and the mini model says little about
anybody's chats. Here each source is one that they never saw: either it is not in the manifest, or
`table` was built without it; then `network` is measured only with a `mini` model that was trained
without it as well.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import click
from rich.progress import track

from lab.bench.codec.baselines import PRIME_BYTES, baselines
from lab.bench.codec.texts import SESSION_BYTES, cut, random_texts
from lab.texts.chat_records import ChatRecord
from lab.texts.chat_template import in_template, records, tokenized
from lab.train.data.manifest import read_manifest
from towerd.cli.bench.harness.report import Report
from towerd.codec import Codec
from towerd.codec.forms.form import FormCoder
from towerd.codec.forms.mini import mini_network
from towerd.codec.forms.mix import Mix
from towerd.codec.prior import file
from towerd.codec.vocabulary import GgufVocabulary
from towerd.models.bundled import bundled_model

SESSIONS, SESSIONS_QUICK = 12, 2


async def run(
    model: Path | None,
    quick: bool,
    data: Sequence[Path],
    train: Path,
    source: str,
    vocab: Path | None,
    table: Path | None,
    mini: Path | None,
) -> Report:
    """Measure one source; PPMd is primed with records of all others in `train`."""
    _check(source, table, mini)
    found = [each for path in data for each in records(path)]
    texts = cut([in_template(each) for each in found if each.source == source])
    if not texts:
        raise click.ClickException(f"There are less than {SESSION_BYTES} bytes of {source}.")
    texts = texts[: SESSIONS_QUICK if quick else SESSIONS]
    vocab = vocab or bundled_model()
    report = Report("unseen", vocab.stem)
    with GgufVocabulary(vocab) as vocabulary:
        ids = [tokenized(text, vocabulary) for text in texts]
        sizes = _sizes(vocabulary, table, mini, ids)
    classical = baselines(random_texts(_others(train, source), 2 * PRIME_BYTES))
    sizes["ppmd_primed"] = sum(map(classical["ppmd_primed"], track(texts, "PPMd")))
    n_bytes, n_tokens = sum(map(len, texts)), sum(map(len, ids))
    report.figures |= {f"{source}_sessions": len(texts), f"{source}_tokens": n_tokens}
    for name, size in sizes.items():
        report.figures[f"{source}_{name}_bits_per_byte"] = round(8 * size / n_bytes, 3)
        report.figures[f"{source}_{name}_bits_per_token"] = round(8 * size / n_tokens, 3)
        report.figures[f"{source}_{name}_vs_ppmd_primed"] = round(sizes["ppmd_primed"] / size, 3)
    return report


def _sizes(
    vocabulary: GgufVocabulary,
    table: Path | None,
    mini: Path | None,
    sessions: Sequence[list[int]],
) -> dict[str, int]:
    """Form -> bytes of all blobs."""
    given: list[FormCoder] = []
    if table is not None:
        prior = file.load(table)
        given = [Mix(vocabulary, prior)]
        if mini is not None:
            given.append(mini_network(vocabulary, mini, prior))
    codec = Codec(vocabulary, given)
    forms = [each.name for each in given] or ["mix", "network"]
    return {
        form: sum(len(codec.encode(ids, form=form)) for ids in track(sessions, form))
        for form in forms
    }


def _check(source: str, table: Path | None, mini: Path | None) -> None:
    known = read_manifest()
    if table is None and source in known:
        raise click.ClickException(
            f"The codec was trained on {source}: name a --table that was built --without it."
        )
    if table is not None and source not in known:
        raise click.ClickException(f"No table has {source}: leave --table out.")
    if mini is not None and table is None:
        raise click.ClickException(
            "A --mini that was trained without a source wants a --table without it."
        )


def _others(train: Path, source: str) -> list[ChatRecord]:
    return [each for each in records(train) if each.source != source]
