#!/usr/bin/env python3
"""llama.cpp's own server tests against llama-server and against towerd's two engines.

    .venv/bin/python tests/conformance/run.py                       all three, then the table
    .venv/bin/python tests/conformance/run.py embedded unit/test_completion.py

The tests come with llama-cpp-python's source, which `make setup` keeps. The models that they would
download are replaced by ones that the package has; a test that still needs another one is skipped.
Results are kept in build/conformance; the table of docs/conformance.md is written from them.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import sysconfig
import xml.etree.ElementTree as ElementTree
from collections import Counter
from pathlib import Path

from towerd.models.bundled import bundled_model

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
LLAMA_CPP = Path(sys.prefix) / "src" / "llama.cpp"
SOURCE = LLAMA_CPP / "tools" / "server" / "tests"
BUILD = ROOT / "build" / "conformance"
REASONS = HERE / "reasons.json"
TABLE = ROOT / "docs" / "conformance.md"
SERVERS = ("llama-server", "embedded", "sidecar")
"""llama-server alone, the embedded engine, and the engine in front of a llama-server."""
ENGINES = {"embedded": "embedded engine", "sidecar": "llama-server engine"}
FIM = {"fim_pre": 3, "fim_suf": 4, "fim_mid": 5}
"""Byte tokens that stand for those of infill, which the story model has none of."""
LEFT_OUT = ("test_router.py", "test_tools_builtin.py", "test_mcp_servers.py", "test_proxy.py")
"""What they test is not a model's server: other servers behind one, and tools that run programs."""


def main() -> None:
    """Run what the command line asks for."""
    asked = sys.argv[1:]
    servers = [word for word in asked if word in SERVERS] or list(SERVERS)
    files = [word for word in asked if word not in SERVERS]
    env = os.environ | make_models()
    for server in servers:
        found = run(server, files, env)
        counts = Counter(found.values())
        print(f"{server}: {dict(sorted(counts.items()))}")
        kept = {} if not files else load(server)
        (BUILD / f"{server}.json").write_text(json.dumps(kept | found, indent=1))
    results = {server: load(server) for server in SERVERS}
    if results["llama-server"] and any(results[server] for server in ENGINES):
        TABLE.write_text(table(results))
        print(f"{TABLE.relative_to(ROOT)} is written")


def load(server: str) -> dict[str, str]:
    """Test -> passed, failed or skipped, of the last runs."""
    path = BUILD / f"{server}.json"
    found: dict[str, str] = json.loads(path.read_text()) if path.exists() else {}
    return found


def make_models() -> dict[str, str]:
    """The variables that rewire.py reads."""
    from lab.models.vision import make_projector

    BUILD.mkdir(parents=True, exist_ok=True)
    story, infill, projector = (BUILD / f"{n}.gguf" for n in ("story", "infill", "projector"))
    words = [word for name, i in FIM.items() for word in ("--special-token-by-id", name, str(i))]
    tool = Path(sysconfig.get_path("scripts")) / "gguf-new-metadata"
    # The models of llama.cpp's tests have no template, and --no-jinja knows only common ones.
    plain = [str(tool), "--force", "--remove-metadata", "tokenizer.chat_template"]
    for out, more in ((story, []), (infill, words)):
        command = [*plain, *more, str(bundled_model()), str(out)]
        subprocess.run(command, check=True, capture_output=True)
    make_projector(projector, 64)
    return {
        "TOWERD_TEST_STORY": str(story),
        "TOWERD_TEST_INFILL": str(infill),
        "TOWERD_TEST_PROJECTOR": str(projector),
    }


