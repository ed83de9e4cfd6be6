"""OpenAI's stateful Responses, with its own client: chains, conversations, tenants, restarts, deletions."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import psutil
import pytest
import requests
from agent_model import make_agent_model
from daemon import Daemon
from openai import APIError, BadRequestError, NotFoundError, OpenAI
from waiting import until

TEMPLATE = Path(__file__).resolve().parents[2] / "towerd" / "data" / "templates" / "Qwen3.jinja"
CALL = json.dumps({"name": "read", "arguments": {"path": "notes.txt"}})
SCRIPT = ("<think>\nI", " read.\n</think>\n\n", "<tool_", "call>\n", CALL, "\n</tool_call>")
ANSWER = ("<think>\nNow", " I know.\n</think>\n\n", "Forty-", "two.")
TOOL: Any = {
    "type": "function",
    "name": "read",
    "description": "Reads a file.",
    "strict": False,
    "parameters": {"type": "object", "properties": {"path": {"type": "string"}}},
}
LONG = "Tell me what you know of the sea, of ships and of harbours, at great length. " * 12
PICTURE = {"type": "input_image", "image_url": "data:image/png;base64,"}
NEW_TOKENS_MAX = 60
"""A short question, with what the template puts around it and around the answer before it."""
ClientOf = Callable[..., OpenAI]


@pytest.fixture(scope="module")
def agent_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("models") / "agent.gguf"
    make_agent_model(path, SCRIPT, ANSWER)
    return path


@pytest.fixture
def agent(agent_model: Path, tmp_path: Path) -> Iterator[Daemon]:
    """A daemon of this test's own, sound at its end."""
    flags = ("-m", str(agent_model), "--ctx-size", "4096", "--chat-template-file", str(TEMPLATE))
    with Daemon(tmp_path / "d", *flags) as daemon:
        yield daemon
        assert daemon.stop() == 0, daemon.log
    with daemon.stored():
        pass


@pytest.fixture
def client_of() -> Iterator[ClientOf]:
    """`client_of(daemon, key="none")`: a client, closed at the end."""
    with ExitStack() as made:

        def make(daemon: Daemon, key: str = "none") -> OpenAI:
            client = OpenAI(base_url=f"{daemon.url}/v1", api_key=key, max_retries=0)
            return made.enter_context(client)

        yield make


def ask(client: OpenAI, text: Any, *, stream: bool = False, **fields: Any) -> Any:
    """The response, whole; of a stream that of its last event, which agrees with its first."""
    asked: dict[str, Any] = {"model": "m", "input": text, "temperature": 0, **fields}
    if not stream:
        return client.responses.create(**asked)
    with client.responses.create(**asked, stream=True) as events:
        said: list[Any] = list(events)
    assert (said[0].type, said[-1].type) == ("response.created", "response.completed")
    first, last = said[0].response, said[-1].response
    assert first.id == last.id
    for name in ("previous_response_id", "conversation", "metadata", "store"):
        assert getattr(first, name) == getattr(last, name)
    return last


def new_tokens(response: Any) -> int:
    """Tokens of a prompt that were evaluated."""
    usage = response.usage
    return int(usage.input_tokens - usage.input_tokens_details.cached_tokens)


def said(items: Any) -> list[str]:
    """The text of each message, or what kind of item it is."""
    return [each.content[0].text if each.type == "message" else each.type for each in items]


