"""Pictures on the embedded engine: llama-server's words, and rows that are reused like text's."""

from __future__ import annotations

import base64
import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import requests
from daemon import Daemon, reuse_of, run_towerctl, run_towerd, wait_until_written
from pictures import N_PREDICT, Said, answered, counts, look_at, say
from sharing import Place, shared

from lab.models.vision import TOKENS_AN_IMAGE, make_projector, picture
from towerd.cli.bench.harness.servers import llama_server
from towerd.models.bundled import bundled_model

MakeDaemon = Callable[..., Daemon]
FLAGS = ("-c", "1024", "-t", "1", "-ctk", "f32", "-ctv", "f32")
N_EMBD_TEXT = 64
"""Of the bundled model."""
PNG = "data:image/png;base64,"


@pytest.fixture(scope="module")
def projector(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("projector") / "mmproj.gguf"
    make_projector(path, N_EMBD_TEXT)
    return path


@pytest.fixture(scope="module")
def alone(projector: Path) -> Iterator[str]:
    """URL of llama-server, which every answer is held against."""
    flags = (*FLAGS, "-np", "1", "--mmproj", str(projector))
    with llama_server(bundled_model(), *flags) as server:
        yield server.url


@pytest.fixture
def flags(projector: Path) -> tuple[str, ...]:
    """Of a daemon that sees pictures."""
    return (*FLAGS, "--mmproj", str(projector), "--no-anticipate")


def both(alone: str, daemon: Daemon, messages: list[Any]) -> Said:
    """The daemon's answer, which is llama-server's."""
    wanted, said = say(alone, messages), say(daemon.url, messages)
    assert (said.text, said.n_prompt) == (wanted.text, wanted.n_prompt)
    return said


@pytest.mark.parametrize("end", ["SIGTERM", "kill"])
def test_a_picture_is_seen_once(
    make_daemon: MakeDaemon, flags: tuple[str, ...], alone: str, end: str
) -> None:
    """Asked about again in the same chat, in another one, and after the daemon's end, it is
    neither encoded nor evaluated."""
    chat = [look_at(1)]
    with make_daemon(*flags) as daemon:
        first = both(alone, daemon, chat)
        assert counts(daemon) == (1, 1)
        chat = answered(chat, first, "And what colour?")
        second = both(alone, daemon, chat)
        assert second.reuse["prefill"] < second.n_prompt - first.n_prompt
        other = both(alone, daemon, [look_at(1), {"role": "user", "content": "Who is it?"}])
        assert other.reuse["live"] >= first.n_prompt - 3
        assert counts(daemon) == (1, 1)
        if end == "kill":
            wait_until_written(daemon)
            daemon.kill()
        else:
            daemon.stop()
        daemon.start()
        chat = answered(chat, second, "And then?")
        third = both(alone, daemon, chat)
        assert third.reuse["warm"] > second.n_prompt
        assert counts(daemon) == (0, 0)
        assert daemon.stop() == 0, daemon.log
    with daemon.stored():
        pass


def test_other_pictures_are_others(
    make_daemon: MakeDaemon, flags: tuple[str, ...], alone: str
) -> None:
    """Of the same size, beside another, in another order, after other words."""
    with make_daemon(*flags) as daemon:
        first = both(alone, daemon, [look_at(1)])
        other = both(alone, daemon, [look_at(2)])
        assert other.reuse["live"] <= first.n_prompt - TOKENS_AN_IMAGE
        n_before = other.reuse["live"]
        two = both(alone, daemon, [look_at(1, 2)])
        assert two.reuse["live"] >= n_before + TOKENS_AN_IMAGE
        turned = both(alone, daemon, [look_at(2, 1)])
        assert turned.reuse["live"] >= n_before + TOKENS_AN_IMAGE
        assert counts(daemon) == (4, 4)
        edited = both(alone, daemon, [look_at(1, text="Who is this?")])
        assert edited.reuse["live"] < n_before
        assert counts(daemon) == (5, 5)
        twice = both(alone, daemon, [look_at(3, 3)])
        assert twice.reuse["live"] == n_before
        assert both(alone, daemon, [look_at(3, 3)]).reuse["prefill"] == 1
        assert counts(daemon) == (7, 7)


def test_every_endpoint_sees(make_daemon: MakeDaemon, flags: tuple[str, ...], alone: str) -> None:
    """As llama-server does, and all of them share one picture's rows."""
    source = {"type": "base64", "media_type": "image/png", "data": picture(1)}
    text = "What is this?"
    bodies: list[tuple[str, Any]] = [
        (
            "/v1/responses",
            {
                "input": [
                    {
                        "role": "user",
                        "content": [
                            {"type": "input_text", "text": text},
                            {"type": "input_image", "image_url": PNG + picture(1)},
                        ],
                    }
                ],
                "max_output_tokens": 8,
            },
        ),
        (
            "/v1/messages",
            {
                "messages": [
                    {
                        "role": "user",
                        "content": [
                            {"type": "text", "text": text},
                            {"type": "image", "source": source},
                        ],
                    }
                ],
                "max_tokens": 8,
            },
        ),
    ]
    with make_daemon(*flags) as daemon:
        both(alone, daemon, [look_at(1)])
        for path, body in bodies:
            body["temperature"] = 0
            wanted, got = (
                requests.post(u + path, json=body, timeout=60) for u in (alone, daemon.url)
            )
            assert (wanted.status_code, got.status_code) == (200, 200), got.text
            assert said_in(got.json()) == said_in(wanted.json())
            assert reuse_of(got.headers)["prefill"] == 1
        texts = []
        for url in (alone, daemon.url):
            marker = requests.get(url + "/props", timeout=30).json()["media_marker"]
            prompt = {"prompt_string": f"Look: {marker} It is", "multimodal_data": [picture(2)]}
            done = requests.post(
                url + "/completion",
                json={"prompt": [prompt, "Once"], "n_predict": 8, "temperature": 0},
                timeout=60,
            ).json()
            texts.append([each["content"] for each in done])
        assert texts[0] == texts[1]
        for path in ("/v1/chat/completions/input_tokens", "/v1/messages/count_tokens"):
            body = {"messages": [look_at(1, 2)]}
            wanted, got = (
                requests.post(u + path, json=body, timeout=60) for u in (alone, daemon.url)
            )
            assert got.json() == wanted.json()
        wanted, got = (requests.get(u + "/props", timeout=30).json() for u in (alone, daemon.url))
        assert got["modalities"] == wanted["modalities"] | {"video": False}
        wanted, got = (
            requests.get(u + "/v1/models", timeout=30).json() for u in (alone, daemon.url)
        )
        assert got["models"][0]["capabilities"] == wanted["models"][0]["capabilities"]


def said_in(reply: dict[str, Any]) -> Any:
    """The text of a Responses or a Messages reply."""
    parts = reply["output"][-1]["content"] if "output" in reply else reply["content"]
    return [part["text"] for part in parts]


BAD = [
    ({"type": "image_url", "image_url": {"url": PNG + "AAAA"}}, "Failed to load image"),
    ({"type": "image_url", "image_url": {"url": "data:text/plain;base64,AAAA"}}, "Invalid uri"),
    ({"type": "image_url", "image_url": {"url": "http://127.0.0.1:1/a.png"}}, "not fetched"),
    ({"type": "image_url", "image_url": {"url": "https://example.org/a.png"}}, "not fetched"),
    ({"type": "image_url", "image_url": {"url": "file:///etc/passwd"}}, "file:// URLs are not"),
    (
        {"type": "input_audio", "input_audio": {"data": "AAAA", "format": "wav"}},
        "audio input is not",
    ),
    ({"type": "hologram"}, "unsupported content"),
]


def test_bad_media(make_daemon: MakeDaemon, flags: tuple[str, ...], alone: str) -> None:
    """Each is told what is wrong with a 400, and the next chat is served."""
    with make_daemon(*flags) as daemon:
        for part, words in BAD:
            body: Any = {"messages": [{"role": "user", "content": [part]}]}
            assert words in daemon.post("/v1/chat/completions", body, 400)["error"]["message"]
        marker = daemon.get("/props")["media_marker"]
        one = [picture(1)]
        for string, data in ((f"{marker} a", []), ("a", one), (f"a {marker} b", [*one, *one])):
            prompt: Any = {"prompt_string": string, "multimodal_data": data}
            daemon.post("/completion", {"prompt": prompt, "n_predict": 2}, 400)
        daemon.post("/completion", {"prompt": [1, -(1 << 31), 5], "n_predict": 2}, 400)
        body = {"messages": [look_at(1)], "retention": "streaming", "live_budget": 64}
        assert "none" in daemon.post("/v1/chat/completions", body, 400)["error"]["message"]
        both(alone, daemon, [look_at(1)])


def test_no_program_in_path_is_run(
    make_daemon: MakeDaemon, flags: tuple[str, ...], tmp_path: Path
) -> None:
    """libmtmd gives what is no picture to ffmpeg, which follows links in it: only to one that was
    named."""
    for name in ("ffmpeg", "ffprobe"):
        (tmp_path / name).write_text(f'#!/bin/sh\necho "$0" >> "{tmp_path}/ran"\nexit 1\n')
        (tmp_path / name).chmod(0o755)
    path = f"{tmp_path}:{os.environ['PATH']}"
    body = {
        "messages": [
            {"role": "user", "content": [{"type": "image_url", "image_url": {"url": PNG + "AAAA"}}]}
        ]
    }
    with make_daemon(*flags, PATH=path) as daemon:
        daemon.post("/v1/chat/completions", body, 400)
        assert not (tmp_path / "ran").exists()
        assert not daemon.get("/props")["modalities"]["video"]
    named = ("--video-ffmpeg-dir", str(tmp_path))
    with make_daemon(*flags, *named, name="named") as daemon:
        daemon.post("/v1/chat/completions", body, 400)
        assert (tmp_path / "ran").exists()
        assert daemon.get("/props")["modalities"]["video"]


def test_without_a_projector(make_daemon: MakeDaemon) -> None:
    """llama-server's words, and no 5xx."""
    with make_daemon(*FLAGS) as daemon:
        said = daemon.post("/v1/chat/completions", {"messages": [look_at(1)]}, 400)
        assert "you may need to provide the mmproj" in said["error"]["message"]


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--mmproj", "absent.gguf"], "--mmproj: there is no file absent.gguf."),
        (["--mmproj", str(bundled_model())], "cannot load the projector"),
        (["--mmproj", "x", "--image-max-tokens", "many"], "takes a whole number"),
    ],
)
def test_bad_projectors(tmp_path: Path, words: list[str], told: str) -> None:
    done = run_towerd(
        tmp_path, "serve", "--port", "0", "--socket", "s", "--store-dir", "store", *FLAGS, *words
    )
    assert done.returncode == 1
    assert told in done.stdout + done.stderr


