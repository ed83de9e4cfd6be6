"""`arm64_blobs.py TEXT FOLDER`: the text as a blob of each form in FOLDER, to compare machines by."""

from __future__ import annotations

import sys
from pathlib import Path

from towerd.codec import Codec
from towerd.codec.vocabulary import GgufVocabulary
from towerd.models.bundled import bundled_model

FORMS = ("packed", "ranked", "text", "mix", "network")
TEXT_BYTES = 6000


def main(text: Path, folder: Path) -> None:
    """Write FOLDER/FORM.blob for each form; `Codec.encode` has decoded it by then."""
    folder.mkdir(parents=True)
    with GgufVocabulary(bundled_model()) as vocabulary:
        codec, ids = Codec(vocabulary), vocabulary.tokenize(text.read_bytes()[:TEXT_BYTES])
        for form in FORMS:
            (folder / f"{form}.blob").write_bytes(codec.encode(ids, form=form))


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