def run(server: str, files: list[str], env: dict[str, str]) -> dict[str, str]:
    """Test -> passed, failed or skipped."""
    tree = BUILD / server
    work = tree / "tools" / "server" / "tests"
    shutil.rmtree(tree, ignore_errors=True)
    shutil.copytree(SOURCE, work)
    for folder in ("models", "tools/mtmd"):  # which tests find from where they are
        (tree / folder).symlink_to(LLAMA_CPP / folder)
    (work / "conftest.py").write_text(_CONFTEST)
    shutil.copy(HERE / "rewire.py", work / "rewire.py")
    report = BUILD / f"{server}.xml"
    report.unlink(missing_ok=True)
    binary = HERE / "as_llama_server.py"
    if server == "llama-server":
        binary = Path(sysconfig.get_path("purelib")) / "bin" / "llama-server"
    env = env | {
        "LLAMA_SERVER_BIN_PATH": str(binary),
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "TOWERD_TEST_ENGINE": "embedded" if server == "embedded" else "llama-server",
        "LLAMA_CACHE": str(work / "cache"),
    }
    ignored = [] if files else [f"--ignore=unit/{name}" for name in LEFT_OUT]
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-p",
        "rewire",
        "-p",
        "no:cacheprovider",
        "-p",
        "no:randomly",
        "-o",
        "addopts=",
        "-o",
        "asyncio_mode=strict",
        "--tb=line",
        "--timeout=120",
        "-W",
        "ignore",
        f"--junitxml={report}",
        *ignored,
        *(files or ["unit"]),
    ]
    with (BUILD / f"{server}.log").open("w") as log:
        subprocess.run(command, cwd=work, env=env, stdout=log, stderr=log, check=False)
    return outcomes(report)


_CONFTEST = """import pytest
from utils import server_instances


@pytest.fixture(autouse=True)
def stop_server_after_each_test():
    yield
    for server in set(server_instances):
        server.stop()
"""


def outcomes(report: Path) -> dict[str, str]:
    """Read a JUnit report."""
    out: dict[str, str] = {}
    for case in ElementTree.parse(report).getroot().iter("testcase"):
        name = f"{(case.get('classname') or '').split('.')[-1]}::{case.get('name')}"
        kinds = {child.tag for child in case}
        failed = kinds & {"failure", "error"}
        name = name.replace("|", " ").replace("\n", " ")
        out[name] = "failed" if failed else "skipped" if "skipped" in kinds else "passed"
    return out


def table(results: dict[str, dict[str, str]]) -> str:
    """The page: a row for each file, then every test that llama-server alone passes and towerd does
    not, with the reason that reasons.json has for it."""
    alone = {name for name, result in results["llama-server"].items() if result == "passed"}
    passed = {
        server: {name for name in alone if results[server].get(name) == "passed"}
        for server in ENGINES
        if results[server]
    }
    titles = ["llama-server", *(ENGINES[server] for server in passed)]
    lines = [
        "# llama.cpp's server tests",
        "",
        "`make conformance` writes this page. It counts the tests that llama-server passes alone, on "
        "models of this package and without a network, and how many of them towerd passes.",
        "",
        f"| file | {' | '.join(titles)} |",
        "|---" * (1 + len(titles)) + "|",
    ]
    for file in sorted({name.split("::")[0] for name in alone}):
        counts = [_in_file(part, file) for part in (alone, *passed.values())]
        lines.append(f"| `{file}` | {' | '.join(map(str, counts))} |")
    counts = [len(part) for part in (alone, *passed.values())]
    lines.append(f"| together | {' | '.join(map(str, counts))} |")
    reasons: dict[str, dict[str, str]] = json.loads(REASONS.read_text())
    for server, done in passed.items():
        lines += ["", f"Not passed by the {ENGINES[server]}:", "", "| test | reason |", "|---|---|"]
        lines += [f"| `{name}` | {_why(reasons[server], name)} |" for name in sorted(alone - done)]
    return "\n".join(lines) + "\n"


def _in_file(names: set[str], file: str) -> int:
    return sum(name.split("::")[0] == file for name in names)


def _why(reasons: dict[str, str], name: str) -> str:
    found = [why for start, why in reasons.items() if name.startswith(start)]
    return found[0] if found else "**not explained**"


if __name__ == "__main__":
    sys.path.insert(0, str(HERE.parent / "support"))
    main()
