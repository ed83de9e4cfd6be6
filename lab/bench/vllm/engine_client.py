"""VllmEngine: a vLLM engine in a process of its own, and what to install where there is no vLLM."""

from __future__ import annotations

import json
import os
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from towerd.errors import TowerdError

CHECKOUT = Path(__file__).resolve().parents[3]
TAIL_BYTES = 2000
ENVIRONMENT = {
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
    "TORCHINDUCTOR_COMPILE_THREADS": "1",
}
ENGINE = {
    "skip_tokenizer_init": True,
    "enforce_eager": True,
    "kv_cache_memory_bytes": 1 << 29,
    "enable_prefix_caching": False,
}
"""What every engine here is started with; without vLLM's own prefix cache, what is stored is asked for."""


class VllmFailed(TowerdError):
    """An engine did not start, or has ended."""


def require_vllm(python: str) -> None:
    """Raises TowerdError, one sentence, unless this interpreter has vLLM and towerd."""
    found = subprocess.run(
        [python, "-c", "import vllm, towerd.store"],
        capture_output=True,
        env=_environment(),
        text=True,
    )
    if found.returncode:
        raise TowerdError(
            f"{python} has no vLLM beside towerd: run `make vllm`, and name .venv-vllm/bin/python with --python."
        )


def transfer_config(extra: Mapping[str, Any], role: str = "kv_both") -> dict[str, Any]:
    """vLLM's --kv-transfer-config for towerd's connector."""
    return {
        "kv_connector": "TowerdConnector",
        "kv_connector_module_path": "towerd.connectors.vllm",
        "kv_role": role,
        "kv_connector_extra_config": dict(extra),
    }


class VllmEngine:
    """A context manager; `process` is the engine's."""

    def __init__(
        self,
        python: str,
        model: Path,
        environment: Mapping[str, str] | None = None,
        **arguments: Any,
    ) -> None:
        """arguments: those of `vllm.LLM`, over ENGINE. Raises VllmFailed."""
        self._errors = tempfile.TemporaryFile()
        self.process = subprocess.Popen(
            [python, "-m", "lab.bench.vllm.engine_process"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            text=True,
            cwd=CHECKOUT,
            env=_environment() | dict(environment or {}),
            start_new_session=True,
        )
        try:
            self._say({"model": str(model), **ENGINE, **arguments})
            self._hear()
        except BaseException:
            self.stop()
            raise

    def __enter__(self) -> VllmEngine:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.stop()

    def ask(self, prompt: Sequence[int], **options: Any) -> dict[str, Any]:
        """The answer to a prompt, see `engine_process`. Raises VllmFailed."""
        self._say({"prompt": list(map(int, prompt)), **options})
        return self._hear()

    def stop(self) -> None:
        """End the engine, which writes what it has; without effect if it has ended."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        try:
            self.process.stdin.close()
        except OSError:
            pass
        self.process.wait()
        self.process.stdout.close()
        self._errors.close()

    def _say(self, value: object) -> None:
        assert self.process.stdin is not None
        try:
            print(json.dumps(value), file=self.process.stdin, flush=True)
        except OSError:
            raise self._failed() from None

    def _hear(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise self._failed()
        found: dict[str, Any] = json.loads(line)
        return found

    def _failed(self) -> VllmFailed:
        self.process.wait()
        self._errors.seek(0, os.SEEK_END)
        self._errors.seek(max(0, self._errors.tell() - TAIL_BYTES))
        said = self._errors.read().decode(errors="replace")
        return VllmFailed(f"vLLM has ended with {self.process.returncode}: {said}")


def _environment() -> dict[str, str]:
    return {**os.environ, **ENVIRONMENT, "PYTHONPATH": str(CHECKOUT)}
