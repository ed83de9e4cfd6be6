"""`towerctl launch`: an agent that talks to the daemon."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import click

from towerd.cli.client.target import Target, setting_option, target_options
from towerd.cli.launch.agents import AGENTS, Agent, AgentStart
from towerd.cli.launch.endpoint import Endpoint
from towerd.errors import ConfigError

CTX_SIZES = tuple(4096 << n for n in range(10))
REPLY_TOKENS = 2048
"""What a first question and its answer take, at least."""


@click.command()
@click.argument("agent", type=click.Choice(list(AGENTS)))
@setting_option("model")
@setting_option("hf_repo")
@setting_option("ctx_size")
@click.argument("args", nargs=-1, type=click.UNPROCESSED, metavar="[-- ARG...]")
@target_options
def launch(
    agent: str,
    model: str | None,
    hf_repo: str | None,
    ctx_size: str | None,
    args: tuple[str, ...],
    target: Target,
) -> None:
    """Start an agent with the running daemon as its model. If no daemon runs, one is started, and ends
    with the agent.

    Variables and options of this one start tell the agent: its own settings stay as they are.
    Everything after -- is passed to it, and its exit status is the command's.

    \b
    towerctl launch claude
    towerctl launch codex -- exec "What does this project do?"
    towerctl launch opencode -m qwen3-coder:30b -c 65536
    """
    row = AGENTS[agent]
    program = shutil.which(row.program)
    if program is None:
        raise ConfigError(f"{row.title} is not installed; this installs it: {row.install}")
    from towerd.cli.launch.agent_process import end_as, run_program

    wanted = {"model": model, "hf_repo": hf_repo, "ctx_size": ctx_size}
    with tempfile.TemporaryDirectory(prefix="towerctl-launch-") as name:
        folder = Path(name)
        with _endpoint(target, wanted, folder) as endpoint:
            _say(row, endpoint)
            connection = row.connect(endpoint, folder)
            try:
                status = run_program(
                    program, (*connection.args, *args), _environment(connection, endpoint)
                )
            except OSError as error:
                raise ConfigError(f"{program} cannot be started: {error.strerror}.") from error
    end_as(status)


@contextmanager
def _endpoint(target: Target, wanted: Mapping[str, str | None], folder: Path) -> Iterator[Endpoint]:
    """The endpoint of the running daemon, or of one that runs as long as the block."""
    from towerd.cli.client.target import check_one_place, find_daemon
    from towerd.cli.launch.endpoint import endpoint_of, wait_ready

    check_one_place(target)
    found = find_daemon(target)
    if found is not None:
        with found as daemon:
            wait_ready(daemon)
            endpoint = endpoint_of(daemon, target, wanted)
        yield endpoint
        return
    from towerd.cli.launch.own_daemon import own_daemon

    click.echo("No daemon runs: one is started, and ends with the agent.", err=True)
    with own_daemon(target, wanted, folder) as daemon:
        with daemon:
            endpoint = endpoint_of(daemon, target, {})
        yield endpoint


def _say(agent: Agent, to: Endpoint) -> None:
    """Say what the agent is given, and warn if that does not take what it sends."""
    where = f"{agent.title} with {to.model} at {to.url}"
    click.echo(f"{where}: a context of {to.n_ctx:,} tokens.", err=True)
    if to.n_ctx > agent.prompt_tokens:
        return
    n_wanted = next(n for n in CTX_SIZES if n > agent.prompt_tokens + REPLY_TOKENS)
    what = (
        f"give it more, as with towerd serve --ctx-size {n_wanted}"
        if to.n_ctx_train >= n_wanted
        else f"the model was trained for {to.n_ctx_train:,}, take another one"
    )
    click.echo(
        f"Warning: {agent.title} sends {agent.prompt_tokens:,} tokens of instructions and tools by "
        f"itself (measured with {agent.version}), which this context does not hold: {what}.",
        err=True,
    )


def _environment(connection: AgentStart, to: Endpoint) -> dict[str, str]:
    """The user's, with what the agent is told; no proxy stands between it and the daemon."""
    env = {name: value for name, value in os.environ.items() if name not in connection.unset}
    env |= connection.env
    for name in ("NO_PROXY", "no_proxy"):
        env[name] = ",".join(filter(None, (env.get(name), to.host)))
    return env
