"""Records that are needed no more: later ones contain them, or nobody put their session or base for long."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator
from datetime import datetime, timedelta

from towerd.tiers.shared.deleting.survey import Survey
from towerd.tiers.shared.records import NamedRecord

COPIES_MIN = 2
"""Later records that have to contain one, and be whole, before it is deleted: one may be damaged later."""


def needed_no_more(
    survey: Survey,
    records: Iterable[NamedRecord],
    condemned: Collection[str],
    older_than: timedelta | None,
    now: datetime,
) -> list[str]:
    """The places of records that later ones contain, and, if asked, of all of what nobody put for so long.

    condemned: read after the records: one of these may be about to go
    Raises BucketError."""
    folders = defaultdict(list)
    for each in records:
        folders[each.place.rpartition("/")[0]].append(each)
    gone: list[str] = []
    for of in folders.values():
        last = max(each.modified for each in of)
        if older_than is not None and now - last > older_than:
            gone += [each.place for each in of]
        else:
            gone += _superseded(survey, [each for each in of if each.place not in condemned])
    return sorted(gone)


def _superseded(survey: Survey, records: list[NamedRecord]) -> Iterator[str]:
    """Those of one session or base that later ones of the same model contain, which are read whole."""
    of_model = defaultdict(list)
    for each in records:
        of_model[each.name.model].append(each)
    whole: dict[str, bool] = {}
    for of in of_model.values():
        of.sort(key=lambda each: (each.modified, each.place))
        for number, each in enumerate(of):
            later = [other for other in of[number + 1 :] if _contains(survey, other, each)]
            if len(later) < COPIES_MIN:
                continue
            n_whole = 0
            for other in reversed(later):
                if other.place not in whole:
                    whole[other.place] = survey.is_whole(other.place)
                n_whole += whole[other.place]
                if n_whole == COPIES_MIN:
                    yield each.place
                    break


def _contains(survey: Survey, later: NamedRecord, each: NamedRecord) -> bool:
    ours, theirs = survey.naming(later.place), survey.naming(each.place)
    if ours is None or theirs is None:
        return False
    return later.name.n_rows >= each.name.n_rows and ours.contains(theirs)
