"""`make update-llama-cpp`: what it lists of two llama.cpp, and where it does not move to."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from towerd.llama_build import VERSION

ROOT = Path(__file__).resolve().parent.parent
SCRIPTS = ROOT / "deploy" / "llama.cpp"
SOURCE = Path(sys.prefix) / "src" / "llama.cpp"


def write(folder: Path, names: dict[str, str]) -> Path:
    for name, text in names.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return folder


def source(folder: Path, archs: str, options: str, routes: str, tests: str) -> Path:
    """As much of a source as is read; words of each are separated by blanks."""
    named = [f'    {{ LLM_ARCH_{name.upper()}, "{name}" }}, // a model' for name in archs.split()]
    arch = "static const std::map<llm_arch, const char *> LLM_ARCH_NAMES = {\n"
    written = [
        f'    add_opt(common_arg(\n        // a note\n        {{"{name}"}}, "N",\n        "help"));'
        for name in options.split()
    ]
    written.append('add_opt(common_arg({"--only-bench"}, "").set_examples({LLAMA_EXAMPLE_BENCH}));')
    return write(
        folder,
        {
            "src/llama-arch.cpp": arch + "\n".join(named) + "\n};\n",
            "common/arg.cpp": "\n".join(written),
            "tools/server/server.cpp": "\n".join(
                f'ctx_http.get ("{name}", f);' for name in routes.split()
            ),
            "tools/server/tests/unit/test_a.py": "\n".join(
                f"def test_{name}():" for name in tests.split()
            ),
        },
    )


def run(*command: object, **env: str) -> subprocess.CompletedProcess[str]:
    words = [str(word) for word in command]
    return subprocess.run(words, capture_output=True, text=True, env=os.environ | env, cwd=ROOT)


def test_what_is_new_and_what_is_gone(tmp_path: Path) -> None:
    old = source(tmp_path / "old", "llama gptj", "--mlock --ctx-size", "/health /old", "one")
    new = source(tmp_path / "new", "llama glm9", "--ctx-size --v1.5-x", "/health /new", "one two")
    done = run(sys.executable, SCRIPTS / "changes.py", old, new)
    assert done.stdout.splitlines() == [
        "- architectures: 2, now 2",
        "  - new: `glm9`",
        "  - gone: `gptj`",
        "- flags of llama-server: 2, now 2",
        "  - new: `--v1.5-x`",
        "  - gone: `--mlock`",
        "- routes of llama-server: 2, now 2",
        "  - new: `GET /new`",
        "  - gone: `GET /old`",
        "- tests of its server: 1, now 2",
        "  - `test_a`: 1, now 2",
    ]


def test_a_source_that_reads_otherwise_is_told(tmp_path: Path) -> None:
    old = source(tmp_path / "old", "llama", "--ctx-size", "/health", "one")
    new = source(tmp_path / "new", "llama", "--ctx-size", "", "one")
    done = run(sys.executable, SCRIPTS / "changes.py", old, new)
    assert done.returncode != 0
    assert "No routes of llama-server were found" in done.stderr


def test_the_pinned_source_reads_as_we_know(tmp_path: Path) -> None:
    """Of it only the list of architectures is made up: the set-up does not fetch that file."""
    made = source(tmp_path, "llama", "", "", "")
    for name in ("common", "tools"):
        subprocess.run(["rm", "-r", str(made / name)], check=True)
        (made / name).symlink_to(SOURCE / name)
    other = source(tmp_path / "other", "llama", "--one", "/one", "one")
    said = run(sys.executable, SCRIPTS / "changes.py", other, made).stdout
    for name in ("`--mmproj-device`", "`-mmdev`", "`-np`", "`POST /completion`", "`test_basic`"):
        assert name in said
    assert "--only-bench" not in said


def test_it_goes_to_no_older_version_and_to_no_other_word() -> None:
    for word, said in (
        ("0.1.2", f"0.1.2 is older than {VERSION}"),
        ("newest", "newest is no version"),
    ):
        done = run("bash", SCRIPTS / "update.sh", sys.executable, VERSION=word)
        assert done.returncode == 1
        assert said in done.stderr
    done = run("bash", SCRIPTS / "update.sh", sys.executable, VERSION=VERSION)
    assert done.returncode == 0
    assert "already" in done.stdout
    assert (ROOT / "towerd" / "llama_build.py").read_text().count(f'"{VERSION}"') == 1
