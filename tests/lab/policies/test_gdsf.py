"""What GDSF prefers."""

from __future__ import annotations

from planted import planted

from lab.policies.gdsf import GDSF


def always(key: int) -> bool:
    return True


def test_gdsf_small_and_often_used_stay() -> None:
    """Uses per byte decide."""
    gdsf = planted(GDSF)
    gdsf.insert(1, 10, 1.0, None)
    gdsf.insert(2, 100, 2.0, None)
    gdsf.insert(3, 10, 3.0, None)
    gdsf.access(1, 4.0)
    assert gdsf.victims(120, always) == [2, 3, 1]


def test_gdsf_old_fame_fades() -> None:
    """What was given up raises the worth of what comes later."""
    gdsf = planted(GDSF)
    gdsf.insert(0, 10, 0.0, None)
    for now in range(1, 4):
        gdsf.access(0, float(now))
    for key in range(1, 8):
        gdsf.insert(key, 10, 3.0 + key, None)
        victim = gdsf.victims(1, always)[0]
        gdsf.remove(victim)
        if victim == 0:
            break
    assert 0 not in gdsf
