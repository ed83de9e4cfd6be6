"""Prices of object stores and of machines, with where they are from. All in US dollars."""

from __future__ import annotations

from dataclasses import dataclass

from lab.scale.requests import Requests

GB = 1e9
MONTH_S = 30 * 86400.0


@dataclass(frozen=True, slots=True)
class StorePrices:
    """What an object store costs, and what it takes."""

    name: str
    source: str
    gb_month: float
    put_1k: float
    """1,000 PUT or LIST requests."""
    get_10k: float
    """10,000 GET or HEAD requests."""
    out_gb: float
    """A GB that is fetched by machines outside of the store's region."""
    puts_a_second: float
    """Of one partition (S3) or server: PUT."""
    gets_a_second: float
    """GET and HEAD."""

    def requests_cost(self, requests: Requests) -> float:
        """Of requests alone."""
        puts, gets = requests.put + requests.list, requests.get + requests.head
        return puts * self.put_1k / 1e3 + gets * self.get_10k / 1e4

    def storage_cost(self, n_bytes: float, months: float = 1) -> float:
        """Of bytes that are there so long."""
        return n_bytes / GB * self.gb_month * months


STORES = {
    "s3": StorePrices(
        "S3 Standard",
        "list prices of us-east-1, first 50 TB, first 10 TB out, as known in 2026 and not looked up again; requests a second as the "
        "S3 user guide promises for a partitioned prefix",
        gb_month=0.023,
        put_1k=0.005,
        get_10k=0.004,
        out_gb=0.09,
        puts_a_second=3500,
        gets_a_second=5500,
    ),
    "own": StorePrices(
        "own servers",
        "assumed: servers of 12 disks of 20 TB for 12,000 dollars, three years, three copies, as much again for power "
        "and people; requests are paid with the servers, and a server takes 1,000 PUT or 3,000 GET a second",
        gb_month=round(3 * 2 * 12_000 / 36 / (12 * 20_000), 4),
        put_1k=0.0,
        get_10k=0.0,
        out_gb=0.0,
        puts_a_second=1000,
        gets_a_second=3000,
    ),
}


@dataclass(frozen=True, slots=True)
class Machine:
    """A model on a machine."""

    name: str
    source: str
    kv_bytes: int
    """Of a token's rows, as computed (16 bits a number)."""
    tokens_a_second: float
    """That it evaluates of prompts."""
    dollars_an_hour: float

    def stored_bytes(self, bits: float) -> int:
        """Of a token's rows in so many bits a number."""
        return round(self.kv_bytes * bits / 16)

    @property
    def prefill_cost(self) -> float:
        """Of evaluating a token."""
        return self.dollars_an_hour / 3600 / self.tokens_a_second


MACHINES = {
    "1b-cpu": Machine(
        "1B on 2 cores",
        "docs/benchmarks.md, `bench resume`: 2,048 tokens in 42 s; 0.09 dollars an hour for two cores is assumed",
        kv_bytes=32_768,
        tokens_a_second=2048 / 42.1,
        dollars_an_hour=0.09,
    ),
    "1b-h100": Machine(
        "1B on an H100",
        "docs/benchmarks.md, `bench resume --tokens 16384`: 0.382 s; 3 dollars an hour is assumed",
        kv_bytes=32_768,
        tokens_a_second=16_384 / 0.382,
        dollars_an_hour=3.0,
    ),
    "8b-h100": Machine(
        "8B on an H100",
        "estimated: 16 GFLOP a token at 40 % of 989 TFLOP/s; 32 layers of 8 KV heads of 128",
        kv_bytes=131_072,
        tokens_a_second=0.4 * 989e12 / 16e9,
        dollars_an_hour=3.0,
    ),
    "70b-4h100": Machine(
        "70B on four H100",
        "estimated: 140 GFLOP a token at 40 %; 80 layers of 8 KV heads of 128",
        kv_bytes=327_680,
        tokens_a_second=4 * 0.4 * 989e12 / 140e9,
        dollars_an_hour=12.0,
    ),
    "mla-8h100": Machine(
        "671B, MLA, on eight H100",
        "estimated: 37 G active parameters, 74 GFLOP a token at 40 %; 61 layers of 576 numbers",
        kv_bytes=2 * 61 * 576,
        tokens_a_second=8 * 0.4 * 989e12 / 74e9,
        dollars_an_hour=24.0,
    ),
}