def test_a_frozen_chat_keeps_its_picture(
    make_daemon: MakeDaemon, flags: tuple[str, ...], alone: str
) -> None:
    """What is frozen and thawed, and what is exported and imported elsewhere, has the same ids; the
    picture is evaluated again when its client sends it."""
    chat = [look_at(1), {"role": "user", "content": "A story about it, please. " * 8}]
    with make_daemon(*flags) as daemon, make_daemon(*flags, name="other") as other:
        first = both(alone, daemon, chat)
        ids = daemon.session_ids(first.session)
        assert sum(id < 0 for id in ids) == TOKENS_AN_IMAGE
        assert "<__media__>" in daemon.get(f"/towerd/v1/sessions/{first.session}?text=1")["text"]
        daemon.post(f"/towerd/v1/sessions/{first.session}/freeze", {})
        file = daemon.root / "chat.tower"
        assert run_towerctl(daemon, "export", first.session, "-o", str(file)).returncode == 0
        assert run_towerctl(other, "import", str(file)).returncode == 0
        assert other.session_ids(first.session) == ids
        daemon.stop()
        daemon.start()
        daemon.post(f"/towerd/v1/sessions/{first.session}/thaw", {})
        assert daemon.session_ids(first.session) == ids
        chat = answered(chat, first, "And then?")
        for each in (daemon, other):
            said = both(alone, each, chat)
            assert said.session == first.session
            assert counts(each) == (1, 1)


