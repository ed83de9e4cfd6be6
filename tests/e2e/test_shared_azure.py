"""Daemons share through Azure's blob storage, as its emulator has it."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
from azure_server import AzureServer, azure_server
from daemon import Daemon
from sharing import TALE, Place, ids_of, metric, say, shared

MakeDaemon = Callable[..., Daemon]


@pytest.fixture(scope="module")
def azure(tmp_path_factory: pytest.TempPathFactory) -> Iterator[AzureServer]:
    with azure_server(tmp_path_factory.mktemp("azure")) as server:
        yield server


def test_a_chat_roams_through_azure(make_daemon: MakeDaemon, azure: AzureServer) -> None:
    """It is put, pulled by its id, found by its tokens, deleted and collected."""
    place = Place(f"{azure.url}/towers", azure.env)
    one = make_daemon(*place.flags(), name="a", **place.env)
    key = one.store_dir / "shared.key"
    two = make_daemon(*place.flags(key), name="b", **place.env)
    three = make_daemon(*place.flags(key), name="c", **place.env)
    with one, two, three:
        prompt = ids_of(one, TALE)
        reply, session, _ = say(one, prompt)
        ids = prompt + reply
        put = shared(one, "push", session)
        assert (put["tokens"], put["rows"]) == (len(ids), len(ids) - 1)
        assert shared(one, "push", session) == put
        assert metric(one, "put_total") == 3
        taken = shared(two, "pull", session)
        assert (taken["tokens"], taken["rows"]) == (len(ids), len(ids) - 1)
        expected, _, _ = say(one, [*ids, 13])
        found, _, reuse = say(three, [*ids, 13])
        assert found == expected
        assert reuse["warm"] >= 256
        assert metric(three, "lookups_found_total") == 1
        assert [each["id"] for each in shared(two, "list")["sessions"]] == [session]
        assert shared(one, "gc")["records"] == 0
        assert shared(one, "rm", session) == {"session": session, "records": 1, "puts_again": False}
        assert shared(two, "gc", "--dry-run")["passed_over"] == []
        assert shared(two, "list")["sessions"] == []
        for daemon in (one, two, three):
            assert metric(daemon, "errors_total") == metric(daemon, "damaged_total") == 0
            assert daemon.stop() == 0
