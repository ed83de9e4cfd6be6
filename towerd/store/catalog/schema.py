"""The catalog's tables. Every sealed table has `seal`: the checksum of the row's other columns, but for
those that change with every use; its default takes the place of eight bytes, so that the checksum is
written into the row without moving it.

The text of each statement is part of the sum that a catalog is checked by, so not a blank of it
changes within a version. A version adds tables to the one before and leaves those as they are: a catalog
and a journal of an earlier version are read as they stand (`database.migrate`, `journal.frames`).
"""

from __future__ import annotations

APPLICATION_ID = 0x54575244
"""ASCII "TWRD", in the SQLite header."""
VERSION = 10
VERSION_MIN = 8
"""The earliest version that is read."""
_FIRST = """
CREATE TABLE meta (
    key TEXT PRIMARY KEY,
    value TEXT NOT NULL
, seal INTEGER NOT NULL DEFAULT 0x4000000000000000) STRICT, WITHOUT ROWID;

-- what token ids mean: conversations hang on it, whatever model evaluates them; pieces is the
-- fingerprints' "tokenizer", rules a hash of how text is cut, NULL while it is unknown
CREATE TABLE tokenizers (
    id INTEGER PRIMARY KEY,
    digest BLOB NOT NULL UNIQUE CHECK (length(digest) = 32),
    pieces TEXT NOT NULL,
    rules TEXT,
    created REAL NOT NULL,
    opened REAL NOT NULL,
    seal INTEGER NOT NULL DEFAULT 0x4000000000000000
) STRICT;
CREATE INDEX tokenizers_pieces ON tokenizers(pieces);

CREATE TABLE fingerprints (
    id INTEGER PRIMARY KEY,
    digest BLOB NOT NULL UNIQUE CHECK (length(digest) = 32),
    json TEXT NOT NULL,
    created REAL NOT NULL,
    opened REAL NOT NULL
, seal INTEGER NOT NULL DEFAULT 0x4000000000000000, tokenizer INTEGER REFERENCES tokenizers) STRICT;

-- runs: [[rows, format, origin], ...]; empty: one run of native rows
CREATE TABLE files (
    id INTEGER PRIMARY KEY,
    fingerprint INTEGER NOT NULL REFERENCES fingerprints,
    name TEXT NOT NULL UNIQUE,
    p0 INTEGER NOT NULL CHECK (p0 >= 0),
    n_rows INTEGER NOT NULL CHECK (n_rows > 0),
    bytes INTEGER NOT NULL CHECK (bytes > 0),
    created REAL NOT NULL
, runs TEXT NOT NULL DEFAULT '', seal INTEGER NOT NULL DEFAULT 0x4000000000000000) STRICT;

-- AUTOINCREMENT: an id is never used again, so nobody mistakes a new segment for a removed one;
-- ids comes last, so that updating last_used in place leaves its pages alone
CREATE TABLE "segments" (
    id INTEGER PRIMARY KEY AUTOINCREMENT,
    tokenizer INTEGER NOT NULL REFERENCES tokenizers,
    parent INTEGER REFERENCES segments,
    scope TEXT NOT NULL,
    p0 INTEGER NOT NULL CHECK (p0 >= 0),
    p1 INTEGER NOT NULL CHECK (p1 > p0),
    last_used REAL NOT NULL,
    hits INTEGER NOT NULL DEFAULT 0,
    created REAL NOT NULL,
    key BLOB NOT NULL UNIQUE CHECK (length(key) = 32),
    ids BLOB NOT NULL CHECK (length(ids) = 4 * (p1 - p0)),
    seal INTEGER NOT NULL DEFAULT 0x4000000000000000
) STRICT;
CREATE INDEX segments_parent ON segments(parent);

-- the rows of a segment under one fingerprint, that of the file
CREATE TABLE views (
    id INTEGER PRIMARY KEY,
    node INTEGER NOT NULL REFERENCES segments,
    file INTEGER NOT NULL REFERENCES files,
    row0 INTEGER NOT NULL CHECK (row0 >= 0),
    seal INTEGER NOT NULL DEFAULT 0x4000000000000000
) STRICT;
CREATE UNIQUE INDEX views_node ON views(node, file);
CREATE INDEX views_file ON views(file);

-- cold_bytes: bytes of the blob while a session is frozen, else 0
CREATE TABLE "sessions" (
    pk INTEGER PRIMARY KEY,
    tokenizer INTEGER NOT NULL REFERENCES tokenizers,
    scope TEXT NOT NULL,
    id TEXT NOT NULL,
    named INTEGER NOT NULL,
    title TEXT NOT NULL DEFAULT '',
    leaf INTEGER REFERENCES turns,
    n_tokens INTEGER NOT NULL DEFAULT 0,
    created REAL NOT NULL,
    updated REAL NOT NULL,
    cold_bytes INTEGER NOT NULL DEFAULT 0,
    seal INTEGER NOT NULL DEFAULT 0x4000000000000000,
    UNIQUE (tokenizer, scope, id)
) STRICT;
CREATE INDEX sessions_leaf ON sessions(leaf);
CREATE INDEX sessions_warm ON sessions(tokenizer, updated) WHERE cold_bytes = 0;
CREATE INDEX sessions_used ON sessions(tokenizer, updated);
CREATE INDEX sessions_own ON sessions(tokenizer, scope, updated);
CREATE INDEX sessions_id ON sessions(tokenizer, id, scope);
CREATE INDEX sessions_frozen ON sessions(tokenizer, cold_bytes) WHERE cold_bytes > 0;

-- the turns of a frozen session name no segments
CREATE TABLE turns (
    id INTEGER PRIMARY KEY,
    session INTEGER NOT NULL REFERENCES sessions,
    parent INTEGER REFERENCES turns,
    prompt_node INTEGER REFERENCES segments,
    reply_node INTEGER REFERENCES segments,
    n_prompt INTEGER NOT NULL,
    n_reply INTEGER NOT NULL,
    n_cached INTEGER NOT NULL,
    started REAL NOT NULL,
    created REAL NOT NULL,
    finished INTEGER NOT NULL,
    tail BLOB NOT NULL
, seal INTEGER NOT NULL DEFAULT 0x4000000000000000) STRICT;
CREATE INDEX turns_session ON turns(session);
CREATE INDEX turns_parent ON turns(parent);
CREATE INDEX turns_prompt ON turns(prompt_node) WHERE prompt_node IS NOT NULL;
CREATE INDEX turns_reply ON turns(reply_node) WHERE reply_node IS NOT NULL;

CREATE TABLE pins (
    node INTEGER PRIMARY KEY REFERENCES segments,
    created REAL NOT NULL
, seal INTEGER NOT NULL DEFAULT 0x4000000000000000) STRICT;

-- format: the stored format that a base asks for, native for exact ones; NULL: that of its level;
-- module: what is known of a base that may be spliced in anywhere; NULL: an ordinary one
CREATE TABLE "bases" (
    id INTEGER PRIMARY KEY,
    tokenizer INTEGER NOT NULL REFERENCES tokenizers,
    scope TEXT NOT NULL,
    name TEXT NOT NULL,
    level INTEGER NOT NULL,
    node INTEGER NOT NULL REFERENCES segments,
    n_tokens INTEGER NOT NULL,
    digest BLOB NOT NULL,
    created REAL NOT NULL,
    format TEXT,
    module TEXT,
    seal INTEGER NOT NULL DEFAULT 0x4000000000000000,
    UNIQUE (tokenizer, scope, name)
) STRICT;
CREATE INDEX bases_node ON bases(node);

CREATE TABLE "workflows" (
    pk INTEGER PRIMARY KEY,
    tokenizer INTEGER NOT NULL REFERENCES tokenizers,
    scope TEXT NOT NULL,
    id TEXT NOT NULL,
    named INTEGER NOT NULL,
    started REAL NOT NULL,
    ended REAL,
    seal INTEGER NOT NULL DEFAULT 0x4000000000000000
) STRICT;
CREATE INDEX workflows_name ON workflows(tokenizer, scope, id, started);

-- tip names a segment that may be gone by now
CREATE TABLE invocations (
    id INTEGER PRIMARY KEY,
    workflow INTEGER NOT NULL REFERENCES workflows ON DELETE CASCADE,
    agent TEXT NOT NULL,
    session TEXT NOT NULL,
    tip INTEGER NOT NULL,
    n_prompt INTEGER NOT NULL,
    n_reply INTEGER NOT NULL,
    arrived REAL NOT NULL,
    answered REAL NOT NULL,
    stop TEXT NOT NULL
, seal INTEGER NOT NULL DEFAULT 0x4000000000000000) STRICT;
CREATE INDEX invocations_workflow ON invocations(workflow);

-- frozen = 0: a copy, its session still has its tokens; base: the context of the blob
CREATE TABLE cold (
    session INTEGER PRIMARY KEY REFERENCES sessions,
    base INTEGER REFERENCES segments,
    n_base INTEGER NOT NULL CHECK (n_base >= 0),
    frozen INTEGER NOT NULL DEFAULT 0,
    turns BLOB NOT NULL,
    marks BLOB NOT NULL,
    digest BLOB NOT NULL CHECK (length(digest) = 16)
, seal INTEGER NOT NULL DEFAULT 0x4000000000000000) STRICT;
CREATE INDEX cold_base ON cold(base) WHERE base IS NOT NULL;

-- apart from what is read at every start
CREATE TABLE blobs (
    session INTEGER PRIMARY KEY REFERENCES cold,
    blob BLOB NOT NULL
, seal INTEGER NOT NULL DEFAULT 0x4000000000000000) STRICT;

-- which store this is, how many transactions changed it, and the sum of all seals
CREATE TABLE ledger (
    one INTEGER PRIMARY KEY CHECK (one = 1),
    store INTEGER NOT NULL,
    seq INTEGER NOT NULL CHECK (seq >= 0),
    total INTEGER NOT NULL,
    seal INTEGER NOT NULL
) STRICT;
"""