def test_many_at_once(make_daemon: MakeDaemon, flags: tuple[str, ...], alone: str) -> None:
    """Chats with and without pictures take turns in a context that holds three of them."""
    words = "Once upon a time there was a dog. " * 10
    chats: list[list[Any]] = [[look_at(i, i + 1, text=words)] for i in range(4)]
    chats += [[{"role": "user", "content": words * 2}] for _ in range(2)]
    wanted = []
    with make_daemon(*flags, "-np", "4", "--live-tokens", "1024") as daemon:
        with ThreadPoolExecutor(len(chats)) as pool:
            for _ in range(2):
                said = list(pool.map(lambda chat: say(daemon.url, chat).text, chats))
                wanted = [say(alone, chat).text for chat in chats]
                assert said == wanted
                chats = [
                    [
                        *chat,
                        {"role": "assistant", "content": text},
                        {"role": "user", "content": "Go on"},
                    ]
                    for chat, text in zip(chats, wanted, strict=True)
                ]
        assert daemon.stop() == 0, daemon.log


def test_a_client_that_leaves(make_daemon: MakeDaemon, flags: tuple[str, ...], alone: str) -> None:
    """While its picture is encoded: the next one gets its answer."""
    with make_daemon(*flags) as daemon:
        for seed in range(5):
            body: Any = {"messages": [look_at(seed)], "max_tokens": 200, "ignore_eos": True}
            with pytest.raises(requests.exceptions.RequestException):
                requests.post(daemon.url + "/v1/chat/completions", json=body, timeout=0.01)
        both(alone, daemon, [look_at(9)])
        assert daemon.stop() == 0, daemon.log
    with daemon.stored():
        pass


