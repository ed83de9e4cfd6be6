"""`python -m towerd` is `towerd`."""

from __future__ import annotations

from towerd.cli.main import towerd

if __name__ == "__main__":
    towerd()
