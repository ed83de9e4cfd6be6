"""Calibration tables that come with the package, for models that many use.

What rounding costs depends on weights, adapters, the layout of rows and their rotation; a table is found
by the digest of these, so that no other model ever takes it. A daemon's own calibration comes first.
"""

from __future__ import annotations

import hashlib
import json
import logging
from importlib.resources import files
from typing import Any

import msgspec

from towerd.slots.row_identity import RowIdentity
from towerd.store import Store
from towerd.tiers.formats.calibration import Calibration, formats_digest, load_calibration

log = logging.getLogger(__name__)

FOLDER = "calibrations"
_ROUNDED = ("model_hash", "lora", "layout", "rot_k", "rot_v", "format_version")
"""What the cost of rounding depends on. What else differs (RoPE, context) hardly changes it."""


def rounding_digest(row_identity: RowIdentity) -> str:
    """Equal for row identities whose rows are rounded alike, hex."""
    value = row_identity.to_json()
    text = json.dumps({name: value[name] for name in _ROUNDED}, sort_keys=True)
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def table_file(row_identity: RowIdentity, found: dict[str, Any]) -> tuple[str, str]:
    """The name and content of the file with which the package has a calibration, as JSON, of this row
    identity."""
    body = {"row_identity": row_identity.to_json(), "calibration": found}
    return f"{rounding_digest(row_identity)}.json", json.dumps(body, indent=1) + "\n"


def packaged_calibration(row_identity: RowIdentity) -> Calibration | None:
    """The package's calibration for rows like these; None if it has none, or one that was made with other
    stored formats than this towerd has."""
    file = files("towerd") / "data" / FOLDER / f"{rounding_digest(row_identity)}.json"
    if not file.is_file():
        return None
    try:
        body = msgspec.json.decode(file.read_bytes())
        found = Calibration.from_json(body["calibration"])
    except (ValueError, TypeError, KeyError) as error:
        log.error("a packaged calibration cannot be read", extra={"error": str(error)})
        return None
    return found if found.formats == formats_digest() else None


def nearest_calibration(store: Store) -> Calibration | None:
    """The calibration of the served row identity, or else that of the one opened last whose rows are
    rounded alike, or the package's. None if there is none. Raises StoreError."""
    served = store.state.row_identity
    with store.locked():
        known = [each.row_identity for each in store.state.catalog.row_identities()]
    digest = rounding_digest(served)
    for row_identity in sorted(known, key=lambda each: each != served):
        if rounding_digest(row_identity) == digest:
            found = load_calibration(store, row_identity.digest().hex())
            if found is not None:
                return found
    return packaged_calibration(served)