@pytest.mark.parametrize("stream", [False, True])
def test_a_chain_evaluates_each_turns_own_words(
    client_of: ClientOf, agent: Daemon, stream: bool
) -> None:
    """Across a restart and a kill -9, with nothing of the conversation sent again."""
    client = client_of(agent)
    first = ask(client, LONG, stream=stream, metadata={"topic": "sea"})
    assert (first.status, first.store, first.previous_response_id) == ("completed", True, None)
    assert (first.metadata, first.incomplete_details) == ({"topic": "sea"}, None)
    assert new_tokens(first) > 200
    before = first
    for end in (None, agent.stop, agent.kill):
        if end is not None:
            end()
            client = client_of(agent.start())
        then = ask(client, "And then?", stream=stream, previous_response_id=before.id)
        assert then.previous_response_id == before.id
        assert then.usage.input_tokens > before.usage.input_tokens
        assert new_tokens(then) <= NEW_TOKENS_MAX
        assert client.responses.retrieve(then.id).model_dump() == then.model_dump()
        before = then
    sent = client.responses.input_items.list(before.id, order="asc")
    assert said(sent) == [LONG, *["reasoning", "Forty-two.", "And then?"] * 3]
    assert len(agent.get("/towerd/v1/sessions")["sessions"]) == 1


def test_the_prompt_is_that_of_a_client_that_sends_everything(
    client_of: ClientOf, agent: Daemon
) -> None:
    """Instructions are those of the request alone."""
    client = client_of(agent)
    first = ask(client, "What is it?", instructions="Be brief.")
    then = ask(client, "Why?", previous_response_id=first.id)
    items = [each.model_dump(exclude_none=True) for each in first.output]
    turns: Any = [{"role": "user", "content": "What is it?"}, *items]
    whole = ask(client, [*turns, {"role": "user", "content": "Why?"}], store=False)
    assert then.usage.input_tokens == whole.usage.input_tokens
    assert new_tokens(whole) <= 1
    again = ask(client, [*turns, {"role": "user", "content": "Why?"}])
    listed = [client.responses.input_items.list(each.id, order="asc") for each in (then, again)]
    assert said(listed[0]) == said(listed[1])
    counted = agent.post(
        "/v1/responses/input_tokens", {"input": "Why?", "previous_response_id": first.id}
    )
    assert counted["input_tokens"] == then.usage.input_tokens


@pytest.mark.parametrize("stream", [False, True])
def test_a_tools_result_continues_its_call(
    client_of: ClientOf, agent: Daemon, stream: bool
) -> None:
    client = client_of(agent)
    called = ask(client, "What do my notes say?", tools=[TOOL], stream=stream)
    (call,) = [each for each in called.output if each.type == "function_call"]
    result: Any = {"type": "function_call_output", "call_id": call.call_id, "output": "42."}
    answer = ask(
        client, [result], tools=[TOOL], previous_response_id=called.id, stream=stream
    )  # fmt: skip
    assert answer.output_text == "Forty-two."
    assert new_tokens(answer) <= NEW_TOKENS_MAX
    kinds = [each.type for each in client.responses.input_items.list(answer.id, order="asc")]
    assert kinds == ["message", "reasoning", "function_call", "function_call_output"]


def test_what_is_not_stored_cannot_be_continued(client_of: ClientOf, agent: Daemon) -> None:
    """Its tokens are recorded as those of any chat."""
    client = client_of(agent)
    first = ask(client, LONG, store=False)
    assert first.store is False
    with pytest.raises(BadRequestError) as refused:
        ask(client, "And?", previous_response_id=first.id)
    error: Any = refused.value
    assert (error.param, error.code) == ("previous_response_id", "previous_response_not_found")
    assert error.type == "invalid_request_error"
    assert f"Previous response with id '{first.id}' not found." in error.message
    with pytest.raises(NotFoundError):
        client.responses.retrieve(first.id)
    assert new_tokens(ask(client, LONG)) <= 1


