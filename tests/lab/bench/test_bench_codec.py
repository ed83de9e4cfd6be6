"""`towerctl lab bench codec` on made-up records: all figures are there, and bad data is one sentence."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import zstandard
from click.testing import CliRunner

from towerd.cli.main import towerctl
from towerd.codec.forms import mini
from towerd.codec.prior.file import PATH

pytest.importorskip("brotli")
pytest.importorskip("pyppmd")
WORDS = "the cache keeps a session of you and me in memory until it is asked for again".split()


def write(path: Path, n_records: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    lines = []
    for i in range(n_records):
        source = ("gpteacher", "self-dialogue", "python")[i % 3]
        said = [" ".join(rng.choice(WORDS, 60)) for _ in range(2)]
        messages = [
            {"role": r, "content": t} for r, t in zip(("user", "assistant"), said, strict=True)
        ]
        lines.append(json.dumps({"src": f"{source}/{i}", "messages": messages}) + "\n")
    path.write_bytes(zstandard.ZstdCompressor().compress("".join(lines).encode()))


@pytest.mark.timeout(300)
def test_bench_codec(tmp_path: Path) -> None:
    write(tmp_path / "dev.jsonl.zst", 260, 0)
    write(tmp_path / "train.jsonl.zst", 400, 1)
    data = str(tmp_path / "dev.jsonl.zst")
    args = ["lab", "bench", "codec", "--quick", "--data", data, "--p-min", "0.001"]
    result = CliRunner().invoke(towerctl, args)
    assert result.exit_code == 0, result.output
    figures = json.loads(result.output.splitlines()[-1])
    for kind in ("human", "assistant", "code", "mixed"):
        assert figures[f"{kind}_sessions"] >= 1
        assert 0 < figures[f"{kind}_mix_bits_per_byte"] < figures[f"{kind}_zstd_bits_per_byte"]
    keys = ("assistant_bits_per_token", "human_bits_per_token", "vs_zstd_dict", "vs_best_classical")
    assert all(figures[key] > 0 for key in (*keys, "encode_tok_s", "decode_tok_s"))
    assert 0 < figures["p_min_0.001_lost"] < 0.1
    assert figures["p_min_0.001_bits_per_byte"] > 0  # on some texts more than without a loss
    assert figures["network_256_chunks"] > figures["network_8192_chunks"] == 1
    assert figures["network_256_bits_per_byte"] > figures["network_8192_bits_per_byte"]


def test_bad_data_is_one_sentence(tmp_path: Path) -> None:
    write(tmp_path / "dev.jsonl.zst", 3, 0)
    (tmp_path / "other.txt").write_text("no")
    for name, message in (("dev.jsonl.zst", "less than 16384 bytes"), ("other.txt", "is needed")):
        result = CliRunner().invoke(
            towerctl, ["lab", "bench", "codec", "--data", str(tmp_path / name)]
        )
        assert result.exit_code == 1
        assert message in result.output


@pytest.mark.timeout(300)
def test_bench_unseen(tmp_path: Path) -> None:
    """With a source that no table has, and refusals where a figure would flatter."""
    write(tmp_path / "train.jsonl.zst", 400, 1)
    records = zstandard.ZstdDecompressor().decompress((tmp_path / "train.jsonl.zst").read_bytes())
    own = tmp_path / "own.jsonl.zst"
    own.write_bytes(zstandard.ZstdCompressor().compress(records.replace(b"gpteacher/", b"own/")))
    args = ["lab", "bench", "unseen", "--quick", "--data", str(own)]
    args += ["--train", str(tmp_path / "train.jsonl.zst"), "--source"]
    result = CliRunner().invoke(towerctl, [*args, "own"])
    assert result.exit_code == 0, result.output
    figures = json.loads(result.output.splitlines()[-1])
    mix, network = (figures[f"own_{form}_bits_per_byte"] for form in ("mix", "network"))
    assert figures["own_ppmd_primed_bits_per_byte"] / mix == pytest.approx(
        figures["own_mix_vs_ppmd_primed"], rel=0.01
    )
    assert 0 < network < 8
    left_out = [str(tmp_path / "train.jsonl.zst") if each == str(own) else each for each in args]
    given = ["--table", str(PATH), "--mini", str(mini.PATH)]
    result = CliRunner().invoke(towerctl, [*left_out, "gpteacher", *given])
    assert result.exit_code == 0, result.output
    measured = json.loads(result.output.splitlines()[-1])
    assert measured["gpteacher_mix_bits_per_byte"] == mix
    assert measured["gpteacher_network_bits_per_byte"] == network
    for source, options, message in (
        ("python", [], "trained on python"),
        ("own", ["--table", str(PATH)], "No table has own"),
        ("own", ["--mini", str(mini.PATH)], "wants a --table"),
        ("other", [], "less than 16384 bytes"),
    ):
        result = CliRunner().invoke(towerctl, [*args, source, *options])
        assert result.exit_code == 1
        assert message in result.output
