"""The files of the model that a Config names: found on this machine, or fetched."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path

from towerd.models.bundled import find_entry
from towerd.settings.config import Config
from towerd.settings.model_tables import FETCHED, ModelTables

log = logging.getLogger(__name__)

PROJECTOR_FLAGS = frozenset("--mmproj -mm --mmproj-url -mmu --no-mmproj --no-mmproj-auto".split())
"""Flags of llama-server that say which projector to take, or that none is wanted."""


def located(config: Config) -> Config:
    """`config` with paths where it has a name or repositories; what is missing is fetched from the
    Hub, with the progress on stderr. A model whose projector is known gets it unless a flag says
    otherwise, and is called by its name, not its file's. Raises ModelError."""
    draft = _draft(config)
    if config.hf_repo is not None:
        from towerd.cli.models.fetch import fetch_from_hub

        found = fetch_from_hub(
            config.hf_repo,
            file=config.hf_file or "",
            with_projector=_takes_projector(config),
            token=config.hf_token,
            offline=config.offline,
        )
        return _with(config, found.name, found.path, found.projector, draft)
    if config.model is not None:
        entry = find_entry(config.model)
        if entry.path != config.model:
            return _with(config, entry.name, entry.path, entry.projector, draft)
    args = (*config.llama_server_args, *draft)
    return replace(config, hf_token=None, hf_repo_draft=None, llama_server_args=args)


def located_tables(tables: ModelTables) -> ModelTables:
    """`tables` with files where a model's table names repositories; as `located`."""
    common = {**tables.in_file, **tables.given}
    shared = {key: common[key] for key in ("hf_token", "offline") if key in common}
    found = {}
    for name, table in tables.tables.items():
        values = dict(table.values)
        if FETCHED.intersection(values):
            names = {*FETCHED, "model", "alias", "offline", "llama_server_args"}
            wanted = {key: value for key, value in values.items() if key in names}
            config = located(Config(**(shared | wanted)))
            values = {key: value for key, value in values.items() if key not in FETCHED}
            values |= {"model": config.model, "llama_server_args": config.llama_server_args}
        found[name] = replace(table, values=values)
    return replace(tables, tables=found)


def _with(
    config: Config, name: str, path: Path, projector: Path | None, draft: tuple[str, ...]
) -> Config:
    args = (*config.llama_server_args, *draft)
    if projector is not None and _takes_projector(config):
        log.info(f"{name} comes with a projector, which --no-mmproj leaves out: {projector}")
        args = (*args, "--mmproj", str(projector))
    return replace(
        config,
        model=path,
        alias=config.alias or name,
        hf_repo=None,
        hf_file=None,
        hf_token=None,
        hf_repo_draft=None,
        llama_server_args=args,
    )


def _takes_projector(config: Config) -> bool:
    """Whether a known projector is to be used: a running llama-server has its own or none."""
    return config.upstream is None and not _says_projector(config)


def _draft(config: Config) -> tuple[str, ...]:
    """The flag for the draft model, if one is to be fetched."""
    if config.hf_repo_draft is None:
        return ()
    from towerd.cli.models.fetch import fetch_from_hub

    found = fetch_from_hub(
        config.hf_repo_draft, with_projector=False, token=config.hf_token, offline=config.offline
    )
    return ("--model-draft", str(found.path))


def _says_projector(config: Config) -> bool:
    flags = (word.partition("=")[0] for word in config.llama_server_args)
    return not PROJECTOR_FLAGS.isdisjoint(flags)
