"""`towerd version`, `towerctl version`: print the installed versions."""

from __future__ import annotations

import click


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
