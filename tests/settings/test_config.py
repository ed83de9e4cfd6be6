"""Settings: where they come from, which wins, and what a wrong one is told."""

from __future__ import annotations

from pathlib import Path

import psutil
import pytest

from towerd.errors import ConfigError
from towerd.settings.addresses import is_loopback
from towerd.settings.config import Config, defaults, settings
from towerd.settings.sources import load


@pytest.fixture(autouse=True)
def no_user_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep the developer's own towerd.toml out of these tests."""
    absent = tmp_path / "absent.toml"
    monkeypatch.setattr("towerd.system.paths.config_file", lambda: absent)


def write_toml(folder: Path, text: str) -> Path:
    path = folder / "towerd.toml"
    path.write_text(text)
    return path


def test_flags_beat_environment_beats_file_beats_defaults(tmp_path: Path) -> None:
    toml = write_toml(tmp_path, "port = 1001\nparallel = 2\nqueue_max = 3\n")
    env = {"TOWERD_PORT": "1002", "TOWERD_PARALLEL": "4"}
    found = load({"port": "1003", "host": None}, env, toml)
    assert (found.port, found.parallel, found.queue_max) == (1003, 4, 3)
    assert found.host == "127.0.0.1"


def test_names_of_the_last_release(tmp_path: Path) -> None:
    """Settings that were renamed are read under both names."""
    toml = write_toml(tmp_path, "boundary_tokens = 64\n")
    found = load({}, {"TOWERD_BOUNDARY_BYTES": "1MiB"}, toml)
    assert (found.checkpoint_tokens, found.checkpoint_bytes) == (64, 2**20)


