"""`towerctl completion`: tab completion for both commands."""

from __future__ import annotations

import click


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

    from towerd.cli.main import towerctl, towerd

    maker = get_completion_class(shell)
    if maker is None:
        raise click.UsageError(f"click knows no completion for {shell}")
    for command in (towerd, towerctl):
        name = str(command.name)
        # Not source(): that one runs the shell to check its version, which fails in a pipe.
        script = maker(command, {}, name, f"_{name.upper()}_COMPLETE")
        click.echo(script.source_template % script.source_vars())
