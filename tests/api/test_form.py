"""Forms as clients write them, and hostile ones."""

from __future__ import annotations

import time

import pytest
import requests

from towerd.api.http.form import FIELD_BYTES_MAX, PARTS_MAX, HttpForm, boundary_of, read_form
from towerd.errors import InvalidRequest


def asked(body: bytes, content_type: str) -> str | None:
    return read_form(body, boundary_of(content_type)).text("model")


def test_a_form_as_clients_write_it() -> None:
    """Neither a file of the same name nor text that looks like a part is taken for it."""
    fake = b'\r\nContent-Disposition: form-data; name="model"\r\n\r\nfake\r\n--'
    prepared = requests.Request(
        "POST",
        "http://x/",
        data={"prompt": fake, "models": "no", "model": "t\u00e4les"},
        files={"file": ("model", fake, "audio/wav")},
    ).prepare()
    assert isinstance(prepared.body, bytes)
    assert asked(prepared.body, str(prepared.headers["Content-Type"])) == "t\u00e4les"


def test_a_file_name_that_looks_like_a_name() -> None:
    part = b'--b\r\nContent-Disposition: form-data; filename="a; name=model"; name="file"\r\n\r\nx\r\n--b--'
    assert list(read_form(part, b"b").files) == ["file"]


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"--b--\r\n",
        b'--b\r\nContent-Disposition: form-data; name="model"\r\n\r\ncut off',
        b'--b\r\nContent-Disposition: form-data; filename="model"\r\n\r\nx\r\n--b--',
        b'--b\r\nContent-Disposition: form-data; name="model"\r\n--b\r\n\r\nx\r\n--b--',
    ],
)
def test_no_model(body: bytes) -> None:
    assert asked(body, "multipart/form-data; boundary=b") is None


def test_fields_and_files() -> None:
    """As another library writes them; of a name that occurs again, all."""
    sound = bytes(range(256)) * 4096
    prepared = requests.Request(
        "POST",
        "http://x/",
        data=[("language", "de"), ("tag", "a"), ("tag", "b"), ("empty", "")],
        files={"file": ("a.wav", sound, "audio/wav")},
    ).prepare()
    body = prepared.body
    assert isinstance(body, bytes)
    form = read_form(body, boundary_of(str(prepared.headers["Content-Type"])))
    assert form.fields == {"language": "de", "tag": ["a", "b"], "empty": ""}
    begin, end = form.files["file"]
    assert body[begin:end] == sound
    assert read_form(b"", b"x") == HttpForm()


def test_boundaries() -> None:
    for text, wanted in (
        ("multipart/form-data; boundary=b", b"b"),
        ('multipart/form-data; charset=utf-8; Boundary="a b"', b"a b"),
    ):
        assert boundary_of(text) == wanted
    for text in (
        "multipart/form-data",
        "multipart/form-data; boundary=",
        f"m; boundary={'x' * 71}",
    ):
        with pytest.raises(InvalidRequest, match="boundary"):
            boundary_of(text)


def test_hostile_forms_take_no_time() -> None:
    head = b"\r\ncontent-disposition: form-data; name=model;"
    began = time.process_time()
    assert asked(b"--b" + head * 100_000, "multipart/form-data; boundary=b") is None
    with pytest.raises(InvalidRequest, match=f"at most {PARTS_MAX} parts"):
        asked((b"--b" + head + b"\r\n") * 100_000, "multipart/form-data; boundary=b")
    for body in (
        b"--b\r\n" + b"\r\n--" * (8 << 20),
        b"--b" + head + b"\r\n\r\n" + b"\r\n--bb"[:-2] * (8 << 20),
        b"--b" + b";name=" * (4 << 20) + b"\r\n\r\n\r\n--b",
        b"\r\n" * (8 << 20),
    ):
        read_form(body, b"b" * 60)
    assert boundary_of("multipart/form-data;" + '"' * 8000 + "; boundary=b") == b"b"
    assert time.process_time() - began < 5.0
    with pytest.raises(InvalidRequest, match="at most"):
        asked(
            b"--b" + head + b"\r\n\r\n" + b"x" * (FIELD_BYTES_MAX + 1) + b"\r\n--b", "m; boundary=b"
        )
    with pytest.raises(InvalidRequest, match="no boundary"):
        boundary_of("multipart/form-data")
