"""`towerctl lab cluster`: which prompts are alike, and what coding them on top of each other saves."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import click

from towerd.cli.client.target import Target, connect, json_option, setting_option, target_options
from towerd.cli.client.transport import Json
from towerd.errors import ConfigError

if TYPE_CHECKING:
    from lab.codec.cluster import Cluster, Distances
    from towerd.cli.client.api_client import ApiClient
    from towerd.codec import Codec
    from towerd.codec.vocabulary import GgufVocabulary
    from towerd.tokens import Ids

PLATFORM_LEVEL = 0
"""The level that has a single prompt, which cannot be similar to another."""


@dataclass(frozen=True, slots=True)
class Member:
    """A prompt's own text, without the prompts above it."""

    name: str
    ids: Ids


@click.command()
@click.argument("spec", required=False, type=click.Path(dir_okay=False, path_type=Path))
@click.option("--store", "from_store", is_flag=True, help="The bases of the store, without a SPEC.")
@click.option(
    "--clusters",
    metavar="N",
    type=click.IntRange(min=1),
    help="Number of clusters; default: as many as pay.",
)
@setting_option("model")
@json_option
@target_options
def cluster(
    spec: Path | None,
    from_store: bool,
    clusters: int | None,
    as_json: bool,
    target: Target,
    model: str | None,
) -> None:
    """Report which community and bot prompts of the YAML file SPEC, or of the store, are alike:
    clusters, their radii in bits, and the bytes saved when each prompt is coded on top of the
    medoid of its cluster. Of a running daemon's store also what its frozen sessions save that are
    coded after a base like their own prompt."""
    from towerd.cli.output import echo_json

    if (spec is None) != from_store:
        raise click.UsageError("Name a file SPEC.yaml, or --store for the bases of the store.")
    target = replace(target, model=model)
    path, members, saved = _of_store(target) if spec is None else (*_of_file(spec, target), {})
    found = _report(path, members, clusters) | saved
    if as_json:
        echo_json(found)
    else:
        _print(found)


def _of_file(spec: Path, target: Target) -> tuple[Path, list[tuple[str, bytes | Ids]]]:
    """(model, name and text of each prompt) of a file as `towerctl precache` reads it."""
    from towerd.cli.precache.spec import load_spec
    from towerd.models.bundled import find_model

    texts: list[tuple[str, bytes | Ids]] = []
    for prompt in load_spec(spec).walk():
        said = prompt.text or "\n".join(message["content"] for message in prompt.messages)
        if prompt.level > PLATFORM_LEVEL:
            texts.append((prompt.name, said.encode()))
    return find_model(target.config().model), texts


def _of_store(target: Target) -> tuple[Path, list[tuple[str, bytes | Ids]], Json]:
    """(model, name and own ids of each base, what sessions save) of the daemon's store or the files
    themselves."""
    from towerd.models.bundled import find_model

    with connect(target) as backend:
        model = backend.model_path() if backend.has_model else find_model(target.config().model)
        stats = backend.stats()["store"]
        saved = {
            "alike_coded": stats.get("alike_coded", 0),
            "alike_bytes_saved": stats.get("alike_bytes_saved", 0),
        }
        return model, own_ids(backend), saved


def own_ids(backend: ApiClient) -> list[tuple[str, bytes | Ids]]:
    """Name and ids of each base, without those of the base above it. Tenants do not share bases."""
    from towerd.store.tree.node import PUBLIC

    bases = [base for base in backend.bases() if base["reuse"] == "prefix"]
    held = {(base["name"], base["scope"]): _path(backend, base) for base in bases}
    own: list[tuple[str, bytes | Ids]] = []
    for base in bases:
        name, scope = base["name"], base["scope"]
        above = name.rpartition("/")[0]
        parent = held.get((above, scope)) or held.get((above, PUBLIC)) or []
        if base["level"] > PLATFORM_LEVEL:
            own.append((name, _ids(backend, held[name, scope], parent)))
    return own


