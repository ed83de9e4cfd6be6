"""Every flag of llama-server is taken, or refused in one sentence."""

from __future__ import annotations

import re
import subprocess
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

from towerd.cli.main import towerd
from towerd.cli.options import sort_words
from towerd.cli.serve import serve
from towerd.engine.llama_server.process.binary import find_binary, library_env
from towerd.errors import ConfigError
from towerd.models.bundled import bundled_model
from towerd.settings.config import Config, own_flags
from towerd.settings.llama_flag_table import LlamaFlag, by_name
from towerd.settings.llama_flags import check_flags, ui_settings, without_effect
from towerd.wire import LoadFlags

_NAMES = re.compile(r"--?[A-Za-z][\w.-]*(?:,\s+--?[A-Za-z][\w.-]*)*")
_VALUES = {
    "{none,linear,yarn}": "yarn",
    "{none,layer,row,tensor}": "layer",
    "{none,mean,cls,last,rank}": "mean",
    "[on|off|auto]": "auto",
    "[on|off]": "on",
    "KEY=TYPE:VALUE,...": "a=int:1",
    "<tensor name pattern>=<buffer type>,...": "blk=CPU",
    "<dev1,dev2,..>": "none",
    "lo-hi": "0-1",
    "START END": "1 2",
    "TYPE": "f16",
    "MODE": "auto",
    "HOST": "127.0.0.1",
    "FNAME:SCALE,...": "x:0.5",
    "PATH": "/nowhere/x",
}
_SPECIAL = {"--numa": "distribute", "--api-key-file": "KEYS", "--log-file": "LOG"}


def options() -> Iterator[tuple[list[str], str]]:
    """The spellings of every option of the llama-server that is installed, and what it calls the value."""
    binary = find_binary()
    text = subprocess.run(
        [binary, "--help"], capture_output=True, text=True, env=library_env(binary), check=True
    ).stdout
    for line in text.splitlines():
        found = _NAMES.match(line)
        if found is not None and not line.startswith("---"):
            rest = line[found.end() :]
            hint = re.match(r" (\S+(?: \S+)*?)(?:\s{2,}|$)", rest)
            yield re.split(r",\s+", found[0]), hint[1] if hint else ""


@pytest.fixture(autouse=True)
def no_user_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep the developer's own towerd.toml out of these tests."""
    monkeypatch.setattr("towerd.system.paths.config_file", lambda: tmp_path / "absent.toml")


def value_of(name: str, hint: str, tmp_path: Path) -> list[str]:
    """A value that the flag may have."""
    keys = tmp_path / "keys"
    keys.write_text("secret\n")
    value = _SPECIAL.get(name, _VALUES.get(hint, "1"))
    return value.replace("KEYS", str(keys)).replace("LOG", str(tmp_path / "log")).split()


