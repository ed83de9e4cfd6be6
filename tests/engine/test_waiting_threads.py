"""llama.cpp's threads wait for each other awake only briefly, unless the user says otherwise."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from towerd.llama_build import SPIN_COUNT


@pytest.mark.parametrize(
    ("said", "found"),
    [
        ({}, str(SPIN_COUNT)),
        ({"GOMP_SPINCOUNT": "7"}, "7"),
        ({"OMP_WAIT_POLICY": "active"}, "None"),
    ],
)
def test_libgomp_is_told_before_it_is_loaded(said: dict[str, str], found: str) -> None:
    env = {
        name: value
        for name, value in os.environ.items()
        if name not in ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")
    }
    show = "import os, towerd.llama_library; print(os.environ.get('GOMP_SPINCOUNT'))"
    done = subprocess.run(
        [sys.executable, "-c", show], env=env | said, capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == found
