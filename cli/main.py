"""The two command groups, and what is about them: their completion and version. A new command is a file
and a row in one of the tables."""

from __future__ import annotations

import click

from towerd.cli.lazy import LazyGroup

DAEMON_COMMANDS = {
    "serve": "towerd.cli.serve:serve",
    "models": "towerd.cli.models.models:models",
    "version": "towerd.cli.main:version",
}
CONTROL_COMMANDS = {
    "precache": "towerd.cli.precache.precache:precache",
    "sessions": "towerd.cli.sessions.sessions:sessions",
    "launch": "towerd.cli.launch.launch:launch",
    "search": "towerd.cli.sessions.search:search",
    "freeze": "towerd.cli.sessions.freeze:freeze",
    "thaw": "towerd.cli.sessions.freeze:thaw",
    "recode": "towerd.cli.sessions.freeze:recode",
    "export": "towerd.cli.sessions.transfer:export",
    "import": "towerd.cli.sessions.transfer:import_",
    "read": "towerd.cli.sessions.transfer:read",
    "shared": "towerd.cli.sessions.shared:shared",
    "segments": "towerd.cli.segments.segments:segments",
    "why": "towerd.cli.segments.why:why",
    "trie": "towerd.cli.segments.tree:trie",
    "pin": "towerd.cli.segments.pin:pin",
    "unpin": "towerd.cli.segments.pin:unpin",
    "stats": "towerd.cli.maintenance.stats:stats",
    "top": "towerd.cli.maintenance.top:top",
    "verify": "towerd.cli.maintenance.verify:verify",
    "encrypt": "towerd.cli.maintenance.encrypt:encrypt",
    "forget": "towerd.cli.maintenance.forget:forget",
    "gc": "towerd.cli.maintenance.gc:gc",
    "calibrate": "towerd.cli.maintenance.calibrate:calibrate",
    "doctor": "towerd.cli.doctor.doctor:doctor",
    "bench": "towerd.cli.bench.bench:bench",
    "lab": "towerd.cli.lab:lab",
    "model": "towerd.cli.lab:model",
    "train": "towerd.cli.lab:train",
    "completion": "towerd.cli.main:completion",
    "version": "towerd.cli.main:version",
}
MOVED = {"cluster": "towerctl lab cluster", "replay": "towerctl lab replay"}
CONTEXT = {"help_option_names": ["-h", "--help"], "max_content_width": 100}


def _show_version(context: click.Context, parameter: click.Parameter, is_asked: bool) -> None:
    if is_asked:
        context.invoke(version, as_json=False)
        context.exit()


_version_option = click.option(
    "--version",
    is_flag=True,
    is_eager=True,
    expose_value=False,
    callback=_show_version,
    help="Print the version and exit, as the command does.",
)


@click.group(cls=LazyGroup, table=DAEMON_COMMANDS, context_settings=CONTEXT)
@_version_option
def towerd() -> None:
    """A local daemon that gives llama.cpp a memory: llama-server's API, and every conversation
    resumes in milliseconds."""


@click.group(cls=LazyGroup, table=CONTROL_COMMANDS, moved=MOVED, context_settings=CONTEXT)
@_version_option
def towerctl() -> None:
    """Inspect and maintain a towerd store: the running daemon's, or the files themselves."""


@click.command()
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
def completion(shell: str) -> None:
    """Print the completion script of SHELL for towerd and towerctl.

    \b
    bash: towerctl completion bash > ~/.local/share/bash-completion/completions/towerctl
    zsh:  towerctl completion zsh > a file that ~/.zshrc sources after compinit
    fish: towerctl completion fish > ~/.config/fish/completions/towerctl.fish
    """
    from click.shell_completion import get_completion_class

    maker = get_completion_class(shell)
    if maker is None:
        raise click.UsageError(f"click knows no completion for {shell}")
    for command in (towerd, towerctl):
        name = str(command.name)
        # Not source(): that one runs the shell to check its version, which fails in a pipe.
        script = maker(command, {}, name, f"_{name.upper()}_COMPLETE")
        click.echo(script.source_template % script.source_vars())


@click.command()
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def version(as_json: bool) -> None:
    """Print the versions of towerd and of what its stored state depends on."""
    import json
    import platform

    from towerd import __version__
    from towerd.llama_build import installed_version

    found = {
        "towerd": __version__,
        "llama_cpp_python": installed_version(),
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.machine()}",
    }
    if as_json:
        click.echo(json.dumps(found))
        return
    click.echo(
        f"towerd {found['towerd']} (llama-cpp-python {found['llama_cpp_python']}, "
        f"Python {found['python']}, {found['system']})"
    )
