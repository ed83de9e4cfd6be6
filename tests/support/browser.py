"""A headless Chromium of the system's or of Playwright's, for tests of pages."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

NAMES = ("chromium-headless-shell", "chromium", "chromium-browser", "google-chrome")


def executable() -> str | None:
    """The browser's program; None: Playwright's own, if it is installed."""
    return next((path for name in NAMES if (path := shutil.which(name))), None)


@contextmanager
def open_browser() -> Iterator[Any]:
    """A headless browser; the test skips where there is none."""
    sync_api = pytest.importorskip("playwright.sync_api")
    with sync_api.sync_playwright() as playwright:
        try:
            browser = playwright.chromium.launch(
                executable_path=executable(), args=["--no-sandbox"] if os.getuid() == 0 else []
            )
        except sync_api.Error as error:
            pytest.skip(f"no Chromium is here: {str(error).splitlines()[0]}")
        try:
            yield browser
        finally:
            browser.close()


def screenshots(root: Path) -> Path:
    """The folder for pictures: that of the variable TOWERD_SCREENSHOTS, or `root`."""
    folder = Path(os.environ.get("TOWERD_SCREENSHOTS", root))
    folder.mkdir(parents=True, exist_ok=True)
    return folder
