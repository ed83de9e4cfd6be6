"""`towerd serve`: run the daemon."""

from __future__ import annotations

import gc
import logging
import sys
import threading
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from towerd.cli.options import ConfigCommand, config_options, given_llama_flags
from towerd.errors import ConfigError, ModelError
from towerd.settings.config import Config, with_server_args
from towerd.settings.llama_flags import without_effect
from towerd.settings.sources import load

if TYPE_CHECKING:
    from towerd.models.known import KnownModel


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
    """Serve a model, with llama-server's HTTP API, and remember every conversation.

    llama-server's own flags are accepted under their names, and towerd says which have no effect or
    are not taken. Flags after -- are for llama.cpp, too.

    Below are the settings that most people need; --help-all shows every one. Each can also be set
    by the variable in brackets, or in towerd.toml under that name in lower case, without TOWERD_.
    Sizes are bytes or texts such as 8GiB or 500MB.
    """
    from towerd import log

    config = load(flags, toml_path=config_path)
    if server_args := (*given_llama_flags(), *server_args):
        config = with_server_args(config, server_args)
    try:
        log.configure(config.log_level, config.log_format, path=config.log_file)
    except OSError as error:
        raise ConfigError(
            f"Cannot write the log to {config.log_file}: {error.strerror}."
        ) from error
    if config.engine == "embedded":
        for name, why in without_effect(config.llama_server_args):
            logging.getLogger("towerd.serve").info("%s has no effect: %s", name, why)
    if _serves_default(config):
        _offer_default()
    run_daemon(config)


def _serves_default(config: Config) -> bool:
    """Whether no model is named, here or among llama-server's flags."""
    from towerd.engine.llama_server.process.flags import names_model

    named = config.model is not None or config.upstream is not None
    return not named and not names_model(config.llama_server_args)


def _offer_default() -> None:
    """If the default model is missing, offer to fetch it on a terminal, else log how to."""
    from towerd.models.bundled import has_default
    from towerd.models.known import SMOLLM2

    if has_default() or (sys.stdin.isatty() and sys.stderr.isatty() and _offer(SMOLLM2)):
        return
    logging.getLogger("towerd.serve").info(
        "serving the bundled story model; towerd models get %s fetches %s",
        SMOLLM2.name,
        SMOLLM2.title,
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
    gc.disable()  # until all is loaded: there is hardly any garbage, and collections take time
    # aiohttp reads the system's certificates, which no other import has to wait for.
    threading.Thread(target=import_module, args=("aiohttp",), name="towerd-import").start()
    if config.engine == "embedded":
        import_module("towerd.service")
    from towerd.app.daemon import run

    run(config)
