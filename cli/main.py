"""The two command groups. A new command is a file and a row in one of the tables."""

from __future__ import annotations

import click

from towerd.cli.lazy import LazyGroup

DAEMON_COMMANDS = {
    "serve": "towerd.cli.serve:serve",
    "models": "towerd.cli.models.models:models",
    "version": "towerd.cli.version:version",
}
CONTROL_COMMANDS = {
    "precache": "towerd.cli.precache.precache:precache",
    "sessions": "towerd.cli.sessions.sessions:sessions",
    "search": "towerd.cli.sessions.search:search",
    "freeze": "towerd.cli.sessions.freeze:freeze",
    "thaw": "towerd.cli.sessions.freeze:thaw",
    "recode": "towerd.cli.sessions.freeze:recode",
    "export": "towerd.cli.sessions.transfer:export",
    "import": "towerd.cli.sessions.transfer:import_",
    "read": "towerd.cli.sessions.transfer:read",
    "segments": "towerd.cli.segments.segments:segments",
    "why": "towerd.cli.segments.why:why",
    "trie": "towerd.cli.segments.trie:trie",
    "pin": "towerd.cli.segments.pin:pin",
    "unpin": "towerd.cli.segments.pin:unpin",
    "stats": "towerd.cli.maintenance.stats:stats",
    "top": "towerd.cli.maintenance.top:top",
    "verify": "towerd.cli.maintenance.verify:verify",
    "gc": "towerd.cli.maintenance.gc:gc",
    "calibrate": "towerd.cli.maintenance.calibrate:calibrate",
    "doctor": "towerd.cli.doctor.doctor:doctor",
    "bench": "towerd.cli.bench.group:bench",
    "lab": "towerd.cli.lab:lab",
    "model": "towerd.cli.lab:model",
    "train": "towerd.cli.lab:train",
    "completion": "towerd.cli.completion:completion",
    "version": "towerd.cli.version:version",
}
MOVED = {"cluster": "towerctl lab cluster", "replay": "towerctl lab replay"}
CONTEXT = {"help_option_names": ["-h", "--help"], "max_content_width": 100}


@click.group(cls=LazyGroup, table=DAEMON_COMMANDS, context_settings=CONTEXT)
def towerd() -> None:
    """A local daemon that gives llama.cpp a memory: llama-server's API, and every conversation
    resumes in milliseconds."""


@click.group(cls=LazyGroup, table=CONTROL_COMMANDS, moved=MOVED, context_settings=CONTEXT)
def towerctl() -> None:
    """Inspect and maintain a towerd store: the running daemon's, or the files themselves."""