def test_what_was_sent_is_kept(make_daemon: MakeDaemon, projector: Path) -> None:
    """A chat is continued without its pictures being sent again, also where the rows are of other settings: they are
    evaluated again, as if they had been sent. They are handed out as they came, and deleted with the chat."""
    path, named = "/towerd/v1/sessions/seen", {"X-Towerd-Session": "seen"}
    flags = (*FLAGS[:4], "--mmproj", str(projector), "--no-anticipate")
    with make_daemon(*flags, *FLAGS[4:]) as daemon:
        chat = [look_at(1, 2, 1)]
        body: dict[str, Any] = {"messages": chat, "temperature": 0, "max_tokens": N_PREDICT}
        first = requests.post(
            daemon.url + "/v1/chat/completions", json=body, headers=named, timeout=60
        )
        daemon.kill()
    with make_daemon(*flags) as daemon:
        read = daemon.get(path + "/chat")
        files = [
            requests.get(f"{daemon.url}{path}/media/{key}", timeout=60) for key in read["media"]
        ]
        assert [each.content for each in files] == [base64.b64decode(picture(n)) for n in (1, 2, 1)]
        assert {each.headers["Content-Type"] for each in files} == {"image/png"}
        assert requests.get(f"{daemon.url}{path}/media/{'0' * 32}", timeout=60).status_code == 404
        asked = {"role": "user", "content": "And what colour?"}
        fields: dict[str, Any] = {"message": asked, "temperature": 0, "max_tokens": N_PREDICT}
        said = requests.post(f"{daemon.url}{path}/chat", json=fields, timeout=60).json()
        assert counts(daemon)[1] == 3
        answer = first.json()["choices"][0]["message"]
        whole = [*chat, answer, asked]
        again = say(daemon.url, whole, cache_prompt=False)
        assert said["choices"][0]["message"]["content"] == again.text
        assert counts(daemon)[1] == 6
        requests.delete(daemon.url + path, timeout=60).raise_for_status()
        gone = f"{daemon.url}{path}/media/{read['media'][0]}"
        assert requests.get(gone, timeout=60).status_code == 404


