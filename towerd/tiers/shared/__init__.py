"""The tier below warm: segments, and what sessions and bases are made of, as objects in an object store.

From the bottom up, each importing lower floors alone (tests/test_imports.py):

    bucket, sealing     objects of an object store; keys of tenants
    naming, records     what an object says of others; what a record's name says of it
    deleting/           leases of who reads or writes, lists of what goes, and the collector
    objects             rows and states in parts
    marks, heads        rows found by tokens; the records of a session that no other one contains
    checkpoints         states put and fetched as rows are
    tier                a path of tokens, put and fetched
    fetcher, leaving    what is looked up before a prompt; what is put before it leaves the disk
"""
