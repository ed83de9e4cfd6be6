"""`npm_licences.py NODE_MODULES`: prints the licence texts of the packages in it, each text once.

The web UI has code of some of these packages in it. Which ones its bundler does not say, so all are named.
"""

from __future__ import annotations

import json
import sys
from collections import defaultdict
from pathlib import Path


def main(folder: Path) -> None:
    """Print each text below the packages that have it."""
    packages = defaultdict(list)
    for manifest in sorted(folder.glob("**/node_modules/*/package.json")) + sorted(
        [*folder.glob("*/package.json"), *folder.glob("@*/*/package.json")]
    ):
        about = json.loads(manifest.read_text(encoding="utf-8"))
        texts = [each for each in sorted(manifest.parent.iterdir()) if is_licence(each)]
        text = "\n".join(each.read_text("utf-8", "replace").strip() for each in texts)
        name = f"{about.get('name')} {about.get('version')} ({about.get('license')})"
        packages[text].append(name)
    for text, names in packages.items():
        print("=" * 80, *sorted(set(names)), "", text, "", sep="\n")


def is_licence(path: Path) -> bool:
    """Whether a file holds the terms of its package."""
    return path.is_file() and path.name.upper().startswith(
        ("LICENSE", "LICENCE", "NOTICE", "COPYING")
    )


if __name__ == "__main__":
    main(Path(sys.argv[1]))