def continued(daemon: Daemon) -> str:
    """What the chat `seen` answers to another question, without its pictures being sent again."""
    asked = {"role": "user", "content": "And what colour?"}
    body = {"message": asked, "temperature": 0, "max_tokens": N_PREDICT, "cache_prompt": False}
    said = daemon.post("/towerd/v1/sessions/seen/chat", body)
    return str(said["choices"][0]["message"]["content"])


def seen_files(daemon: Daemon) -> list[bytes | None]:
    """The pictures of the chat `seen`, as they are handed out."""
    path = "/towerd/v1/sessions/seen"
    keys = daemon.get(path + "/chat")["media"]
    return [
        key and requests.get(f"{daemon.url}{path}/media/{key}", timeout=60).content for key in keys
    ]


def test_pictures_travel_with_their_chat(
    make_daemon: MakeDaemon, flags: tuple[str, ...], tmp_path: Path
) -> None:
    """In an encrypted file to another store with another key, where the chat continues as at home."""
    key, file, secret = tmp_path / "key", tmp_path / "seen.tower", {"TOWERD_FILE_PASSPHRASE": "x"}
    away = make_daemon(*flags, "--encrypt", f"file:{key}", name="away")
    pictures = [base64.b64decode(picture(n)) for n in (1, 2, 1)]
    with make_daemon(*flags, "--encrypt", f"file:{tmp_path / 'home'}") as home, away:
        body = {"messages": [look_at(1, 2, 1)], "temperature": 0, "max_tokens": N_PREDICT}
        home.post("/v1/chat/completions", body, headers={"X-Towerd-Session": "seen"})
        done = run_towerctl(home, "export", "seen", "--encrypt", "-o", str(file), **secret)
        assert "with 3 pictures and sounds" in done.stdout, done.stderr
        assert pictures[0] not in file.read_bytes()
        done = run_towerctl(away, "import", str(file), **secret)
        assert "Kept 3 pictures and sounds." in done.stdout, done.stderr
        away.kill()
        away.start()
        assert seen_files(away) == pictures
        assert continued(away) == continued(home)
        assert counts(away)[1] == 3
        twice = run_towerctl(away, "import", str(file), **secret).stdout
        assert "is here already" in twice
        assert seen_files(away) == pictures
        assert away.stop() == 0, away.log
        for path in (away.store_dir / "media").iterdir():
            assert pictures[0][:64] not in path.read_bytes()


def test_a_chat_is_imported_without_what_its_file_lost(
    make_daemon: MakeDaemon, flags: tuple[str, ...], tmp_path: Path
) -> None:
    """A damaged picture, one that is not to be kept, and one that left the store: each is told."""
    file, whole = tmp_path / "seen.tower", tmp_path / "whole.tower"
    pictures = [base64.b64decode(picture(n)) for n in (1, 2)]
    with make_daemon(*flags) as home:
        body = {"messages": [look_at(1, 2)], "temperature": 0, "max_tokens": N_PREDICT}
        home.post("/v1/chat/completions", body, headers={"X-Towerd-Session": "seen"})
        run_towerctl(home, "export", "seen", "-o", str(whole)).check_returncode()
        text = home.get("/towerd/v1/sessions/seen?text=1")["text"]
        run_towerctl(home, "export", "seen", "--no-media", "-o", str(file)).check_returncode()
        assert file.stat().st_size < whole.stat().st_size - sum(map(len, pictures))
        for path in (home.store_dir / "media").iterdir():
            if path.read_bytes() == pictures[1]:
                path.write_bytes(bytes(len(pictures[1])))
        said = run_towerctl(home, "export", "seen", "--force", "-o", str(file)).stdout
        assert "Left out 1 picture or sound: damaged here" in said
    file.write_bytes(whole.read_bytes()[:-1] + b"\0")
    for name, more, told, kept in (
        ("damaged", (), "Left out 1 picture or sound, damaged in the file", [pictures[0], None]),
        ("off", ("--no-keep-media",), "1 picture or sound: the store has no room", [None, None]),
    ):
        with make_daemon(*flags, *more, name=name) as daemon:
            done = run_towerctl(daemon, "import", str(file))
            assert told in done.stdout, done.stderr
            assert seen_files(daemon) == kept
            assert daemon.get("/towerd/v1/sessions/seen?text=1")["text"] == text
            n_files = len(list((daemon.store_dir / "media").glob("*")))
            assert n_files == sum(each is not None for each in kept)
            if name == "damaged":
                run_towerctl(daemon, "import", str(whole)).check_returncode()
                assert seen_files(daemon) == pictures