@pytest.mark.slow
def test_every_flag_of_llama_server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Under every spelling; llama.cpp knows each that is left to it."""
    seen: list[Config] = []
    monkeypatch.setattr("towerd.cli.serve.run_daemon", seen.append)
    monkeypatch.setattr("towerd.cli.serve.run_router", lambda tables: seen.append(tables.config))
    monkeypatch.setattr("towerd.cli.serve.located", lambda config: config)  # it may fetch
    n_taken = n_refused = 0
    for names, hint in options():
        spellings = "|".join(map(re.escape, names))
        for name in names:
            values = value_of(names[-1], hint, tmp_path) if hint else []
            done = CliRunner().invoke(towerd, ["serve", name, *values])
            if done.exit_code == 0:
                n_taken += 1
                continue
            n_refused += 1
            assert done.exit_code == 1, (name, done.output)
            assert re.fullmatch(rf"Error: ({spellings}) [^\n]+\.\n", done.output), done.output
            assert "There is no flag" not in done.output
    assert n_taken > 300
    assert n_refused < 70
    for config in seen:
        assert not re.search("does not know", refusal_of(list(config.llama_server_args)))


def refusal_of(words: list[str]) -> str:
    """What llama.cpp says about values of flags; empty if it takes them."""
    try:
        LoadFlags(words)
    except RuntimeError as error:
        return str(error)
    return ""


def sorted_words(*words: str) -> tuple[list[str], list[str]]:
    """The words for towerd and for llama.cpp, as `towerd serve` sorts them."""
    options = (each for each in serve.params if isinstance(each, click.Option))
    own = {name: each for each in options for name in (*each.opts, *each.secondary_opts)}
    return sort_words(list(words), own)


def test_names_are_compared_whole() -> None:
    """No name is read as a letter and its value, and values may look like flags."""
    assert sorted_words("-md", "d.gguf", "-m", "-x") == (["-m", "-x"], ["-md", "d.gguf"])
    assert sorted_words("--seed", "-1", "--top_k=4", "--cache_type_k", "q8_0") == (
        ["--cache-type-k", "q8_0"],
        ["--seed", "-1", "--top-k=4"],
    )
    assert sorted_words("--jinja", "--", "-m", "y") == (["--", "-m", "y"], ["--jinja"])
    for word, hint in [
        ("-mx", "There is no flag -mx: towerd serve --help-all"),
        ("--tpo-k", "There is no flag --tpo-k: did you mean --top-k?"),
        ("x.gguf", "'x.gguf' is not a flag; a model is named with -m."),
        ("-m", "-m takes a value."),
        ("--temp", "--temp takes a value."),
    ]:
        with pytest.raises(ConfigError, match=re.escape(hint)):
            sorted_words(word)


@pytest.mark.parametrize(
    ("words", "same"),
    [
        (["--context-shift"], ["--retention", "shift"]),
        (["--load-mode", "mmap+mlock"], ["--mmap", "--mlock"]),
        (["-lv", "2"], ["--log-level", "warning"]),
        (["-lv", "9"], ["--log-level", "debug"]),
        (["--kv-unified-per-slot", "2048"], ["--ctx-size", "2048"]),
    ],
)
def test_flags_that_are_settings(words: list[str], same: list[str]) -> None:
    """They become towerd's own, and after -- they are refused, not lost."""
    assert sorted_words(*words) == (same, [])
    with pytest.raises(ConfigError, match=re.escape(f"is {' '.join(same)} in towerd")):
        check_flags(words, {})


def test_verbose_is_for_both() -> None:
    assert sorted_words("-v") == (["--log-level", "debug"], ["-v"])


def test_other_spellings_of_values(monkeypatch: pytest.MonkeyPatch) -> None:
    """llama-server's words for values are taken as well as towerd's."""
    seen: list[Config] = []
    monkeypatch.setattr("towerd.cli.serve.run_daemon", seen.append)
    words = [
        "-m",
        str(bundled_model()),
        "--n-gpu-layers",
        "all",
        "-fa",
        "1",
        "-np",
        "-1",
        "-t",
        "-1",
        "--predict",
        "5",
    ]
    done = CliRunner().invoke(towerd, ["serve", *words])
    assert done.exit_code == 0, done.output
    config = seen[0]
    assert (config.gpu_layers, config.flash_attn, config.parallel) == (-1, "on", 8)
    assert config.threads >= 1
    assert config.n_predict == 5


def test_what_has_no_effect_says_why() -> None:
    assert without_effect(["--prio", "2", "--temp", "0"]) == [
        ("--prio", "the operating system ranks threads: start towerd with nice")
    ]


def test_settings_of_the_chat_page(tmp_path: Path) -> None:
    """The last one counts, as in llama-server."""
    file = tmp_path / "page.json"
    file.write_text('{"theme": "dark"}')
    given = ["--webui-config", '{"theme": "light"}', "--temp", "0"]
    assert ui_settings(given) == {"theme": "light"}
    assert ui_settings([*given, "--ui-config-file", str(file)]) == {"theme": "dark"}
    assert ui_settings(["--temp", "0"]) == {}
    for words, said in (
        (["--ui-config", "dark"], "--ui-config takes JSON: "),
        (["--ui-config", "[1]"], "--ui-config takes a JSON object"),
        (["--ui-config-file", str(tmp_path / "none")], "cannot be read: No such file"),
    ):
        with pytest.raises(ConfigError, match=said):
            ui_settings(words)


