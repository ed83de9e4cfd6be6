"""The ids of media in a prompt, and which prompts with media are refused."""

from __future__ import annotations

import base64
import json
import struct
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hearing_model import TOKENS_A_SOUND, make_hearing_projector, sound
from llama_wire import N_CTX, NAME, Talker

from lab.models.vision import TOKENS_AN_IMAGE, make_projector, picture
from towerd.media_ids import spans_of
from towerd.wire import (
    EmbeddingRequest,
    Model,
    Projector,
    ProjectorOptions,
    Request,
    Settings,
    WireError,
    check_medium,
)

PNG = "data:image/png;base64,"
N_EMBD_TEXT = 64
"""Of the bundled model."""
MAKERS = {"seeing": make_projector, "hearing": make_hearing_projector}
OPENED: dict[str, Projector] = {}


@pytest.fixture(scope="module")
def paths(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("projectors")
    for name, make in MAKERS.items():
        make(folder / name, N_EMBD_TEXT)
    return {name: folder / name for name in MAKERS}


@pytest.fixture(scope="module")
def seeing(story: Talker, paths: dict[str, Path]) -> Iterator[Model]:
    yield opened(story, paths["seeing"], "a")
    OPENED.clear()


def opened(story: Talker, path: Path, digest: str) -> Model:
    options = ProjectorOptions(path=str(path), digest=digest, n_threads=1, warmup=False)
    OPENED[digest] = projector = Projector(story.address, options.encode())
    settings = Settings(name=NAME, n_ctx=N_CTX, n_parallel=1)
    return Model(story.address, settings.encode(), None, projector)


def asked(model: Model, *parts: Any, **fields: Any) -> Request:
    body = {"messages": [{"role": "user", "content": list(parts)}], **fields}
    return Request(model, "chat", json.dumps(body).encode())


def seen(seed: int) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": PNG + picture(seed)}}


def text(words: str) -> dict[str, Any]:
    return {"type": "text", "text": words}


def media_ids(request: Request) -> list[list[int]]:
    """The ids of each medium, as they stand in the prompt."""
    ids = request.prompts[0]
    found = [ids[a:b].tolist() for a, b in spans_of(ids)]
    assert found == [medium.ids.tolist() for medium in request.media(0)]
    return found


def test_ids_follow_from_the_bytes(story: Talker, seeing: Model, paths: dict[str, Path]) -> None:
    """The same picture has the same ids, whatever else is said; another one, or another projector,
    shares none of them."""
    (one,) = media_ids(asked(seeing, text("What is this?"), seen(1)))
    (again,) = media_ids(asked(seeing, seen(1), text("Who?")))
    (other,) = media_ids(asked(seeing, seen(2)))
    (elsewhere,) = media_ids(asked(opened(story, paths["seeing"], "b"), seen(1)))
    assert one == again
    assert len(one) == TOKENS_AN_IMAGE
    assert not set(one) & {*other, *elsewhere}
    both = media_ids(asked(seeing, seen(1), seen(2), seen(1)))
    assert both[:2] == [one, other]
    assert not set(both[2]) & set(one)
    assert all(id < -1 for ids in both for id in ids)


def test_the_next_prompt_has_the_same_media(seeing: Model) -> None:
    """What an answer's next request begins with has this request's pictures where they were."""
    request = asked(seeing, text("What is this?"), seen(1), seen(2))
    answer = json.dumps({"role": "assistant", "content": "A dog."}).encode()
    ids, prompt = request.next_prompt(answer), request.prompts[0]
    assert spans_of(ids) == spans_of(prompt)
    assert np.array_equal(ids[ids < 0], prompt[prompt < 0])


def test_sounds(story: Talker, paths: dict[str, Path]) -> None:
    hearing = opened(story, paths["hearing"], "c")
    modalities = json.loads(hearing.props())["modalities"]
    assert (modalities["vision"], modalities["audio"]) == (False, True)
    part = {"type": "input_audio", "input_audio": {"data": sound(1), "format": "wav"}}
    (ids,) = media_ids(asked(hearing, part, text("What was that?")))
    assert len(ids) == TOKENS_A_SOUND
    assert not OPENED["c"].is_whole(asked(hearing, part).media(0)[0])
    with pytest.raises(WireError, match="image input is not supported") as refused:
        asked(hearing, seen(1))
    assert refused.value.status == 400


@pytest.mark.parametrize("url", ["http://a/b.png", "https://a/b.png", "file:///etc/passwd"])
def test_nothing_is_fetched(seeing: Model, url: str) -> None:
    for part in (
        {"type": "image_url", "image_url": {"url": url}},
        {"type": "input_video", "input_video": {"data": url}},
        {"type": "video_url", "video_url": {"url": url}},
    ):
        with pytest.raises(WireError) as refused:
            asked(seeing, part)
        assert refused.value.status == 400


def png_of(width: int, height: int) -> bytes:
    """The beginning of a PNG."""
    head = b"IHDR" + struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    data = b"IDAT" + zlib.compress(bytes(100))
    chunks = (
        struct.pack(">I", len(c) - 4) + c + struct.pack(">I", zlib.crc32(c)) for c in (head, data)
    )
    return b"\x89PNG\r\n\x1a\n" + b"".join(chunks)


def flac_of(n_samples: int) -> bytes:
    """The beginning of a FLAC of one channel at 16 kHz."""
    figures = 16_000 << 44 | 15 << 36 | n_samples
    info = struct.pack(">HH", 4096, 4096) + bytes(6) + struct.pack(">Q", figures) + bytes(16)
    return b"fLaC\x80\0\0\x22" + info + bytes(4096)


def test_pictures_that_promise_too_much(seeing: Model) -> None:
    """A few bytes that stand for gigabytes are refused before memory is allocated for them."""
    small, large = (base64.b64encode(png_of(n, n)).decode() for n in (9, 18_000))
    parts = [{"type": "image_url", "image_url": {"url": PNG + data}} for data in (small, large)]
    with pytest.raises(WireError, match="decoded") as refused:
        asked(seeing, parts[1], parts[1])
    assert refused.value.status == 400
    marker = json.loads(seeing.props())["media_marker"]
    for last in (large, large + "!"):
        prompt = {"prompt_string": 2 * marker, "multimodal_data": [large, last]}
        for one in (prompt, ["a", prompt]):
            with pytest.raises(WireError, match="decoded"):
                Request(seeing, "completion", json.dumps({"prompt": one}).encode())
    with pytest.raises(WireError, match="Failed to load"):  # it promises little, and has less
        asked(seeing, parts[0], parts[0])


def softimage_of(width: int, height: int) -> bytes:
    """The beginning of a Softimage picture, whose decoder in stb_image ends the process."""
    return (
        b"\x53\x80\xf6\x34" + bytes(84) + b"PICT" + struct.pack(">HH8x", width, height) + bytes(9)
    )


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (softimage_of(4000, 4000), "this format"),
        (b"P6\n64 64\n255\n" + bytes(64 * 64 * 3), "this format"),
        (b"GIF89a" + struct.pack("<HH", 9000, 9000) + bytes(30), "its file was cut off"),
        (png_of(12_000, 12_000) + bytes(100_000), "more than 384 MiB when it is decoded"),
    ],
)
def test_pictures_that_are_not_decoded(seeing: Model, data: bytes, reason: str) -> None:
    """Formats that nobody sends, whose decoders are not to be trusted; sizes that no camera has, and
    those that the file has no bytes for."""
    part = {"type": "image_url", "image_url": {"url": PNG + base64.b64encode(data).decode()}}
    with pytest.raises(WireError, match=reason) as refused:
        asked(seeing, part)
    assert refused.value.status == 400
    with pytest.raises(WireError, match=reason):
        check_medium(data)
    check_medium(base64.b64decode(picture(1)))


