"""What is in deploy/ parses, and names things that exist."""

from __future__ import annotations

import configparser
import hashlib
import json
import plistlib
import re
import shutil
import subprocess
import sys
import tarfile
from importlib.metadata import version
from pathlib import Path

import pytest
import yaml
from daemon import clean_env

from towerd.api.http.metrics import Metrics
from towerd.settings.config import settings
from towerd.settings.sources import ENV_OTHER, ENV_PREFIX

ROOT = Path(__file__).resolve().parent.parent
DEPLOY = ROOT / "deploy"


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


def test_dashboard_has_all_of_the_shared_tier() -> None:
    text = (DEPLOY / "grafana.json").read_text()
    named = re.findall(r"^# TYPE (towerd_shared_\w+_total) ", Metrics().render({}).decode(), re.M)
    assert len(named) >= 10
    assert [name for name in named if f"{name}{{" not in text] == []


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


@pytest.mark.parametrize(
    "name",
    [
        "Containerfile",
        "README.md",
        "setup.sh",
        "llama.cpp/build.sh",
        "wheel.sh",
        "sdist.sh",
        "../README.md",
    ],
)
def test_variables_that_are_named_exist(name: str) -> None:
    known = {ENV_PREFIX + setting.upper() for setting in settings()} | set(ENV_OTHER)
    named = set(re.findall(r"\bTOWERD_[A-Z_]+[A-Z]", (DEPLOY / name).read_text()))
    assert named <= known


SCRIPTS = [*DEPLOY.rglob("*.sh"), ROOT / ".ci" / "run", ROOT / "tests" / "first_hour.sh"]


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_scripts_parse(script: Path) -> None:
    assert script.stat().st_mode & 0o111
    subprocess.run(["bash", "-n", str(script)], check=True, timeout=20)


def test_workflows_run_scripts_that_exist() -> None:
    for path in (ROOT / ".github" / "workflows").glob("*.yml"):
        jobs = yaml.safe_load(path.read_text())["jobs"]
        runs = [step["run"] for job in jobs.values() for step in job["steps"] if "run" in step]
        named = re.findall(r"(?:deploy|tests|\.ci)/[\w./]+", " ".join(runs))
        assert named
        assert [name for name in named if not (ROOT / name).exists()] == []
        assert {need for job in jobs.values() for need in listed(job.get("needs"))} <= jobs.keys()


def listed(value: str | list[str] | None) -> list[str]:
    """What a workflow may write as one name or as several."""
    return [value] if isinstance(value, str) else value or []


