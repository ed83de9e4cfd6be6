"""`towerd models`: the models of this machine, each of which can be served by its name."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import click

from towerd.cli.models.fetch import get

if TYPE_CHECKING:
    from towerd.models.listing import ListedModel

MEMORY = {"window": "sliding window"}
"""Kinds of memory that a table spells otherwise."""


@click.group(invoke_without_command=True)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
@click.pass_context
def models(context: click.Context, as_json: bool) -> None:
    """List the models on this machine, and fetch others."""
    if context.invoked_subcommand is None:
        _show(as_json)
    elif as_json:
        raise click.UsageError("Put --json after the command.")


@models.command("list")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def list_(as_json: bool) -> None:
    """List the models that towerd, llama.cpp, Hugging Face, Ollama and LM Studio keep here."""
    _show(as_json)


models.add_command(get)


def _show(as_json: bool) -> None:
    from towerd.cli.output import echo_json
    from towerd.models.known import KNOWN
    from towerd.models.listing import listed_models
    from towerd.system.machine import ram_bytes

    listed, ram = listed_models(), ram_bytes()
    absent = [known for known in KNOWN.values() if not known.is_at(known.path)]
    if as_json:
        to_fetch = [
            {"name": each.name, "bytes": each.bytes, "licence": each.licence} for each in absent
        ]
        found = [_as_json(model, ram) for model in listed]
        echo_json({"ram_bytes": ram, "models": found, "to_fetch": to_fetch})
        return
    _show_table(listed, ram)
    for known in absent:
        click.echo(f"towerd models get {known.name} fetches {known.title} ({known.licence}).")
    click.echo("towerd serve -m NAME serves one; towerd serve -hf OWNER/REPO[:QUANT] fetches more.")


def _show_table(listed: Iterable[ListedModel], ram: int) -> None:
    from towerd.cli.output import show_table, size

    rows = []
    for model in listed:
        header, found = model.header, model.found
        if header is None:
            rows.append((found.name, "", "", "damaged", "", found.source))
            continue
        ctx = f"{header.n_ctx_train:,}" if header.n_ctx_train else ""
        memory = MEMORY.get(header.memory, header.memory)
        fits = _fits(model, ram)
        rows.append((found.name, size(header.weight_bytes), ctx, memory, fits, found.source))
    show_table(("NAME", ">SIZE", ">CONTEXT", "MEMORY", "FITS", "FROM"), rows)


def _fits(model: ListedModel, ram: int) -> str:
    """Whether it fits into the RAM, and with how much context if not with all."""
    n_ctx = model.ctx_that_fits(ram)
    if not n_ctx:
        return "no"
    return "yes" if n_ctx == model.ctx_wanted else f"with -c {n_ctx // 1024 * 1024}"


def _as_json(model: ListedModel, ram: int) -> dict[str, Any]:
    header, found = model.header, model.found
    projector = None if found.projector is None else str(found.projector)
    said: dict[str, Any] = {"name": found.name, "source": found.source, "path": str(found.path)}
    said |= {"projector": projector, "damage": model.damage}
    if header is not None:
        said |= {
            "title": header.title,
            "architecture": header.arch,
            "bytes": header.weight_bytes,
            "n_ctx_train": header.n_ctx_train,
            "memory": header.memory,
            "token_bytes": header.token_bytes,
            "n_ctx_fits": model.ctx_that_fits(ram),
        }
    return said