def test_deletions(client_of: ClientOf, agent: Daemon) -> None:
    """Of a response: that one alone. Of the session: everything that was said in it."""
    client = client_of(agent)
    first = ask(client, LONG)
    then = ask(client, "And then?", previous_response_id=first.id)
    client.responses.delete(first.id)
    for unknown in (first.id, "resp_unknown"):
        with pytest.raises(NotFoundError):
            client.responses.retrieve(unknown)
        with pytest.raises(NotFoundError):
            client.responses.delete(unknown)
    last = ask(client, "And then?", previous_response_id=then.id)
    assert new_tokens(last) <= NEW_TOKENS_MAX
    (session,) = agent.get("/towerd/v1/sessions")["sessions"]
    requests.delete(
        f"{agent.url}/towerd/v1/sessions/{session['id']}", timeout=30
    ).raise_for_status()
    for gone in (then.id, last.id):
        with pytest.raises(NotFoundError):
            client.responses.retrieve(gone)
        with pytest.raises(BadRequestError):
            ask(client, "And then?", previous_response_id=gone)


@pytest.mark.parametrize("stream", [False, True])
def test_an_answer_without_tokens_belongs_to_the_session_that_it_follows(
    client_of: ClientOf, agent: Daemon, stream: bool
) -> None:
    """Or to the one that its client names; where there is neither, it is not kept, and says so."""
    client = client_of(agent)
    name = {"X-Towerd-Session": "work"}
    alone = none(client, stream=stream, extra_headers=name)
    made = client.conversations.create()
    first = ask(client, LONG, extra_headers=name)
    kept = [
        none(client, stream=stream, extra_headers=name),
        none(client, stream=stream, previous_response_id=first.id),
    ]
    kept.append(none(client, stream=stream, previous_response_id=kept[-1].id))
    alone_in = none(client, stream=stream, conversation=made.id)
    ask(client, LONG, conversation=made.id)
    kept.append(none(client, stream=stream, conversation=made.id))
    assert said(client.conversations.items.list(made.id, order="asc"))[:2] == ["None.", LONG]
    for each in kept:
        assert each.store is True
        assert client.responses.retrieve(each.id).model_dump() == each.model_dump()
    for session in agent.get("/towerd/v1/sessions")["sessions"]:
        url = f"{agent.url}/towerd/v1/sessions/{session['id']}"
        requests.delete(url, timeout=30).raise_for_status()
    for each in (alone, alone_in):
        assert each.store is False
    for each in (alone, alone_in, *kept):
        with pytest.raises(NotFoundError):
            client.responses.retrieve(each.id)


def none(client: OpenAI, *, stream: bool, **fields: Any) -> Any:
    """A response without a token."""
    asked: dict[str, Any] = {"model": "m", "input": "None.", "max_output_tokens": 0, **fields}
    if not stream:
        return client.responses.create(**asked)
    with client.responses.create(**asked, stream=True) as events:
        return list(events)[-1].response


@pytest.mark.parametrize("stream", [False, True])
def test_a_conversation(client_of: ClientOf, agent: Daemon, stream: bool) -> None:
    """Its items are the context of each response in it, which adds to them; across a restart and a kill."""
    client = client_of(agent)
    made = client.conversations.create(
        metadata={"topic": "sea"}, items=[{"type": "message", "role": "user", "content": LONG}]
    )
    assert made.id.startswith("conv_")
    assert made.metadata == {"topic": "sea"}
    first = ask(client, "What is it?", conversation=made.id, stream=stream)
    assert first.conversation.id == made.id
    assert agent.stop() == 0
    client = client_of(agent.start())
    then = ask(client, "Why?", conversation=made.id, stream=stream)
    assert new_tokens(then) <= NEW_TOKENS_MAX
    agent.kill()
    client = client_of(agent.start())
    everything = [LONG, "What is it?", "reasoning", "Forty-two.", "Why?", "reasoning", "Forty-two."]
    found = list(client.conversations.items.list(made.id, order="asc", limit=3))
    assert said(found) == everything
    assert len({each.id for each in found}) == len(found)
    assert said(client.responses.input_items.list(first.id, order="asc")) == everything[:2]
    branch = ask(client, "Else?", previous_response_id=first.id)
    assert said(client.responses.input_items.list(branch.id, order="asc")) == [
        *everything[:4],
        "Else?",
    ]
    assert client.conversations.retrieve(made.id).created_at == made.created_at
    assert client.conversations.update(made.id, metadata={"a": "b"}).metadata == {"a": "b"}
    with pytest.raises(BadRequestError, match="'metadata' is required"):
        client.post(f"/conversations/{made.id}", body={}, cast_to=object)
    assert client.conversations.retrieve(made.id).metadata == {"a": "b"}
    with pytest.raises(BadRequestError, match="one response at a time"):
        ask(client, "Why?", conversation=made.id, extra_body={"n": 2})
    assert len(list(client.conversations.items.list(made.id))) == len(everything)