def _path(backend: ApiClient, base: Json) -> list[int]:
    """The segments from the root to a base."""
    path: list[int] = backend.segment(base["segment"])["path"]
    return path


def _ids(backend: ApiClient, path: list[int], parent: list[int]) -> Ids:
    """The ids of a base that are not its parent's."""
    from towerd.codec.base import as_ids

    own = [segment for segment in path if segment not in parent]
    return as_ids([i for segment in own for i in backend.segment(segment, ids=True)["ids"]])


def _report(path: Path, texts: Sequence[tuple[str, bytes | Ids]], n: int | None) -> Json:
    """Everything that `--json` prints."""
    from lab.codec.cluster import cluster as clustered
    from lab.codec.cluster import measure
    from towerd.codec import Codec
    from towerd.codec.container import BASE_HEAD_BYTES
    from towerd.codec.vocabulary import GgufVocabulary
    from towerd.model.llama_model import init_backend

    if len(texts) < max(2, n or 0):
        raise ConfigError(
            f"There are {len(texts)} community and bot prompts here: {max(2, n or 0)} are needed."
        )
    init_backend()  # its log becomes ours
    with GgufVocabulary(path) as vocabulary:
        members = _members(texts, vocabulary)
        codec = Codec(vocabulary)
        distances = measure([member.ids for member in members], codec.text_coder())
        found = clustered(distances, n, 8 * BASE_HEAD_BYTES)
        rows = [_row(each, members, distances, codec) for each in found]
    return {
        "prompts": len(members),
        "clusters": rows,
        "bytes_alone": sum(row["bytes_alone"] for row in rows),
        "bytes": sum(row["bytes"] for row in rows),
        "bytes_saved": sum(row["bytes_alone"] - row["bytes"] for row in rows),
    }


def _members(texts: Sequence[tuple[str, bytes | Ids]], vocabulary: GgufVocabulary) -> list[Member]:
    members = []
    for name, text in texts:
        ids = vocabulary.tokenize(text) if isinstance(text, bytes) else text
        if len(ids):
            members.append(Member(name, ids))
    return members


def _row(each: Cluster, members: Sequence[Member], distances: Distances, codec: Codec) -> Json:
    """One cluster; its bytes are of blobs that were written and read again."""
    base = members[each.medoid].ids
    alone = {i: len(codec.encode(members[i].ids)) for i in (each.medoid, *each.members)}
    given = {i: len(codec.encode(members[i].ids, base=base)) for i in each.members}
    told: list[Json] = [
        {
            "name": members[i].name,
            "bits": round(float(distances.given[i, each.medoid])),
            "bits_alone": round(float(distances.alone[i])),
            "bytes": min(given[i], alone[i]),
        }
        for i in each.members
    ]
    return {
        "medoid": members[each.medoid].name,
        "radius_bits": round(each.radius(distances)),
        "members": told,
        "bytes_alone": sum(alone.values()),
        "bytes": alone[each.medoid] + sum(member["bytes"] for member in told),
    }


def _print(found: Json) -> None:
    from towerd.cli.output import show_table, size

    rows = []
    for row in sorted(found["clusters"], key=lambda row: -len(row["members"])):
        names = ", ".join(member["name"] for member in row["members"])
        saved = row["bytes_alone"] - row["bytes"]
        rows.append(
            (
                row["medoid"],
                1 + len(row["members"]),
                f"{row['radius_bits']:,}",
                size(row["bytes_alone"]),
                size(saved),
                names,
            )
        )
    show_table(("MEDOID", ">PROMPTS", ">RADIUS BITS", ">ALONE", ">SAVED", "MEMBERS"), rows)
    click.echo(
        f"{found['prompts']} prompts in {len(found['clusters'])} clusters: "
        f"{found['bytes_alone']:,} bytes by themselves, {found['bytes']:,} clustered."
    )
    if found.get("alike_coded"):
        click.echo(
            f"{found['alike_coded']:,} sessions were coded after a base like their prompt since "
            f"the start: {size(found['alike_bytes_saved'])} saved."
        )