_RESPONSES = """
-- what POST /v1/conversations made; scope: the tenant's; AUTOINCREMENT, here and below: a response that
-- is being made names rows that may be deleted meanwhile
CREATE TABLE conversations (
    id INTEGER PRIMARY KEY AUTOINCREMENT,
    scope TEXT NOT NULL,
    name TEXT NOT NULL,
    metadata TEXT NOT NULL,
    created REAL NOT NULL,
    seal INTEGER NOT NULL DEFAULT 0x4000000000000000,
    UNIQUE (scope, name)
) STRICT;

-- session: the one whose turn the item was said in, NULL before
CREATE TABLE conversation_items (
    id INTEGER PRIMARY KEY AUTOINCREMENT,
    conversation INTEGER NOT NULL REFERENCES conversations,
    session INTEGER REFERENCES sessions,
    name TEXT NOT NULL,
    body BLOB NOT NULL,
    created REAL NOT NULL,
    seal INTEGER NOT NULL DEFAULT 0x4000000000000000,
    UNIQUE (conversation, name)
) STRICT;
CREATE INDEX conversation_items_session ON conversation_items(session) WHERE session IS NOT NULL;

-- parent: the response whose items its own ones follow, the first n_shared of them or all (NULL);
-- last_item: the last of its conversation's items that it followed, 0 for none; hidden: deleted, but
-- needed by a later response; input: its own items
CREATE TABLE responses (
    id INTEGER PRIMARY KEY AUTOINCREMENT,
    scope TEXT NOT NULL,
    name TEXT NOT NULL,
    parent INTEGER REFERENCES responses,
    n_shared INTEGER CHECK (n_shared >= 0),
    conversation INTEGER REFERENCES conversations,
    last_item INTEGER NOT NULL DEFAULT 0,
    session INTEGER REFERENCES sessions,
    hidden INTEGER NOT NULL DEFAULT 0,
    input BLOB NOT NULL,
    body BLOB NOT NULL,
    created REAL NOT NULL,
    seal INTEGER NOT NULL DEFAULT 0x4000000000000000,
    UNIQUE (scope, name)
) STRICT;
CREATE INDEX responses_parent ON responses(parent) WHERE parent IS NOT NULL;
CREATE INDEX responses_conversation ON responses(conversation) WHERE conversation IS NOT NULL;
CREATE INDEX responses_session ON responses(session) WHERE session IS NOT NULL;
"""
_MEDIA = """
-- media of sessions whose file is kept in media/; key: of the ids that stand for it; ordinal: which of the media it is
-- that are made of its file
CREATE TABLE media (
    id INTEGER PRIMARY KEY AUTOINCREMENT,
    session INTEGER NOT NULL REFERENCES sessions,
    key BLOB NOT NULL CHECK (length(key) = 16),
    ordinal INTEGER NOT NULL,
    name TEXT NOT NULL,
    bytes INTEGER NOT NULL,
    digest BLOB NOT NULL CHECK (length(digest) = 16),
    created REAL NOT NULL,
    seal INTEGER NOT NULL DEFAULT 0x4000000000000000,
    UNIQUE (session, key)
) STRICT;
CREATE INDEX media_name ON media(name);
CREATE INDEX media_digest ON media(digest);
"""
MIGRATIONS = {8: _RESPONSES, 9: _MEDIA}
"""By version, what leads from it to the next one."""
SCHEMA = _FIRST + "".join(MIGRATIONS.values())
