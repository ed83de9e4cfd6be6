"""/towerd/v1/calibration: the measured cost of stored formats for this model."""

from __future__ import annotations

from typing import Any, Protocol

from aiohttp import web

from towerd.api.admin.pins import require_admin
from towerd.api.http import fields
from towerd.api.http.body import read_object
from towerd.api.http.keys import service_of
from towerd.api.http.reply import json_reply
from towerd.errors import NotSupported


class Calibrating(Protocol):
    """`towerd.engine.embedded.calibration.calibrate.Calibrator` as the API sees it."""

    def view(self) -> dict[str, Any]:
        """State, progress and result."""
        ...

    def request(self, *, again: bool) -> None:
        """Calibrate now. Raises NotSupported."""
        ...


async def get_calibration(request: web.Request) -> web.Response:
    """The progress of the calibration, and its result."""
    return json_reply({"calibration": _calibrator(request).view()})


async def post_calibration(request: web.Request) -> web.Response:
    """Start calibration now; `again`: even if there is a result already."""
    require_admin(request)
    calibrator = _calibrator(request)
    body = await read_object(request)
    calibrator.request(again=fields.boolean(body, "again", False))
    return json_reply({"calibration": calibrator.view()})


def _calibrator(request: web.Request) -> Calibrating:
    """The calibrator. Raises NotSupported without one: only the embedded engine can measure."""
    found: Calibrating | None = getattr(service_of(request).engine, "calibrator", None)
    if found is None:
        raise NotSupported("Calibration needs the model in the daemon: use --engine embedded.")
    return found
