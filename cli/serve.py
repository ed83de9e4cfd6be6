"""`towerd serve`: run the daemon."""

from __future__ import annotations

import logging
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from towerd.cli.models.located import located, located_tables
from towerd.cli.options import ConfigCommand, config_options, given_llama_flags
from towerd.errors import ConfigError, ModelError
from towerd.settings.config import Config
from towerd.settings.llama_flags import without_effect
from towerd.settings.sources import load_models

if TYPE_CHECKING:
    from towerd.models.known import KnownModel
    from towerd.settings.model_tables import ModelTables

LARGER = "ggml-org/gemma-3-4b-it-GGUF"
"""A model of 2.5 GB that a laptop runs."""


@click.command(cls=ConfigCommand)
@click.option(
    "--config",
    "config_path",
    type=click.Path(path_type=Path),
    help="Settings file. [default: towerd.toml in the user's config directory; TOWERD_CONFIG]",
)
@config_options
@click.argument("server_args", nargs=-1, type=click.UNPROCESSED, metavar="[-- FLAG...]")
def serve(config_path: Path | None, server_args: tuple[str, ...], **flags: Any) -> None:
    """Serve a model with llama-server's HTTP API, and remember every conversation.

    With --models-dir, or [models.NAME] tables in towerd.toml, it serves several models: the
    model that a request names is loaded when it is needed.

    llama-server's own flags are accepted under their names, and towerd says which have no effect or
    are not taken. Flags after -- also go to llama.cpp.

    Below are the settings that most people need; --help-all shows every one. Each can also be set
    by the variable in brackets, or in towerd.toml under that name in lower case, without TOWERD_.
    Sizes are bytes or texts such as 8GiB or 500MB.
    """
    tables = load_models(flags, toml_path=config_path)
    if server_args := (*given_llama_flags(), *server_args):
        tables = tables.with_server_args(server_args)
    config = tables.config
    _configure_log(config)
    _ask_passphrase(config)
    if tables.are_many and not _names_model(config):
        run_router(located_tables(tables))
        return
    if _serves_default(config):
        _offer_default()
    run_daemon(located(config))


def _ask_passphrase(config: Config) -> None:
    """Before the log and the model's progress share the terminal."""
    from towerd.store.encryption.opening import ask_passphrase

    ask_passphrase(config.store_dir, config.encrypt)


def _configure_log(config: Config) -> None:
    """Begin to log, first of all what the given flags of llama-server do not do."""
    from towerd import log

    try:
        log.configure(config.log_level, config.log_format, path=config.log_file)
    except OSError as error:
        raise ConfigError(
            f"Cannot write the log to {config.log_file}: {error.strerror}."
        ) from error
    if config.engine == "embedded":
        for name, why in without_effect(config.llama_server_args):
            logging.getLogger("towerd.serve").info("%s has no effect: %s", name, why)
    if config.models_dir is not None and (config.model or config.hf_repo):
        logging.getLogger("towerd.serve").info(
            "--models-dir has no effect: one model is named, and only that is served"
        )


def _serves_default(config: Config) -> bool:
    """Whether no model is named, here or among llama-server's flags."""
    named = (config.model, config.hf_repo, config.upstream)
    return not any(named) and not _names_model(config)


def _names_model(config: Config) -> bool:
    """Whether a model is named among llama-server's flags."""
    from towerd.engine.llama_server.process.flags import names_model

    return names_model(config.llama_server_args)


def _offer_default() -> None:
    """If the default model is missing, offer to fetch it on a terminal. Log what is served, and how
    to get a larger one."""
    from towerd.models.bundled import has_default
    from towerd.models.known import SMOLLM2

    log = logging.getLogger("towerd.serve")
    if has_default() or (sys.stdin.isatty() and sys.stderr.isatty() and _offer(SMOLLM2)):
        log.info(f"serving {SMOLLM2.title}; towerd serve -hf {LARGER} fetches a larger model")
        return
    log.info(
        f"serving the bundled story model; towerd models get {SMOLLM2.name} fetches "
        f"{SMOLLM2.title}, towerd serve -hf {LARGER} a larger one"
    )


def _offer(model: KnownModel) -> bool:
    """Ask whether to fetch the model, and fetch it; returns whether it is here then."""
    from towerd.cli.models.fetch import fetch
    from towerd.cli.output import size

    what = f"{model.title}, {size(model.bytes_to_fetch)}, {model.licence}"
    if not click.confirm(f"No model is named. Fetch {what}?", default=True, err=True):
        return False
    try:
        fetch(model)
    except ModelError as error:
        click.echo(error.message, err=True)
        return False
    return True


def run_daemon(config: Config) -> None:
    """Run the daemon. Apart from serve, so that wrong settings fail before llama.cpp is loaded."""
    from towerd.app.start import start

    start(config)


def run_router(tables: ModelTables) -> None:
    """Run the router of several models, which loads no llama.cpp itself."""
    from towerd.router.router import run

    run(tables)