def test_a_list_of_items_with_one_id_ends(openai: OpenAI) -> None:
    """Each has an id of its own, the same in either order and at each size of a page."""
    texts, before = [f"Turn {turn}." for turn in range(3)], ""
    for text in texts:
        turn: Any = {"type": "message", "role": "user", "content": text, "id": "msg_1"}
        made = openai.responses.create(
            model="m", input=[turn], max_output_tokens=2, previous_response_id=before
        )
        before = made.id
    listed = []
    for order, limit in (("asc", 1), ("asc", 2), ("desc", 1)):
        which: Any = {"order": order, "limit": limit}
        pages: Any = openai.responses.input_items.list(before, **which)
        found = [(each.id, each.content[0].text) for each in pages]
        listed.append(found if order == "asc" else found[::-1])
    assert listed[0] == listed[1] == listed[2]
    assert len({id for id, _ in listed[0]}) == len(listed[0]) == 5
    assert [text for _, text in listed[0][::2]] == texts


def test_items_of_a_conversation(client_of: ClientOf, agent: Daemon) -> None:
    client = client_of(agent)
    made = client.conversations.create()
    added: Any = client.conversations.items.create(
        made.id,
        items=[{"role": "developer", "content": "Be kind."}, {"role": "user", "content": "Hello."}],
    )
    assert said(added.data) == ["Be kind.", "Hello."]
    first, second = (each.id for each in added.data)
    assert client.conversations.items.retrieve(second, conversation_id=made.id).id == second
    assert client.conversations.items.delete(first, conversation_id=made.id).id == made.id
    with pytest.raises(NotFoundError):
        client.conversations.items.retrieve(first, conversation_id=made.id)
    assert said(client.conversations.items.list(made.id)) == ["Hello."]
    kept = ask(client, "And?", conversation={"id": made.id}, store=False)
    assert len(list(client.conversations.items.list(made.id))) == 4
    with pytest.raises(NotFoundError):
        client.responses.retrieve(kept.id)
    assert client.conversations.delete(made.id).deleted is True
    for gone in (client.conversations.retrieve, client.conversations.items.list):
        with pytest.raises(NotFoundError):
            gone(made.id)
    with pytest.raises(NotFoundError) as refused:
        ask(client, "And?", conversation=made.id)
    assert refused.value.param == "conversation"


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"previous_response_id": "resp_1", "conversation": "conv_1"}, "previous_response_id"),
        ({"metadata": {"a": "b" * 600}}, "metadata"),
        ({"store": "yes"}, None),
        ({"previous_response_id": 3}, None),
        ({"conversation": [3]}, None),
        ({"conversation": {}}, "conversation"),
        ({"conversation": {"name": "x"}}, "conversation"),
        ({"background": True}, "background"),
    ],
)
def test_what_is_refused(openai: OpenAI, fields: dict[str, Any], param: str | None) -> None:
    with pytest.raises(BadRequestError) as refused:
        openai.responses.create(model="m", input="Hi", extra_body=fields)
    assert refused.value.param == param
    assert next(iter(fields)) in refused.value.message