def test_user_file_is_read_when_it_exists(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    toml = write_toml(tmp_path, "port = 1001\n")
    monkeypatch.setattr("towerd.system.paths.config_file", lambda: toml)
    assert load({}, {}).port == 1001


def test_environment_can_name_the_file(tmp_path: Path) -> None:
    toml = write_toml(tmp_path, "port = 1001\n")
    assert load({}, {"TOWERD_CONFIG": str(toml)}).port == 1001


def test_every_kind_is_read_from_text_and_from_toml(tmp_path: Path) -> None:
    toml = write_toml(
        tmp_path,
        'mlock = true\nmodel = "~/m.gguf"\nhot_bytes = "1.5GiB"\nrope_freq_base = 10000\n'
        "warm_bytes = 1000\n"
        'cors_origins = ["https://a.example", "https://b.example"]\n'
        'api_keys = ["alice:secret-a", "secret-b"]\n',
    )
    from_file = load({}, {}, toml)
    from_text = load(
        {},
        {
            "TOWERD_MLOCK": "yes",
            "TOWERD_MODEL": "~/m.gguf",
            "TOWERD_HOT_BYTES": "1536 MiB",
            "TOWERD_ROPE_FREQ_BASE": "1e4",
            "TOWERD_WARM_BYTES": "1000",  # else a share of the disk, which others fill meanwhile
            "TOWERD_CORS_ORIGINS": "https://a.example,https://b.example",
            "TOWERD_API_KEYS": "alice:secret-a,secret-b",
        },
    )
    assert from_file == from_text
    assert from_file.mlock
    assert from_file.model == Path.home() / "m.gguf"
    assert from_file.hot_bytes == 3 * 2**29
    assert from_file.rope_freq_base == 10000.0
    assert from_file.cors_origins == ("https://a.example", "https://b.example")
    assert from_file.api_keys == (("secret-a", "alice"), ("secret-b", "local"))


@pytest.mark.parametrize(
    ("text", "size"),
    [("0", 0), ("1024", 1024), ("8GiB", 2**33), ("500MB", 5 * 10**8), ("2 k", 2048), ("1T", 2**40)],
)
def test_sizes(text: str, size: int) -> None:
    assert load({"hot_bytes": text}, {}).hot_bytes == size


@pytest.mark.parametrize(
    ("env", "message"),
    [
        ({"TOWERD_PROT": "1"}, "Unknown setting TOWERD_PROT in the environment: did you mean"),
        ({"TOWERD_PORT": "http"}, "TOWERD_PORT must be a whole number, not 'http'."),
        ({"TOWERD_PORT": "65536"}, "TOWERD_PORT must be at most 65535, not 65536."),
        ({"TOWERD_PARALLEL": "0"}, "TOWERD_PARALLEL must be at least 1, not 0."),
        ({"TOWERD_MLOCK": "maybe"}, "TOWERD_MLOCK must be true or false, not 'maybe'."),
        ({"TOWERD_HOT_BYTES": "8 GiBs"}, "TOWERD_HOT_BYTES must be a size such as 8GiB"),
        ({"TOWERD_ROPE_FREQ_BASE": "nan"}, "TOWERD_ROPE_FREQ_BASE must be a finite number."),
        ({"TOWERD_FLASH_ATTN": "perhaps"}, "TOWERD_FLASH_ATTN must be one of auto, on, off"),
        ({"TOWERD_MODEL": ""}, "TOWERD_MODEL must be a path."),
        (
            {"TOWERD_MODEL": "~nosuchuser/m.gguf"},
            "TOWERD_MODEL is in a home folder that is not known: ~nosuchuser/m.gguf.",
        ),
        ({"TOWERD_CONFIG": "~nosuchuser/t.toml"}, "TOWERD_CONFIG is in a home folder that"),
        ({"TOWERD_FIDELITY": "high"}, "TOWERD_FIDELITY must be one of exact, near, small"),
        ({"TOWERD_SHRINK_AFTER_S": "-1"}, "TOWERD_SHRINK_AFTER_S must be at least 0, not -1."),
        ({"TOWERD_LEVEL_FORMATS": "0=q9"}, "level_formats: 'q9' is not a stored format"),
        ({"TOWERD_LEVEL_FORMATS": ""}, "level_formats must be like 0=q4h"),
        ({"TOWERD_LEVEL_FORMATS": "1=q4"}, "level_formats skips level 0"),
        (
            {"TOWERD_LEVEL_FORMATS": "0=q4", "TOWERD_FIDELITY": "exact"},
            "fidelity exact stores rows as computed: leave level_formats out.",
        ),
        ({"TOWERD_API_KEYS": "public:k"}, "names a tenant"),
        ({"TOWERD_API_KEYS": "a b:k"}, "names a tenant"),
        ({"TOWERD_API_KEYS": "a:"}, "a tenant without a key"),
        ({"TOWERD_API_KEYS": "a:k,b:k"}, "gives one key to two tenants"),
    ],
)
def test_wrong_values_name_the_place(env: dict[str, str], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load({}, env)
    assert message in caught.value.message
    assert caught.value.message.count("\n") == 0


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("prot = 1", "Unknown setting prot in {}: did you mean port?"),
        ("[server]\nport = 1", "Unknown setting server in {}"),
        ("port = true", "port in {} must be a whole number, not True."),
        ("port = '1", "{} is not valid TOML"),
        ("mmap = 1", "mmap in {} must be true or false, not 1."),
        ("api_keys = [1]", "api_keys in {} must be a list of keys."),
        ("cors_origins = 3", "cors_origins in {} must be a list of texts, not 3."),
    ],
)
def test_wrong_files_name_key_and_file(tmp_path: Path, text: str, message: str) -> None:
    toml = write_toml(tmp_path, text)
    with pytest.raises(ConfigError) as caught:
        load({}, {}, toml)
    assert message.format(toml) in caught.value.message


def test_a_file_that_was_asked_for_must_exist(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"The settings file .* does not exist"):
        load({}, {}, tmp_path / "none.toml")


def test_unknown_flags_are_errors() -> None:
    with pytest.raises(ConfigError, match="Unknown setting prot in the command line"):
        load({"prot": "1"}, {})


