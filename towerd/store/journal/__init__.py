"""The journal: everything the catalog has, a second time, and how each heals the other.

What must never be lost are tokens: rows can be evaluated again. Tokens are in the catalog, one SQLite
file and its WAL, where one flipped bit can cost a session, or every session since the last checkpoint.

**What is journalled.** Row images: at the end of a transaction every row that it entered or changed,
and the key of every row that it removed, go to an append-only log as one record with a checksum
(`frames`, `changes`). Triggers of the connection notice the rows, so no caller can forget one, and a
table that is added later is covered without a line of code. A record of turns alone would need code
of its own for every fact worth keeping (titles, bases, pins, frozen sessions, workflows, which rows
lie in which file), and would come back with other ids. SQLite's backup has no turns since the last
idle moment.

**When it is written.** Before the commit, without an fsync: a kill in between leaves a journal that is
one transaction ahead, and the next start takes it from there. What is acknowledged is durable through
the WAL; the journal guards against the loss of that one file, and a second fsync would double the
price of a turn. It is synced in idle moments and at the end. A power cut can cost its last records,
which are then rewritten from the catalog. On a full disk turns are recorded in the catalog alone, and the
journal is rewritten when there is room.

**Seals.** Every row has a checksum of its other columns, its seal, given by the same triggers. The
ledger, a table of one row, has the number of the last transaction and the sum of all seals: rows that
vanished, or that are those of another time, change the sum (`tables`). Rows are checked against their
seals where tokens are served, all of them at a start after an unclean stop, together with SQLite's
`integrity_check`, and in `verify` (`examine`). A clean stop leaves the checksum of the whole file; while
that fits, a start checks nothing else (`clean`).

**Recovery** (`recover`). A catalog that is damaged or gone is rebuilt from the newest snapshot and the
logs after it, and what was there goes to quarantine. A catalog that is whole but behind, because
SQLite drops what follows a damaged frame of the WAL, gets the changes that it lacks. A journal that is
damaged, behind or gone is rewritten. If both are damaged, sound rows of the catalog and sound records
are put together in the order of their transactions (`rebuild`); what neither has stays missing visibly
(`settle`). Without either, segment files are no empty store but an error.

**Size.** A log that outgrew its snapshot is rewritten in idle moments as a new snapshot, without the
store's lock (`compact`, `upkeep`), and so it is after every gc: what was deleted is then in no file.
Files appear under their names when they are complete and go when their successor is durable.
"""