@pytest.mark.parametrize("text", [3, None, [3], ["Hi"], [{}], [{"type": "web"}]])
def test_an_input_that_is_none(openai: OpenAI, text: Any) -> None:
    """It is refused as without what it continues."""
    first = openai.responses.create(model="m", input="Hi", max_output_tokens=2)
    said = []
    for fields in ({}, {"previous_response_id": first.id}):
        with pytest.raises(BadRequestError) as refused:
            openai.responses.create(model="m", input=text, extra_body=fields)
        said.append(refused.value.message)
    assert said[0] == said[1]


@pytest.mark.parametrize(
    ("items", "param"),
    [
        (None, None),
        ([3], None),
        ([{"type": "web_search_call"}], "items[0].type"),
        ([{"role": "narrator", "content": "Hi"}], "items[0].role"),
        ([{"role": "user", "content": "Hi"}, {"role": "user"}], "items[1].content"),
        ([{"role": "user", "content": [3]}], "items[0].content[0]"),
        ([{"role": "user", "content": [{"type": "input_image"}]}], "items[0].content[0].image_url"),
        ([{"role": "assistant", "content": [PICTURE]}], "items[0].content[0].type"),
        ([{"role": "user", "content": [{"type": "smell"}]}], "items[0].content[0].type"),
        ([{"type": "function_call", "name": "read", "arguments": "{}"}], "items[0].call_id"),
        ([{"type": "function_call", "call_id": "c", "name": ["read"]}], "items[0].name"),
        (
            [{"type": "function_call", "call_id": "c", "name": "n", "arguments": []}],
            "items[0].arguments",
        ),
        (
            [{"type": "function_call_output", "call_id": "c", "output": [{}]}],
            "items[0].output[0].type",
        ),
        ([{"type": "reasoning", "summary": "Hm."}], "items[0].summary"),
    ],
)
def test_items_that_no_model_can_be_told(openai: OpenAI, items: Any, param: str | None) -> None:
    made = openai.conversations.create()
    with pytest.raises(BadRequestError, match="items") as refused:
        openai.conversations.items.create(made.id, items=items)
    assert refused.value.param == param


def test_a_response_that_reached_its_limit_says_so(openai: OpenAI) -> None:
    """Whole and streamed."""
    for stream in (False, True):
        cut = ask(openai, "Tell me a story.", max_output_tokens=2, stream=stream)
        assert (cut.status, cut.output[-1].status) == ("incomplete", "incomplete")
        assert cut.incomplete_details.reason == "max_output_tokens"


ENDLESS: Any = {"max_output_tokens": 30_000, "extra_body": {"ignore_eos": True}}


def cut_off(client: OpenAI, text: str, **fields: Any) -> tuple[str, str]:
    """Leave a stream after its first words; the response's id, and these words."""
    asked: Any = {"model": "m", "input": text, "temperature": 0, "stream": True, **fields}
    read, id = "", ""
    with client.responses.create(**asked) as events:
        for event in events:
            if event.type == "response.created":
                id = event.response.id
            elif event.type == "response.output_text.delta":
                read += event.delta
                if len(read) > 40:
                    break
    return id, read


def get_as(key: str, daemon: Daemon, path: str) -> Any:
    return daemon.get(path, headers={"Authorization": f"Bearer {key}"})


def kept(client: OpenAI, id: str) -> Any:
    """A response, once it is kept."""

    def is_kept() -> bool:
        with suppress(NotFoundError):
            client.responses.retrieve(id)
            return True
        return False

    until(is_kept)
    return client.responses.retrieve(id)


