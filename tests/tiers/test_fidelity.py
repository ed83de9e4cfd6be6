"""Level tables: their text, their JSON, and what is refused."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from towerd.errors import ConfigError
from towerd.kernels.formats import STORED_FORMATS
from towerd.slots.layout import NATIVE
from towerd.tiers.formats.fidelity import DYNAMIC, LEVEL_MAX, LevelFormats

NAMES = [NATIVE, *(row.name for row in STORED_FORMATS)]


def test_levels_and_what_is_deeper() -> None:
    """Deeper levels, and what no base covers, take the last entry."""
    table = LevelFormats.parse("0=q4h, 1=q6h ,2=q8")
    assert table.names == ("q4h", "q6h", "q8")
    found = [table.format_for(level) for level in (0, 1, 2, 3, 64, DYNAMIC)]
    assert found == ["q4h", "q6h", "q8", "q8", "q8", "q8"]
    assert LevelFormats.parse("1=native,0=q4") == LevelFormats(("q4", "native"))
    assert not table.is_native
    assert LevelFormats((NATIVE, NATIVE)).is_native


@given(st.lists(st.sampled_from(NAMES), min_size=1, max_size=LEVEL_MAX + 1))
def test_text_round_trip(names: list[str]) -> None:
    """What is written is read."""
    table = LevelFormats(tuple(names))
    assert LevelFormats.parse(str(table)) == table


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "must be like 0=q4h"),
        ("q4h", "'q4h' is not"),
        ("0:q4h", "'0:q4h' is not"),
        ("0=q4h,", "'' is not"),
        ("-1=q4h", "'-1=q4h' is not"),
        ("x=q4h", "'x=q4h' is not"),
        ("²=q4h", "is not"),
        ("0=q9", "'q9' is not a stored format; use native or one of q8, q8h"),
        ("0=", "'' is not a stored format"),
        ("0=f16", "'f16' is not a stored format"),
        ("0=q8_0", "'q8_0' is not a stored format"),
        ("0=q4,0=q5", "level 0 twice"),
        ("0=q4,00=q5", "level 0 twice"),
        ("1=q4", "skips level 0"),
        ("0=q4,2=q6", "skips level 1"),
        ("0=q4,99=q6", "level 99 is beyond 64"),
    ],
)
def test_bad_tables_say_what_is_wrong(text: str, message: str) -> None:
    """Each message names the setting and the offending part."""
    with pytest.raises(ConfigError, match=message) as caught:
        LevelFormats.parse(text, "--level-formats")
    assert caught.value.message.startswith("--level-formats")


@pytest.mark.parametrize("names", [(), ("f32",), ("q4",) * (LEVEL_MAX + 2)])
def test_bad_values_are_refused(names: tuple[str, ...]) -> None:
    """By construction too."""
    with pytest.raises(ConfigError):
        LevelFormats(names)
