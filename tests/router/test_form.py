"""The field of a form that names the model, against forms as a client writes them and hostile ones."""

from __future__ import annotations

import time

import pytest
import requests

from towerd.errors import InvalidRequest
from towerd.router.http.form import PARTS_MAX, boundary_of, field_of


def asked(body: bytes, content_type: str) -> str | None:
    return field_of(body, boundary_of(content_type), "model")


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


def test_hostile_forms_take_no_time() -> None:
    head = b"\r\ncontent-disposition: form-data; name=model;"
    began = time.process_time()
    assert asked(b"--b" + head * 100_000, "multipart/form-data; boundary=b") is None
    with pytest.raises(InvalidRequest, match=f"at most {PARTS_MAX} parts"):
        asked((b"--b" + head + b"\r\n") * 100_000, "multipart/form-data; boundary=b")
    assert time.process_time() - began < 1.0
    with pytest.raises(InvalidRequest, match="no boundary"):
        boundary_of("multipart/form-data")