NUMBERS_AND_MORE = {
    "--spec-draft-ngl",
    "--spec-synth-rates",
    "--tensor-split",
    "--logit-bias",
    "--override-kv",
}
"""Flags whose values hold numbers beside words or signs."""


def test_numbers_are_numbers() -> None:
    """Every value that llama.cpp's own parser reads as a number is refused before a model is loaded."""
    for flag in (each for each in flags() if each.n_values == 1 and each.use in ("wire", "load")):
        if flag.names[0] in NUMBERS_AND_MORE:
            continue
        words = [flag.names[0], "hot"]
        is_number = "does not take this value" in refusal_of(words)
        assert is_number == bool(flag.takes), (flag.names, refusal_of(words))
        if is_number:
            with pytest.raises(ConfigError, match=f"{words[0]} takes a (whole )?number, not 'hot'"):
                check_flags(words, {})
            check_flags([flag.names[0], "1"], {})
    with pytest.raises(ConfigError, match="--temp takes a number, not '0,5'"):
        check_flags(["--temp", "0,5"], {})


LEFT_TO_LLAMA_CPP = """
--verbose --ignore-eos --escape --no-escape --special --spm-infill --jinja --no-jinja
--prefill-assistant --no-prefill-assistant --skip-chat-parsing --no-skip-chat-parsing
--reasoning-preserve --no-reasoning-preserve --cache-prompt --no-cache-prompt
--spec-default --spec-draft-backend-sampling --no-spec-draft-backend-sampling
--spec-draft-cpu-moe --samplers --sampler-seq --dry-sequence-breaker --logit-bias
--grammar --grammar-file --json-schema --json-schema-file --reverse-prompt
--reasoning-format --reasoning --reasoning-effort --reasoning-budget-message
--chat-template-kwargs --media-path --video-ffmpeg-dir --spec-type --spec-draft-model
--spec-draft-type-k --spec-draft-type-v --spec-draft-override-tensor --spec-draft-device
--spec-draft-ngl --lookup-cache-static --lookup-cache-dynamic --temp --top-p --min-p
--top-nsigma --xtc-probability --xtc-threshold --typical --repeat-penalty
--presence-penalty --frequency-penalty --dry-multiplier --dry-base --adaptive-target
--adaptive-decay --dynatemp-range --dynatemp-exp --mirostat-lr --mirostat-ent --video-fps
--spec-draft-p-split --spec-draft-p-min --seed --top-k --repeat-last-n
--dry-allowed-length --dry-penalty-last-n --mirostat --keep --reasoning-budget
--video-timestamp-interval --sse-ping-interval --embd-normalize --spec-draft-n-max
--spec-draft-n-min --spec-draft-threads --spec-draft-threads-batch --spec-draft-n-cpu-moe
--draft --draft-min --spec-ngram-size-n --spec-ngram-size-m --spec-ngram-min-hits
--spec-ngram-mod-n-min --spec-ngram-mod-n-max --spec-ngram-mod-n-match
--spec-ngram-simple-size-n --spec-ngram-simple-size-m --spec-ngram-simple-min-hits
--spec-ngram-map-k-size-n --spec-ngram-map-k-size-m --spec-ngram-map-k-min-hits
--spec-ngram-map-k4v-size-n --spec-ngram-map-k4v-size-m --spec-ngram-map-k4v-min-hits
--spec-synth-len --spec-synth-rates
"""


def flags() -> list[LlamaFlag]:
    """Each flag once that is none of towerd's own."""
    found = {id(flag): flag for name, flag in by_name().items() if name not in own_flags()}
    return list(found.values())


def test_what_is_left_to_llama_cpp() -> None:
    """A flag that a newer llama.cpp has is left to it, too: whoever adds it here decided that."""
    left = {flag.names for flag in flags() if flag.use == "wire"}
    known = LEFT_TO_LLAMA_CPP.split()
    assert [names for names in left if not set(names) & set(known)] == []
    assert len(left) == len(known)


def test_every_row_is_a_flag_of_llama_cpp() -> None:
    """Under the spelling in the table."""
    by_use = Counter(flag.use for flag in flags())
    assert by_use["ignored"] + by_use["refused"] == 85
    assert by_use["load"] == 26