@pytest.mark.parametrize("engine", ["embedded", "llama-server"])
def test_a_response_that_was_cut_off_is_continued(
    client_of: ClientOf, tmp_path: Path, engine: str
) -> None:
    """What its client read, and what was generated until it left, is there after a kill -9: in a chain and in a
    conversation, for its tenant alone. One that is not to be stored is not."""
    keys = ("--api-key", "ann:sk-ann", "--api-key", "bob:sk-bob")
    flags = ("--ctx-size", "32768", "--engine", engine, *keys)
    with Daemon(tmp_path / "d", *flags) as daemon:
        ann = client_of(daemon, "sk-ann")
        made = ann.conversations.create()
        unkept, _ = cut_off(ann, "Tell me of a cat.", store=False, **ENDLESS)
        said_in, words = cut_off(ann, "Tell me of a dog.", conversation=made.id, **ENDLESS)
        id, read = cut_off(ann, "Tell me a story.", metadata={"a": "b"}, **ENDLESS)
        for each in (said_in, id):
            assert kept(ann, each).status == "incomplete"
        daemon.kill()
        ann, bob = client_of(daemon.start(), "sk-ann"), client_of(daemon, "sk-bob")
        cut: Any = ann.responses.retrieve(id)
        assert cut.output[-1].status == "incomplete"
        assert (cut.status, cut.store, cut.metadata) == ("incomplete", True, {"a": "b"})
        assert cut.output_text.startswith(read)
        sessions = get_as("sk-ann", daemon, "/towerd/v1/sessions")["sessions"]
        paths = [f"/towerd/v1/sessions/{each['id']}/chat" for each in sessions]
        chats = [get_as("sk-ann", daemon, path) for path in paths]
        recorded = [each["messages"][-1]["parts"][-1]["text"] for each in chats]
        assert cut.output_text.strip() in [text.strip() for text in recorded]
        items = said(ann.conversations.items.list(made.id, order="asc"))
        assert items[0] == "Tell me of a dog."
        assert items[1].startswith(words)
        then = ask(ann, "And then?", previous_response_id=id, max_output_tokens=4)
        assert said(ann.responses.input_items.list(then.id, order="asc")) == [
            "Tell me a story.",
            cut.output_text,
            "And then?",
        ]
        assert then.usage.input_tokens > cut.usage.output_tokens
        if engine == "embedded":  # a slot of a llama-server was not saved yet
            assert new_tokens(then) <= NEW_TOKENS_MAX
        assert said_in != ask(ann, "Why?", conversation=made.id, max_output_tokens=4).id
        with pytest.raises(NotFoundError):
            ann.responses.retrieve(unkept)
        with pytest.raises(NotFoundError):
            bob.responses.retrieve(id)
        assert daemon.stop() == 0, daemon.log
    with daemon.stored():
        pass


def test_a_response_whose_engine_failed(client_of: ClientOf, tmp_path: Path) -> None:
    """It is kept as far as it came, as failed, and can be continued."""
    with Daemon(tmp_path / "d", "--ctx-size", "16384", "--engine", "llama-server") as daemon:
        client, id = client_of(daemon), ""
        asked: Any = {"model": "m", "input": "Tell me a story.", "stream": True, **ENDLESS}
        with suppress(APIError), client.responses.create(**asked) as events:
            for event in events:
                if event.type == "response.created":
                    id = event.response.id
                    (server,) = psutil.Process(daemon.pid).children()
                    server.kill()
        failed = kept(client, id)
        assert (failed.status, failed.error.code) == ("failed", "server_error")
        assert failed.error.message
        until(lambda: requests.get(f"{daemon.url}/health", timeout=30).ok)
        then = ask(client, "And?", previous_response_id=id, max_output_tokens=2)
        assert then.status == "incomplete"
        assert daemon.stop() == 0, daemon.log


def test_a_stop_before_the_first_token(client_of: ClientOf, tmp_path: Path) -> None:
    """The response says that it is incomplete, and that it is not kept."""
    with Daemon(tmp_path / "d", "--ctx-size", "65536", "--parallel", "1") as daemon:
        client = client_of(daemon)

        def ask_long() -> Any:
            return ask(client, "Word and so on, my dear, " * 4600, max_output_tokens=3)

        with ThreadPoolExecutor() as pool:
            asked = pool.submit(ask_long)
            until(lambda: daemon.get("/slots")[0]["is_processing"])
            assert daemon.stop() == 0, daemon.log
            response = asked.result()
        assert (response.status, response.store, response.output) == ("incomplete", False, [])
        with pytest.raises(NotFoundError):
            client_of(daemon.start()).responses.retrieve(response.id)