def test_our_other_variables_are_not_settings() -> None:
    load({}, {"TOWERD_KERNELS": "generic", "TOWERD_TEST_MODEL": "x", "PATH": "/bin"})


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.168.1.2", "example.org"])
def test_a_key_is_required_beyond_loopback(host: str) -> None:
    with pytest.raises(ConfigError, match="--api-key"):
        Config(host=host)
    assert Config(host=host, api_keys=(("k", "local"),)).host == host


@pytest.mark.parametrize("host", ["localhost", "127.0.0.1", "127.9.9.9", "::1", "[::1]"])
def test_loopback_needs_no_key(host: str) -> None:
    assert is_loopback(host)
    assert Config(host=host).api_keys == ()


def test_key_files_add_to_keys(tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text("alice:one\n\ntwo\n")
    found = load({"api_keys": ("three",), "api_key_file": str(keys)}, {})
    assert dict(found.api_keys) == {"one": "alice", "two": "local", "three": "local"}


@pytest.mark.parametrize("content", [None, b"\n\n", b"\xff\xfe"])
def test_unusable_key_files_are_errors(tmp_path: Path, content: bytes | None) -> None:
    keys = tmp_path / "keys"
    if content is not None:
        keys.write_bytes(content)
    with pytest.raises(ConfigError, match="key file"):
        load({"api_key_file": str(keys)}, {})


def test_a_path_is_no_host() -> None:
    with pytest.raises(ConfigError, match="--socket takes the path"):
        Config(host="/run/llama.sock")


def test_keys_are_not_shown() -> None:
    assert "hunter2" not in repr(Config(api_keys=(("hunter2", "local"),)))


def test_automatic_values_are_worked_out(tmp_path: Path) -> None:
    found = Config(store_dir=tmp_path / "not" / "there")
    assert found.hot_bytes == 32 * 2**20
    assert Config(warm_bytes=0).hot_bytes == psutil.virtual_memory().total // 8
    assert 0 < found.warm_bytes <= 32 * 2**30
    assert found.threads >= 1
    assert found.threads_batch == found.threads
    assert found.socket is not None
    assert Config(threads=3).threads_batch == 3
    assert Config(hot_bytes=0, warm_bytes=0).hot_bytes == 0


def test_rows_of_long_chats_do_not_fill_the_disk() -> None:
    """A disk with little left has little for them too, and none where nothing is written."""
    for warm_bytes, expected in ((2**40, 2**32), (2**30, 2**28), (0, 0)):
        assert Config(recall_bytes=2**30, warm_bytes=warm_bytes).recall_disk_bytes == expected


def test_contradictions_are_errors(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="needs flash attention"):
        Config(cache_type_v="q8_0", flash_attn="off")
    with pytest.raises(ConfigError, match="not both"):
        Config(chat_template="x", chat_template_file=tmp_path / "x")
    with pytest.raises(ConfigError, match="longer than 103 bytes"):
        Config(socket=tmp_path / ("s" * 120))
    with pytest.raises(ConfigError, match="needs a live sequence"):
        Config(live_sequences=4, parallel=8)


def test_construction_checks_ranges() -> None:
    with pytest.raises(ConfigError, match="port must be at most 65535"):
        Config(port=70000)


def test_chat_template_comes_from_text_or_file(tmp_path: Path) -> None:
    assert Config().chat_template_source() is None
    assert Config(chat_template="{{ x }}").chat_template_source() == "{{ x }}"
    file = tmp_path / "t.jinja"
    with pytest.raises(ConfigError, match="Cannot read the chat template"):
        Config(chat_template_file=file).chat_template_source()
    file.write_text("{{ y }}")
    assert Config(chat_template_file=file).chat_template_source() == "{{ y }}"


def test_every_setting_has_a_flag_of_its_own() -> None:
    flags = [flag for spec in settings().values() for flag in (*spec.flags, *spec.off_flags)]
    assert len(flags) == len(set(flags))
    assert set(defaults()) == set(settings())
