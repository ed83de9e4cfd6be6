"""What is drawn for a life of a simulated router before it begins: its models, settings and clients."""

from __future__ import annotations

import random
from pathlib import Path

ADDRESS = ("127.0.0.1", 8080)
GIB = 1 << 30


class Plan:
    """What is drawn before a life begins."""

    def __init__(self, chance: random.Random, folder: Path) -> None:
        self.names = list("abcd"[: chance.choice((2, 3, 3, 4))])
        self.models_max = chance.choice((1, 1, 2, 2, 3, 0))
        self.memory = chance.choice((1000, 1000, 9, 14)) * GIB
        self.has_faults = chance.random() < 0.5
        self.has_unloads = chance.random() < 0.5
        self.has_new_files = chance.random() < 0.3
        self.ends_early = chance.random() < 0.2
        self.n_clients = chance.randint(2, 7)
        self.n_operations = chance.randint(2, 7)
        self.pause_s = chance.choice((0.05, 0.5, 5.0))
        self.folder = folder
        self.sizes = {name: chance.randint(1, 5) * GIB // 2 for name in self.names}
        self.kept = chance.choice(self.names) if chance.random() < 0.15 else None
        """The model that never leaves to make room."""
        tables = "".join(self._table(name, chance) for name in self.names)
        self.twin = chance.choice(self.names) if chance.random() < 0.25 else None
        """The model whose file is another model's, `twin`, too."""
        if self.twin:
            self.names.append("twin")
            self.sizes["twin"] = self.sizes[self.twin]
            tables += f'[models.twin]\nmodel = "{folder}/m/{self.twin}.gguf"\nctx_size = 4096\n'
        (folder / "m").mkdir()
        for name in self.names:
            if name != "twin":
                self.write(name)
        (folder / "towerd.toml").write_text(
            f'models_dir = "{folder}/m"\nstore_dir = "{folder}/store"\nmodels_max = {self.models_max}\n'
            f'socket = "{folder}/r"\n'
            f"memory = {self.memory}\nport = {ADDRESS[1]}\nhot_bytes = 0\n{tables}"
        )

    def _table(self, name: str, chance: random.Random) -> str:
        idle_s = chance.choice(("", "", "idle_s = 0.2\n", "idle_s = 5\n"))
        keep = "keep = true\n" if name == self.kept else ""
        return f"[models.{name}]\n{idle_s}{keep}" if idle_s or keep else ""

    def write(self, name: str) -> None:
        """A new file for a model."""
        half = self.folder / "half"
        with half.open("wb") as file:
            file.truncate(self.sizes[name])
        half.rename(self.folder / "m" / f"{name}.gguf")
