"""Which files of a repository are taken: llama-server's rules (common/download.cpp)."""

from __future__ import annotations

import pytest

from towerd.errors import ModelError
from towerd.models.hub.choice import RepoName, choose

UNSLOTH = (
    "BF16/big-BF16-00001-of-00002.gguf",
    "BF16/big-BF16-00002-of-00002.gguf",
    "README.md",
    "big-IQ4_NL.gguf",
    "big-Q4_K_M.gguf",
    "big-Q8_0.gguf",
    "big-UD-Q2_K_XL.gguf",
    "big.imatrix.gguf",
    "mmproj-BF16.gguf",
    "mmproj-F32.gguf",
)


@pytest.mark.parametrize(
    ("wanted", "file", "model"),
    [
        ("o/r", "", "big-Q4_K_M.gguf"),
        ("o/r:q8_0", "", "big-Q8_0.gguf"),
        ("o/r:BF16", "", "BF16/big-BF16-00001-of-00002.gguf"),
        ("o/r:UD-Q2_K_XL", "", "big-UD-Q2_K_XL.gguf"),
        ("o/r:Q8_0", "big-IQ4_NL.gguf", "big-IQ4_NL.gguf"),
    ],
)
def test_the_model(wanted: str, file: str, model: str) -> None:
    choice = choose(RepoName.parse(wanted), UNSLOTH, file=file)
    assert choice.files[0] == model
    assert choice.projector == "mmproj-BF16.gguf", "nearer to any of them than 32 bits"


@pytest.mark.parametrize(
    ("files", "model"),
    [
        (("m-Q8_0.gguf", "m-Q4_K_M.gguf"), "m-Q4_K_M.gguf"),
        (("m-F16.gguf", "m-Q8_0.gguf"), "m-Q8_0.gguf"),
        (("mmproj-m.gguf", "mtp-m.gguf", "m-Q6_K.gguf", "m-F16.gguf"), "m-Q6_K.gguf"),
        (("m.gguf",), "m.gguf"),
    ],
)
def test_without_a_quantization(files: tuple[str, ...], model: str) -> None:
    assert choose(RepoName("o/r", ""), files).files[0] == model


def test_all_parts_are_taken_and_a_missing_one_is_said() -> None:
    wanted = RepoName("o/r", "BF16")
    assert choose(wanted, UNSLOTH, with_projector=False).files == list(UNSLOTH[:2])
    with pytest.raises(ModelError, match="lacks BF16/big-BF16-00002-of-00002.gguf"):
        choose(wanted, [UNSLOTH[0]])


def test_the_projector_of_the_nearest_folder_and_size() -> None:
    files = ["a/m-Q8_0.gguf", "b/mmproj-F16.gguf", "mmproj-F32.gguf", "mmproj-Q8_0.gguf"]
    assert choose(RepoName("o/r", ""), files).projector == "mmproj-Q8_0.gguf"
    files.append("a/mmproj-F32.gguf")
    assert choose(RepoName("o/r", ""), files).projector == "a/mmproj-F32.gguf"
    assert choose(RepoName("o/r", ""), files, with_projector=False).projector is None


def test_what_is_not_there_is_said_with_what_is() -> None:
    with pytest.raises(ModelError, match=r"o/r has no Q5_K_M; it has BF16, IQ4_NL, Q4_K_M, Q8_0"):
        choose(RepoName("o/r", "Q5_K_M"), UNSLOTH)
    with pytest.raises(ModelError, match=r"has no file other.gguf; it has BF16/big"):
        choose(RepoName("o/r", ""), UNSLOTH, file="other.gguf")
    with pytest.raises(ModelError, match="has no GGUF of a model"):
        choose(RepoName("o/r", ""), ["model.safetensors", "mmproj-F16.gguf"])


@pytest.mark.parametrize(
    "text",
    ["", "model", "a/b/c", "../x/y", "a/b:c/d", "a b/c", "https://x/y", "a--b/c", "a/" + "b" * 95],
)
def test_names_that_are_no_repository(text: str) -> None:
    with pytest.raises(ModelError, match="give OWNER/REPO or OWNER/REPO:QUANT"):
        RepoName.parse(text)