def test_one_place_names_llama_cpp() -> None:
    """The scripts read the version from the line that Python runs, and the set-up installed it."""
    line = r's/^VERSION = "\([0-9.]*\)".*/\1/p'
    for script in (
        "setup.sh",
        "llama.cpp/fetch_source.sh",
        "llama.cpp/build_ui.sh",
        "llama.cpp/update.sh",
    ):
        assert line in (DEPLOY / script).read_text()
    done = subprocess.run(
        ["sed", "-n", line, str(ROOT / "towerd" / "llama_build.py")],
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.strip() == version("llama-cpp-python").partition("+")[0]


@pytest.mark.slow
def test_sdist_has_every_file(tmp_path: Path) -> None:
    """All that is under version control, the linked folders where the links to them are."""
    if not (ROOT / ".git").exists():
        pytest.skip("this is no clone")
    build = "import sys; from scikit_build_core.build import build_sdist; build_sdist(sys.argv[1])"
    subprocess.run([sys.executable, "-c", build, str(tmp_path)], cwd=ROOT, check=True, timeout=300)
    with tarfile.open(next(tmp_path.glob("*.tar.gz"))) as sdist:
        packed = {name.partition("/")[2] for name in sdist.getnames()}
    listed = subprocess.run(
        ["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    links = {path.name for path in (ROOT / "towerd").iterdir() if path.is_symlink()}
    wanted = {
        f"towerd/{name}" if name.partition("/")[0] in links else name
        for name in listed.stdout.splitlines()
        if (ROOT / name).is_file()
    }
    assert wanted - packed == set()
    assert {
        name for name in packed if name.startswith(("build/", ".venv/", "towerd/data/ui/"))
    } == set()


def test_no_page_of_another_llama_cpp_is_built_in(tmp_path: Path) -> None:
    """Where npm is missing, a wheel gets no chat page rather than an old one; one of this version
    needs no npm."""
    page, tools = tmp_path / "ui", tmp_path / "bin"
    tools.mkdir()
    for tool in ("bash", "cat", "dirname", "rm", "sed"):
        (tools / tool).symlink_to(shutil.which(tool) or tool)
    step = f"PY={sys.executable} FOLDER={tmp_path} HERE={DEPLOY / 'llama.cpp'}; source /dev/stdin"
    build = (DEPLOY / "llama.cpp" / "build.sh").read_text()
    for stamp, stays in ((version("llama-cpp-python").partition("+")[0], True), ("0.0.1", False)):
        page.mkdir(exist_ok=True)
        (page / "index.html").touch()
        (page / "of-version").write_text(f"{stamp}\n")
        done = subprocess.run(
            ["/bin/bash", "-euo", "pipefail", "-c", step],
            input=build[build.index('if ! "$HERE/build_ui.sh') :],
            env={"PATH": str(tools)},
            capture_output=True,
            text=True,
            check=True,
            timeout=60,
        )
        assert page.exists() is stays
        assert ("goes without the chat page" in done.stderr) is not stays


def test_formula_names_the_release(tmp_path: Path) -> None:
    sdist = tmp_path / "towerd-1.2.3.tar.gz"
    sdist.write_bytes(b"abc")
    formula = subprocess.run(
        [str(DEPLOY / "homebrew" / "formula.sh"), str(sdist)],
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    assert f'sha256 "{hashlib.sha256(b"abc").hexdigest()}"' in formula
    assert "/t/towerd/towerd-1.2.3.tar.gz" in formula
    assert '"towerd==1.2.3"' in formula


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


NO_DRIVER = "libcuda.so.1: cannot open shared object file: No such file or directory"


def setup_step(folder: Path, functions: str, script: str) -> tuple[int, str]:
    """The status and the words of `script` with these functions of the set-up, its stamps in `folder`."""
    wanted = "|".join(
        ("is_stamped", "lacks_driver", "die_without_driver", "die", *functions.split())
    )
    lines = rf"/^({wanted})\(\) \{{$/,/^\}}/p; /^({wanted})\(\) \{{.*\}}$/p"
    pick = f"sed -nE '{lines}' deploy/setup.sh"
    done = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", f"STAMPS=$0; source <({pick}); {script}", str(folder)],
        cwd=DEPLOY.parent,
        capture_output=True,
        text=True,
        timeout=100,
    )
    return done.returncode, done.stdout + done.stderr


@pytest.mark.parametrize(
    ("ends", "says", "is_compiler"),
    [
        ("echo fine >&2", "", False),
        ("echo other; echo ImportError: undefined symbol: llama_x >&2; exit 1", "llama_x", False),
        ("kill -SEGV $$", "status 139", True),
        (f"echo ImportError: {NO_DRIVER} >&2; exit 1", "no NVIDIA driver", False),
    ],
)
def test_setup_says_why_the_extension_cannot_be_loaded(
    ends: str, says: str, is_compiler: bool, tmp_path: Path
) -> None:
    python = tmp_path / "python"
    python.write_text(f"#!/usr/bin/env bash\n{ends}\n")
    python.chmod(0o755)
    status, said = setup_step(tmp_path, "try_wire", "PY=$STAMPS/python; try_wire built")
    assert (status != 0) is bool(says)
    assert says in said
    assert ("libstdc++" in said) is is_compiler
    assert (tmp_path / "project-untried").exists() is (NO_DRIVER in ends)
    assert is_compiler or says in said + (tmp_path / "wire.log").read_text()


def test_setup_compiles_a_cuda_build_once_where_there_is_no_driver(tmp_path: Path) -> None:
    """And tries it again when there is one."""
    fakes = """
        LLAMA_VERSION=1 LOG=log
        say() { echo "$@"; }
        llama_cmake_args() { echo -DGGML_CUDA=ON; }; cpu_features() { echo avx; }; wheel_cache() { :; }
        build_llama() { echo compiling; touch "$STAMPS/installed"; }
        llama_installed() { [ -f "$STAMPS/installed" ]; }
        llama_works() { cp "$STAMPS/said" "$STAMPS/probe.log"; [ ! -s "$STAMPS/probe.log" ]; }
        install_llama
    """
    said = tmp_path / "said"
    said.write_text(f"llama-bench: error while loading shared libraries: {NO_DRIVER}\n")
    runs = [setup_step(tmp_path, "install_llama try_llama", fakes) for _ in range(2)]
    assert [(status, words.count("compiling")) for status, words in runs] == [(1, 1), (1, 0)]
    assert all("no NVIDIA driver" in words for _, words in runs)
    said.write_text("")
    assert setup_step(tmp_path, "install_llama try_llama", fakes) == (0, "")
    assert (tmp_path / "llama").exists()
    (tmp_path / "llama").unlink()
    said.write_text("illegal instruction\n")
    status, words = setup_step(tmp_path, "install_llama try_llama", fakes)
    assert (status, words.count("compiling")) == (1, 2)
    assert "quantized matrices on this CPU: illegal instruction" in words
