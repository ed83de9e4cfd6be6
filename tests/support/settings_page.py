"""Writes the tables of docs/settings.md, from what towerd.settings.config and --help say: `make docs`."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from towerd.cli.options import by_use, default_text
from towerd.settings.setting import Setting

PAGE = Path(__file__).resolve().parents[2] / "docs" / "settings.md"
BEGIN, END = "<!-- written by make docs -->", "<!-- end -->"


def tables() -> str:
    """What stands between BEGIN and END: the settings of --help, then those of --help-all."""
    common, others = by_use()
    return f"## Common\n\n{_table(common)}\n\n## All others\n\n{_table(others)}"


def written(page: str) -> str:
    """`page` with the tables as they should be."""
    before, _, rest = page.partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}\n\n{tables()}\n\n{END}{after}"


def _table(known: Mapping[str, Setting]) -> str:
    head = "| setting | flag | default | meaning |\n|---|---|---|---|\n"
    return head + "\n".join(_row(name, spec) for name, spec in known.items())


def _row(name: str, spec: Setting) -> str:
    flags = " ".join(f"`{flag}`" for flag in (*spec.flags, *spec.off_flags))
    choices = f" {', '.join(f'`{choice}`' for choice in spec.choices)}." if spec.choices else ""
    return f"| `{name}` | {flags} | {default_text(name, spec)} | {spec.help}{choices} |"


if __name__ == "__main__":
    PAGE.write_text(written(PAGE.read_text()))
