"""One line in the log for each request: what it was about, where its tokens came from, how fast it was.

Nothing of a request's text is logged but its title, and the words by which it differs from a stored
conversation; not even these where keys are set, since the log is the operator's and the text another tenant's, nor beside an
encrypted store.
"""

from __future__ import annotations

import asyncio
import logging
import re
from typing import TYPE_CHECKING, Any

import msgspec
from aiohttp import web

from towerd.api.http.hints import AGENT_HEADER
from towerd.api.http.keys import GATE, TENANTS
from towerd.engine.base import Reuse, Timings

if TYPE_CHECKING:
    from towerd.sessions.divergence import Divergence

log = logging.getLogger("towerd.request")

TITLE_CHARS_MAX = 40
ERROR_CHARS_MAX = 160
CLIENT_CHARS_MAX = 60
_INLINE_BYTES_MAX = 32 * 1024
_QUOTE = re.compile(r"(?<!\w)['\"`]")
"""The beginning of a quotation; an apostrophe inside a word is none."""
_QUOTED_CHARS_MAX = 48
_DUMPS = ("; last read", "; tools = ", "; messages = ")
"""What llama.cpp puts in front of parts of a request that it does not understand."""
_FIELDS = ("messages", "input", "prompt", "input_prefix")
_raw = msgspec.json.Decoder(dict[str, msgspec.Raw])
_raws = msgspec.json.Decoder(list[msgspec.Raw])
_text = msgspec.json.Decoder(str)
LOGGED = web.RequestKey("logged", bool)
"""Set once the log has a line for the request."""


def has_titles(request: web.Request) -> bool:
    """Whether the log may have words of a request."""
    gate = request.app.get(GATE)
    service = None if gate is None else gate.service
    is_secret = service is not None and service.store.vault is not None
    return not (request.app[TENANTS].required or is_secret)


async def title_for(request: web.Request, body: bytes) -> str:
    """The title of a request that generates; empty if it has no text, or titles are not logged."""
    if not has_titles(request) or not log.isEnabledFor(logging.INFO):
        return ""
    if len(body) <= _INLINE_BYTES_MAX:
        return title_of(body)
    return await asyncio.to_thread(title_of, body)


def title_of(body: bytes) -> str:
    """The beginning of the first thing that the user says in a request body, on one line; empty if there is
    none."""
    try:
        fields = _raw.decode(body)
        found = next((fields[name] for name in _FIELDS if name in fields), None)
        said = "" if found is None else _first_said(bytes(found))
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return ""
    shown = "".join(char if char.isprintable() else " " for char in said[: 8 * TITLE_CHARS_MAX])
    line = " ".join(shown.split())
    return line if len(line) <= TITLE_CHARS_MAX else line[: TITLE_CHARS_MAX - 1].rstrip() + "…"


def _first_said(value: bytes) -> str:
    """The text of a prompt or of the first message of the user; of a list of parts, its first text."""
    if value[:1] == b'"':
        return _text.decode(value)
    if value[:1] == b"{":
        fields = _raw.decode(value)
        if "role" in fields and bytes(fields["role"]) != b'"user"':
            return ""
        inner = (fields[name] for name in ("content", "text", "prompt_string") if name in fields)
        return next((said for each in inner if (said := _first_said(bytes(each)))), "")
    if value[:1] == b"[" and not value[1:].lstrip()[:1].isdigit():  # token ids, many of them
        return next(
            (said for each in _raws.decode(value) if (said := _first_said(bytes(each)))), ""
        )
    return ""