@pytest.mark.parametrize("engine", ["embedded", "llama-server"])
def test_a_response_is_continued_at_once(client_of: ClientOf, tmp_path: Path, engine: str) -> None:
    """By the client that left its stream, without a pause: in a chain and in a conversation, which has all items in
    their order."""
    with Daemon(tmp_path / "d", "--ctx-size", "16384", "--engine", engine) as daemon:
        client = client_of(daemon)
        long = ENDLESS | {"max_output_tokens": 400}  # a llama-server's context is the model's 512
        for turn in range(10):
            id, read = cut_off(client, f"Story {turn}.", **long)
            then = ask(client, "And?", previous_response_id=id, max_output_tokens=2)
            items = said(client.responses.input_items.list(then.id, order="asc"))
            assert (items[0], items[2:]) == (f"Story {turn}.", ["And?"])
            assert items[1].startswith(read)
            made = client.conversations.create()
            _, read = cut_off(client, "Cut.", conversation=made.id, **long)
            ask(client, "Next.", conversation=made.id, max_output_tokens=2)
            items = said(client.conversations.items.list(made.id, order="asc"))
            assert (items[0], items[2], len(items)) == ("Cut.", "Next.", 4)
            assert items[1].startswith(read)
        assert daemon.stop() == 0, daemon.log


def is_processing(slot: dict[str, Any]) -> bool:
    return bool(slot["is_processing"])


def test_a_whole_reply_in_a_conversation_is_waited_for(client_of: ClientOf, tmp_path: Path) -> None:
    """A request that comes while it is made follows it."""
    with Daemon(tmp_path / "d", "--ctx-size", "16384", "--parallel", "2") as daemon:
        client = client_of(daemon)
        made = client.conversations.create()
        asked: Any = {"conversation": made.id, "extra_body": {"ignore_eos": True}}
        with ThreadPoolExecutor() as pool:
            first = pool.submit(ask, client, "First.", max_output_tokens=16, **asked)
            until(lambda: first.done() or any(map(is_processing, daemon.get("/slots"))))
            then = ask(client, "Then.", max_output_tokens=2, **asked)
            words = first.result().output_text
        items = said(client.responses.input_items.list(then.id, order="asc"))
        assert items == ["First.", words, "Then."]
        assert daemon.stop() == 0, daemon.log


def test_tenants_know_nothing_of_each_other(
    client_of: ClientOf, agent_model: Path, tmp_path: Path
) -> None:
    flags = ("-m", str(agent_model), "--chat-template-file", str(TEMPLATE))
    keys = ("--api-key", "ann:sk-ann", "--api-key", "bob:sk-bob")
    with Daemon(tmp_path / "d", *flags, *keys) as daemon:
        ann, bob = client_of(daemon, "sk-ann"), client_of(daemon, "sk-bob")
        first, made = ask(ann, "A secret."), ann.conversations.create()
        attempts: list[Callable[[], object]] = [
            lambda: bob.responses.retrieve(first.id),
            lambda: bob.responses.delete(first.id),
            lambda: bob.responses.input_items.list(first.id),
            lambda: bob.conversations.retrieve(made.id),
            lambda: bob.conversations.items.list(made.id),
            lambda: bob.conversations.delete(made.id),
            lambda: ask(bob, "And?", conversation=made.id),
        ]
        for attempt in attempts:
            with pytest.raises(NotFoundError):
                attempt()
        with pytest.raises(BadRequestError, match="Previous response with id"):
            ask(bob, "And?", previous_response_id=first.id)
        assert ask(ann, "And?", previous_response_id=first.id).output_text == "Forty-two."
        assert requests.get(f"{daemon.url}/v1/responses/{first.id}", timeout=30).status_code == 401