def test_sounds_that_promise_too_much(story: Talker, paths: dict[str, Path]) -> None:
    """The same holds for sounds."""
    hearing = opened(story, paths["hearing"], "d")
    data = base64.b64encode(flac_of(1 << 35)).decode()
    with pytest.raises(WireError, match="decoded") as refused:
        asked(hearing, {"type": "input_audio", "input_audio": {"data": data}})
    assert refused.value.status == 400


@pytest.mark.parametrize("url", [PNG + picture(1), "http://127.0.0.1:9/x.png"])
def test_embeddings_are_of_text(seeing: Model, url: str) -> None:
    """Nothing is fetched and nothing looked at for them, though the model beside them could."""
    content = [{"type": "image_url", "image_url": {"url": url}}, text("What?")]
    with pytest.raises(WireError, match="image input is not supported") as refused:
        EmbeddingRequest(seeing, True, json.dumps({"input": {"content": content}}).encode())
    assert refused.value.status == 400


@pytest.mark.parametrize("prompt", [[-5], [1, -(1 << 31)], [1, "a", -7], [1, "a", -7.0]])
def test_ids_of_media_are_no_prompt(seeing: Model, prompt: list[Any]) -> None:
    """A client cannot name a picture that it does not have."""
    with pytest.raises(WireError, match="invalid tokens") as refused:
        Request(seeing, "completion", json.dumps({"prompt": prompt}).encode())
    assert refused.value.status == 400


def test_what_is_no_projector(story: Talker, tmp_path: Path) -> None:
    """A text model, a projector for another width, noise: an error, and no end of the process."""
    other = tmp_path / "other.gguf"
    make_projector(other, 32)
    noise = tmp_path / "noise.gguf"
    noise.write_bytes(b"GGUF" + bytes(range(200)))
    for path in (story.path, other, noise, tmp_path / "absent"):
        options = ProjectorOptions(path=str(path), digest="", n_threads=1, warmup=False)
        with pytest.raises(RuntimeError, match="cannot load the projector"):
            Projector(story.address, options.encode())