def log_finished(
    request: web.Request,
    title: str,
    reuse: Reuse,
    timings: Timings | None,
    *,
    id: str = "",
    divergence: Divergence | None = None,
    session: str = "",
    ttft_s: float | None = None,
    end: str = "",
) -> None:
    """Log a request that was answered, or whose client left. id: by which people may ask about it;
    divergence: why not more was found; end: how it ended, unless as it should."""
    if not log.isEnabledFor(logging.INFO):
        return
    fields: dict[str, Any] = {name: n for name, n in _sources(reuse).items() if n}
    if reuse.approximate:
        fields["approximate"] = reuse.approximate
    fields |= {name: n for name, n in (("moved", reuse.moved), ("refused", reuse.refused)) if n}
    if divergence is not None:
        fields["why"] = divergence.phrase(with_text=has_titles(request))
    elif why := why_evaluated(reuse):
        fields["why"] = why
    if ttft_s is not None:
        fields["ttft_s"] = round(ttft_s, 3)
    if timings is not None and timings.predicted_n:
        fields["tokens"] = timings.predicted_n
        if (speed := timings.tokens_per_second) is not None:
            fields["tokens_per_s"] = round(speed, 1)
    if session:
        fields["session"] = session
    if id:
        fields["request"] = id
    if end:
        fields["end"] = end
    _line(request, title, fields)


def log_habit(request: web.Request, divergence: Divergence) -> None:
    """Log that the prompts of a client always diverge at one place, and what it could do."""
    where = divergence.phrase(with_text=has_titles(request))
    headers = request.headers
    client = headers.get(AGENT_HEADER) or headers.get("User-Agent") or ""
    log.info(
        f"a client's prompts keep diverging from what is stored. {divergence.advice}",
        extra={"client": client[:CLIENT_CHARS_MAX], "why": where},
    )


def log_embedded(request: web.Request, n_tokens: int) -> None:
    """Log a request for embeddings or scores."""
    _line(request, "", {"evaluated": n_tokens})


def log_refused(request: web.Request, status: int, kind: str = "", message: str = "") -> None:
    """Log a request that was refused or that failed, once; kind, message: of its error, if there is one."""
    if request.get(LOGGED) or request.method not in ("POST", "DELETE", "PATCH"):
        return
    fields: dict[str, Any] = {"status": status}
    if said := kind if request.app[TENANTS].required else error_line(message):
        fields["error"] = said
    _line(request, "", fields)


def _line(request: web.Request, title: str, fields: dict[str, Any]) -> None:
    request[LOGGED] = True
    log.info(f'"{title}"' if title else request.rel_url.raw_path, extra=fields)


def _sources(reuse: Reuse) -> dict[str, int]:
    return {
        "live": reuse.live,
        "hot": reuse.hot,
        "warm": reuse.warm,
        "cold": reuse.cold,
        "evaluated": reuse.prefill - reuse.cold,
    }


def why_evaluated(reuse: Reuse) -> str:
    """Why tokens of the prompt were evaluated, in a few words; empty if only the last one was, which gives the
    first token of the reply."""
    reused = reuse.live + reuse.hot + reuse.warm
    if reuse.cold:
        return "thawed: only its tokens were kept"
    if reuse.prefill <= 1:
        return ""
    # Nearly all prompts share their first token.
    return f"new from token {reused} on" if reused > 1 else "nothing of it was stored"


def error_line(message: str) -> str:
    """An error without longer quotations, which may be of the request's text."""
    for dump in _DUMPS:
        message = message.partition(dump)[0]
    said = _without_quotations(message[: 4 * ERROR_CHARS_MAX])
    return said if len(said) <= ERROR_CHARS_MAX else said[: ERROR_CHARS_MAX - 1] + "…"


def _without_quotations(message: str) -> str:
    """The message without what is between the first quotation mark and the last one of its kind, unless
    that is short: a quoted text may have such marks of its own."""
    opening = _QUOTE.search(message)
    if opening is None:
        return message
    closing = message.rfind(opening[0], opening.end())
    end = len(message) if closing < 0 else closing
    hidden = end - opening.end() > _QUOTED_CHARS_MAX
    quoted = "…" if hidden else message[opening.end() : end]
    rest = message[end + 1 :]
    return message[: opening.end()] + quoted + message[end : end + 1] + _without_quotations(rest)
