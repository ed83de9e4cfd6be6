"""Sessions out of a store and into one, as `.tower` files.

Coding takes seconds for a long session, so all of it runs on one thread of its own: neither the
event loop nor the threads that record turns wait for it, and the store is locked only while rows
of its catalog are copied.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path
from typing import Any, TypeVar

from towerd import tower_file
from towerd.codec import Codec, CodecError
from towerd.codec.vocabulary import GgufVocabulary
from towerd.engine.embedded.model import init_backend
from towerd.errors import InvalidRequest, NotSupported
from towerd.store import PUBLIC, Store
from towerd.tower_file import Model

T = TypeVar("T")


class Transfer:
    """Reads and writes `.tower` files for one model, whose vocabulary it loads at first use."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, "transfer")
        self._vocabulary: GgufVocabulary | None = None
        self._model: Model | None = None

    async def run(self, work: Callable[..., T], *args: Any) -> T:
        """`work(*args)` on the thread; one at a time, in order."""
        return await asyncio.get_running_loop().run_in_executor(self._thread, work, *args)

    def close(self) -> None:
        """Let the work that runs end, and free the vocabulary."""
        self._thread.shutdown(cancel_futures=True)
        if self._vocabulary is not None:
            self._vocabulary.close()

    def model(self, path: Path, hash: str, n_vocab: int | None = None) -> Model:
        """The model in this GGUF, whose file has this hash and, if that is known, so many tokens.

        Raises NotSupported if its vocabulary cannot be had."""
        if self._model is None:
            where = path if path.name else "its path is not known"
            init_backend()  # routes what llama.cpp says into our log
            try:
                vocabulary = GgufVocabulary(path)
            except CodecError as error:
                raise NotSupported(
                    "A .tower file takes the model's vocabulary, and its GGUF cannot be read "
                    f"here ({where}): make it readable for towerd."
                ) from error
            if n_vocab not in (None, vocabulary.n_tokens):
                vocabulary.close()
                raise NotSupported(
                    f"{path} has {vocabulary.n_tokens} tokens and the model that is served "
                    f"{n_vocab}: put the model's own file there and restart towerd."
                )
            self._vocabulary = vocabulary
            self._model = Model(path.name, hash, Codec(vocabulary))
        return self._model


def export_session(store: Store, model: Model, id: str, scope: str | None) -> bytes:
    """A session as the bytes of a `.tower` file. Raises NotFound, StoreError (several tenants
    have one of this id), TowerFileError."""
    return tower_file.write(store.history(id, scope), model)


def import_session(store: Store, model: Model, data: bytes, scope: str) -> dict[str, Any]:
    """Enter the session of a `.tower` file for a tenant: `session`, `added` (turns that were not
    here), and `bases`: precached prompts that it begins with and which of them are here, too.

    Raises TowerFileError, InvalidRequest (another session has its id), DiskFull."""
    if scope == PUBLIC:
        raise InvalidRequest(
            "Sessions belong to a tenant, and 'public' is none: name another scope."
        )
    history = tower_file.read(data, model)
    added = store.add_history(history, scope)
    here = {base.digest for base in store.bases() if base.scope in (scope, PUBLIC)}
    return {
        "session": asdict(store.session(history.id, scope)),
        "added": added,
        "bases": [
            {"name": base.name, "n_tokens": base.n_tokens, "here": base.digest in here}
            for base in history.bases
        ],
    }
