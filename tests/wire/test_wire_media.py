"""What stands for media in a prompt, and which prompts with media are refused."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hearing_model import TOKENS_A_SOUND, make_hearing_projector, sound
from llama_wire import N_CTX, NAME, Talker
from vision_model import TOKENS_AN_IMAGE, make_projector, picture

from towerd.media_ids import spans_of
from towerd.wire import Model, Projector, ProjectorOptions, Request, Settings, WireError

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
    return {"type": "image_url", "image_url": {"url": "data:image/png;base64," + picture(seed)}}


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
    assert (OPENED["c"].has_vision, OPENED["c"].has_audio) == (False, True)
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


@pytest.mark.parametrize("prompt", [[-5], [1, -(1 << 31)], [1, "a", -7]])
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
