"""The journal: a second copy of the catalog. Each copy can repair the other.

Tokens must never be lost; rows can be evaluated again. Tokens are in the catalog, one
SQLite file and its WAL, where one flipped bit can cost a session, or every session since
the last checkpoint.

**What is journalled.** Row images: at the end of a transaction, every row that it inserted
or changed, and the key of every row that it deleted, are appended to a log as one record
with a checksum (`journal`, `tables`). Triggers on the connection record the rows, so no
caller can forget one, and new tables are covered without extra code. A log of turns alone
would need code for every other fact worth keeping (titles, bases, pins, frozen sessions,
workflows, which rows are in which file), and would restore them under other ids. SQLite's
backup lacks the turns since the last idle moment.

**When it is written.** Before the commit, without an fsync: a kill in between leaves the
journal one transaction ahead, and the next start replays it. The WAL makes acknowledged
changes durable. The journal guards against the loss of that one file, and a second fsync
would double the cost of a turn. The journal is synced in idle moments and on close, and when
something is about to go that a record which is not synced replaces: the old file of
re-encoded rows, the tokens of a frozen session, the blob of a thawed one. A power
cut can cost its last records, which are then rewritten from the catalog. On a full disk
turns are recorded in the catalog alone, and the journal is rewritten when there is room.

**Seals.** Every row has a checksum of its other columns, its seal, set by the same
triggers. The ledger, a table of one row, has the number of the last transaction and the sum
of all seals: lost or stale rows change the sum (`tables`). Seals are checked when tokens
are served, for all rows at the start after an unclean stop (together with SQLite's
`integrity_check`), and in `verify`. A clean stop leaves the checksum of the whole file; if it
matches, a start checks nothing else.

**Recovery** (`recover`). A damaged or missing catalog is rebuilt from the newest snapshot
and the logs after it, and the old file is quarantined. A sound catalog that is behind,
because SQLite drops everything after a damaged WAL frame, receives the missing changes. A
journal that is damaged, behind or missing is rewritten. If both are damaged, sound catalog
rows and sound records are merged in transaction order (`rebuild`), and whatever neither has
stays visibly missing (`settle`). Without a catalog, a record behind a lost one takes nothing
away that was whole before it (`Filler.apply_rooted`). Segment files without a catalog and a journal are an
error, not an empty store.

**Encrypted stores.** SQLCipher checks every page of the catalog, and records are sealed (`frames`). The key is
renewed in one transaction of the database, after which the journal is written anew with it.

**Size.** A log larger than its snapshot is rewritten as a new snapshot in idle moments,
without the store's lock (`recover.write_snapshot`), and also after every gc, so that no file
retains deleted data. A file appears under its name when it is complete and is removed when
its successor is durable.
"""
