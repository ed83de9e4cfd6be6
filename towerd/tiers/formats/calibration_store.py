"""Calibrations in the catalog: one per fingerprint, as JSON."""

from __future__ import annotations

import logging

import msgspec

from towerd.store import Store
from towerd.tiers.formats.calibration import Calibration, formats_digest

log = logging.getLogger(__name__)


def load_calibration(store: Store, fingerprint: str) -> Calibration | None:
    """The calibration of a fingerprint (its digest in hex); None if there is none, or if it was
    made with other stored formats than this towerd has. Raises StoreError."""
    text = store.get_meta(_key(fingerprint))
    if text is None:
        return None
    try:
        found = Calibration.from_json(msgspec.json.decode(text))
    except (ValueError, msgspec.DecodeError) as error:
        log.warning("a stored calibration cannot be read", extra={"error": str(error)})
        return None
    return found if found.formats == formats_digest() else None


def save_calibration(store: Store, found: Calibration) -> None:
    """Store a calibration durably in place of an earlier one. Raises DiskFull or StoreError."""
    store.set_meta(_key(found.fingerprint), msgspec.json.encode(found.to_json()).decode())


def _key(fingerprint: str) -> str:
    return f"calibration:{fingerprint}"
