"""What is in deploy/ parses, and names things that exist."""

from __future__ import annotations

import configparser
import json
import plistlib
import re
import subprocess
import sys
from pathlib import Path

import pytest
from daemon import clean_env

from towerd.api.http.metrics import Metrics
from towerd.settings.config import settings
from towerd.settings.sources import ENV_OTHER, ENV_PREFIX

DEPLOY = Path(__file__).resolve().parent.parent / "deploy"


def test_dashboard_asks_for_metrics_that_exist() -> None:
    dashboard = json.loads((DEPLOY / "grafana.json").read_text())
    wanted = set()
    for panel in dashboard["panels"]:
        for target in panel["targets"]:
            wanted |= set(re.findall(r"towerd_[a-z_]+", target["expr"]))
    metrics = Metrics()
    metrics.requests.labels("r", "200").inc()
    metrics.reused.labels("live").inc()
    text = metrics.render({}).decode()
    assert wanted
    for name in wanted:
        assert re.search(rf"^{name}[{{ ]", text, re.MULTILINE), name


def test_launchd_agent() -> None:
    agent = plistlib.loads((DEPLOY / "towerd.plist").read_bytes())
    assert agent["ProgramArguments"][-1].startswith('exec "$HOME/.local/bin/towerd" serve')
    assert agent["Umask"] == 0o077


def test_systemd_unit() -> None:
    unit = configparser.ConfigParser(interpolation=None)
    unit.optionxform = str  # type: ignore[assignment,method-assign]
    unit.read(DEPLOY / "towerd.service")
    assert unit["Service"]["ExecStart"] == "%h/.local/bin/towerd serve"
    assert unit["Service"]["ProtectSystem"] == "strict"


@pytest.mark.parametrize("name", ["Containerfile", "README.md", "setup.sh", "../README.md"])
def test_variables_that_are_named_exist(name: str) -> None:
    known = {ENV_PREFIX + setting.upper() for setting in settings()} | set(ENV_OTHER)
    named = set(re.findall(r"\bTOWERD_[A-Z_]+[A-Z]", (DEPLOY / name).read_text()))
    assert named <= known


@pytest.mark.parametrize("script", ["deploy/setup.sh", ".ci/run"])
def test_scripts_parse(script: str) -> None:
    path = DEPLOY.parent / script
    assert path.stat().st_mode & 0o111
    subprocess.run(["bash", "-n", str(path)], check=True, timeout=20)


def test_setup_goes_without_the_model(tmp_path: Path) -> None:
    """Where it cannot be had, the set-up says so, ends well, and does not try again at once."""
    bin = tmp_path / "bin"
    bin.mkdir()
    (bin / "towerd").symlink_to(Path(sys.executable).with_name("towerd"))
    step = 'VENV=$0 STAMPS=$0; say() { echo "$@"; }; '
    step += "source <(sed -n '/^fetch_model() {/,/^}/p' deploy/setup.sh); fetch_model"
    env = clean_env(tmp_path) | {"PIP_NO_INDEX": "1"}

    def run() -> str:
        done = subprocess.run(
            ["bash", "-euo", "pipefail", "-c", step, str(tmp_path)],
            env=env,
            cwd=DEPLOY.parent,
            capture_output=True,
            text=True,
            check=True,
            timeout=100,
        )
        return done.stdout + done.stderr

    first = run()
    assert "SmolLM2-135M-Instruct (88.6 MiB, Apache-2.0)" in first
    assert "the bundled story model is served" in first
    assert run() == ""
