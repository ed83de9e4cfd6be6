"""Responses that are kept, behind a router."""

from __future__ import annotations

from typing import Any

import pytest
import requests
from daemon import Daemon
from openai import BadRequestError, NotFoundError, OpenAI
from routed import MakeRouter, states

LIMITS: dict[str, Any] = {"temperature": 0, "max_output_tokens": 6}
ENDLESS: dict[str, Any] = {"max_output_tokens": 4000, "extra_body": {"ignore_eos": True}}
CREATED = "response.created"


def client_of(router: Daemon) -> OpenAI:
    return OpenAI(base_url=f"{router.url}/v1", api_key="none", max_retries=0)


def test_responses_of_several_models(make_router: MakeRouter) -> None:
    """One model continues what another said; what is kept is read and deleted where no model is loaded."""
    router = make_router()
    with client_of(router) as client:
        made = client.conversations.create(items=[{"role": "user", "content": "One day"}])
        assert set(states(router).values()) == {"unloaded"}
        ask = client.responses.create
        first = ask(model="tales", input="Tell me.", **LIMITS)
        then = ask(model="dice", input="And?", previous_response_id=first.id, **LIMITS)
        ask(model="tales", input="And?", conversation=made.id, **LIMITS)
    assert router.stop() == 0, router.log
    with client_of(router.start()) as client:
        kept = client.responses.retrieve(then.id)
        assert (kept.model, kept.previous_response_id) == ("dice", first.id)
        assert len(list(client.responses.input_items.list(then.id))) == 3
        assert len(list(client.conversations.items.list(made.id))) == 3
        client.responses.delete(first.id)
        assert set(states(router).values()) == {"unloaded"}
        with pytest.raises(BadRequestError):
            client.responses.create(model="dice", input="And?", previous_response_id=first.id)
    assert router.stop() == 0, router.log
    with router.stored():
        pass


def test_a_deleted_session_takes_its_responses(make_router: MakeRouter) -> None:
    router = make_router()
    with client_of(router) as client:
        kept = client.responses.create(model="tales", input="Once more.", **LIMITS)
        (session,) = router.get("/towerd/v1/sessions")["sessions"]
        path = f"{router.url}/towerd/v1/sessions/{session['id']}"
        requests.delete(path, timeout=30).raise_for_status()
        with pytest.raises(NotFoundError):
            client.responses.retrieve(kept.id)


@pytest.mark.parametrize("model", ["tales", "dice"])
def test_a_response_that_was_left_is_continued_at_once(make_router: MakeRouter, model: str) -> None:
    """By its model, and by another one, in another process."""
    router = make_router()
    with client_of(router) as client:
        ask: Any = client.responses.create
        ask(model=model, input="Hello.", **LIMITS)
        for turn in range(5):
            with ask(model="tales", input=f"Tell {turn}.", stream=True, **ENDLESS) as events:
                id = next(event.response.id for event in events if event.type == CREATED)
                assert any(event.type == "response.output_text.delta" for event in events)
            then = ask(model=model, input="And?", previous_response_id=id, **LIMITS)
            assert len(list(client.responses.input_items.list(then.id))) == 3
