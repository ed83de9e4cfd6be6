"""Two tenants of one simulated store: what each has is its own, and one can be forgotten."""

from __future__ import annotations

from typing import TYPE_CHECKING

from house_foreign import foreign_in
from simulation import OTHERS_MARK, found_in

from towerd.errors import NotFound
from towerd.store import Store
from towerd.store.maintenance.forget import Selection, forget_rest, sessions_of, unpin

if TYPE_CHECKING:
    from house import House

GUEST = "guest"
_SHARED_MEDIA = (
    "SELECT name FROM media JOIN sessions ON pk = session GROUP BY name"
    " HAVING count(DISTINCT scope) > 1"
)


def check_apart(store: Store) -> None:
    """No segment continues one of another tenant, and no file has anything of two."""
    with store.locked():
        for node in store.nodes():
            above = node.parent
            assert above is None or above.parent is None or above.scope == node.scope, (
                f"{node.id} of {node.scope} continues {above.id} of {above.scope}"
            )
        for file in store.files():
            whose = {node.scope for node in store.viewers(file)}
            assert len(whose) <= 1, f"{file.path.name} has rows of {whose}"
        assert not store.state.catalog.rows(_SHARED_MEDIA), "tenants share a medium"


def _is_of_guest(key: object, value: object) -> bool:
    assert isinstance(key, tuple)
    kind, name = key
    if kind == "pin":
        return bool(name[0] == OTHERS_MARK)
    if kind == "foreign":
        return bool(name[0] == GUEST)
    if kind == "response":
        assert isinstance(value, tuple)
        name = value[0]
    return str(name).partition("/")[0].endswith(f"@{GUEST}")


def forget_guest(house: House) -> None:
    """Forget all of one tenant, as `towerctl forget --tenant`: nothing of it is left, and the other has what it had.
    Nothing else runs."""
    store = house.store
    found = found_in(store).each() | foreign_in(store)
    gone = [key for key, value in found.items() if _is_of_guest(key, value)]
    told = house.told.begin(dict.fromkeys(gone))
    chosen = Selection(GUEST, None)
    for each in sessions_of(store.state, chosen):
        if each.is_pinned:
            unpin(store.state, each)
        try:
            store.delete_session(each.id, each.scope)
        except NotFound:
            store.foreign.delete(each.id, each.scope, each.tokenizer)
    forget_rest(store.state, store.bases, chosen)
    house.told.acknowledge(told)
    for key in gone:
        assert isinstance(key, tuple)
        kind, name = key
        if kind == "session":
            house.marks.delete(name)
        elif kind == "foreign":
            house.words.delete(*name)
    house.marks.check_gone(house)
    wrong = house.told.wrong(found_in(store).each() | foreign_in(store), ignored="title")
    assert not wrong, "\n".join(wrong)
    left = [node.id for node in store.nodes() if node.scope == GUEST]
    assert not left, f"{left} are left of a tenant that is forgotten"