def test_a_pulled_chat_continues_from_its_rows(
    make_daemon: MakeDaemon, flags: tuple[str, ...], tmp_path: Path
) -> None:
    """The shared tier has no pictures: a file brings them, also where the chat is already."""
    place, file = Place(f"file://{tmp_path}/bucket"), tmp_path / "seen.tower"
    home = make_daemon(*flags, *place.flags(), name="home")
    away = make_daemon(*flags, *place.flags(home.store_dir / "shared.key"), name="away")
    with home, away:
        body = {"messages": [look_at(1)], "temperature": 0, "max_tokens": N_PREDICT}
        home.post("/v1/chat/completions", body, headers={"X-Towerd-Session": "seen"})
        wait_until_written(home)
        shared(home, "push", "seen")
        assert shared(away, "pull", "seen")["rows"] > TOKENS_AN_IMAGE
        assert seen_files(away) == [None]
        run_towerctl(home, "export", "seen", "-o", str(file)).check_returncode()
        asked = {"message": {"role": "user", "content": "And?"}, "max_tokens": 4}
        away.post("/towerd/v1/sessions/seen/chat", asked)
        assert counts(away) == (0, 0)
        assert "Kept 1 picture or sound." in run_towerctl(away, "import", str(file)).stdout
        assert seen_files(away) == [base64.b64decode(picture(1))]


def test_a_file_that_is_too_large_says_what_to_do(make_daemon: MakeDaemon, tmp_path: Path) -> None:
    """The refusal comes before all of it is sent."""
    file = tmp_path / "seen.tower"
    with make_daemon("--request-bytes-max", "4096") as daemon:
        body = {"prompt": "Once", "n_predict": 4}
        daemon.post("/completion", body, headers={"X-Towerd-Session": "seen"})
        run_towerctl(daemon, "export", "seen", "-o", str(file)).check_returncode()
        file.write_bytes(file.read_bytes() + bytes(4 << 20))
        done = run_towerctl(daemon, "import", str(file))
        assert "4096 bytes: import it with --no-media, or raise --request-bytes-max." in done.stderr
        done = run_towerctl(daemon, "import", "--no-media", str(file))
        assert done.stdout == "Session seen is here already; nothing was changed.\n"


def test_what_is_kept_is_the_clients_to_say(
    make_daemon: MakeDaemon, flags: tuple[str, ...]
) -> None:
    """Also of a prompt that is no chat; nothing with `store` false, nor with --no-keep-media."""

    def kept(daemon: Daemon, path: str, name: str, body: dict[str, Any]) -> list[bool]:
        named = {"X-Towerd-Session": name}
        asked = {"temperature": 0, "max_tokens": 4, "n_predict": 4, **body}
        requests.post(daemon.url + path, json=asked, headers=named, timeout=60).raise_for_status()
        return [
            each is not None for each in daemon.get(f"/towerd/v1/sessions/{name}/chat")["media"]
        ]

    chat: dict[str, Any] = {"messages": [look_at(1)]}
    with make_daemon(*flags) as daemon:
        marker = daemon.get("/props")["media_marker"]
        prompt = {"prompt_string": f"See {marker} it", "multimodal_data": [picture(2)]}
        assert kept(daemon, "/completion", "prompt", {"prompt": prompt}) == [True]
        url = "/v1/chat/completions"
        assert kept(daemon, url, "chat", chat) == [True]
        assert kept(daemon, url, "unstored", {**chat, "store": False}) == [False]
    with make_daemon(*flags, "--no-keep-media") as daemon:
        assert kept(daemon, url, "off", chat) == [False]
