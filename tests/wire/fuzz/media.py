"""Writes the fuzzer's inputs for libmtmd into a folder: two projectors, pictures and sounds."""

from __future__ import annotations

import base64
import sys
from pathlib import Path

from hearing_model import make_hearing_projector, sound

from lab.models.vision import make_projector, picture

N_EMBD_TEXT = 64
"""Of the bundled model."""
GIF = base64.b64decode("R0lGODlhAQABAIAAAAAAAP///yH5BAEAAAAALAAAAAABAAEAAAIBRAA7")
BMP = b"BM" + bytes.fromhex(
    "3a000000000000003600000028000000010000000100000001001800000000000400000000000000000000000000"
    "000000000000ff00"
)
PPM = b"P6\n3 2\n255\n" + bytes(range(18))
TGA = bytes((0, 0, 2, 0, 0, 0, 0, 0, 0, 0, 0, 0, 2, 0, 2, 0, 24, 0)) + bytes(range(12))
FLAC = b"fLaC\x80\0\0\x22" + bytes.fromhex("1000100000000000000003e800f0") + bytes(20)
MP3 = b"\xff\xfb\x10\xc4" + bytes(413)

folder = Path(sys.argv[1])
folder.mkdir(exist_ok=True)
make_projector(folder / "seeing.gguf", N_EMBD_TEXT)
make_hearing_projector(folder / "hearing.gguf", N_EMBD_TEXT)
pictures = [base64.b64decode(picture(1)), GIF, BMP, PPM, TGA]
sounds = [base64.b64decode(sound(1))[:8_000], FLAC, MP3 * 4]
for kind, made in (("picture", pictures), ("sound", sounds)):
    for i, data in enumerate(made):
        (folder / f"{kind}-{i}").write_bytes(data)
