"""Every rule of the advice, with made traces on both sides of its threshold."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Any

import pytest

from pario.stats.advise import RULES, Job, advise
from pario.stats.rank import RankStats
from pario.stats.trace_summary import FileRequests, LoaderSummary, RankSummary, read_ranks


def rank(number: int = 0, *, options: dict[str, Any] | None = None, file: Any = None, **stats: Any) -> RankSummary:
    """One rank that reads one file, in which nothing is out of the ordinary."""
    known: dict[str, Any] = {"reader": True, "batches": 100, "loop": 10.0, "tuned": True, "node": number}
    known |= {"node_bytes": 10**9, "bytes_read": 10**9, "reads": 1000, "consumer": 3.0, "decode": 1.0, "read": 2.0}
    asked: dict[str, Any] = {"reads": 1000, "nbytes": 10**9, "seconds": 8.0, "known": 1000, "fs": "ext4"}
    return RankSummary(
        number,
        size=2,
        node=number,
        seconds=11.0,
        files=[FileRequests("/d/data.mdb", **(asked | (file or {})))],
        loaders=[LoaderSummary("/d", {"shuffle": "none"} | (options or {}), RankStats(number, **(known | stats)))],
    )


def said(*ranks: RankSummary) -> dict[str, str]:
    return {each.rule: str(each) for each in advise(ranks)}


def test_an_ordinary_job_is_told_what_limits_it_and_nothing_else() -> None:
    assert list(said(rank(0), rank(1))) == ["unbound"]
    assert advise([]) == []


def test_two_loaders_of_one_rank_are_one_rank() -> None:
    """One for training, one for testing: neither is a straggler, nor does one get too little."""
    one = rank(0)
    small = LoaderSummary("/d", {"shuffle": "none"}, RankStats(0, reader=True, batches=2, loop=0.1, consumer=0.05))
    one.loaders.append(small)
    assert list(said(one)) == ["unbound"]
    (stats,) = Job([one]).datasets["/d"]
    assert (stats.batches, stats.loop) == (102, pytest.approx(10.1))


def test_the_store_limits() -> None:
    busy = {"waiting": 8.0, "share": 7.5, "consumer": 1.0, "read": 9.5, "reading": 60.0, "depth": 8}
    text = said(rank(**busy, tuned=False))["store-bound"]
    assert "your own code took 10%" in text
    assert "waiting for bytes 75%" in text
    assert "the store was busy 95% of the time" in text
    assert 'Options(inflight="auto") in place of 8' in text
    assert "inflight" not in said(rank(**busy))["store-bound"].splitlines()[1]
    far = said(rank(**busy, options={"shuffle": "global"}, file={"shared": True}))["store-bound"]
    assert 'shuffle="block" in place of "global"' in far
    assert "PARIO_TIERS" in far
    held = said(rank(**busy, tuned=False, held=50.0))["store-bound"]
    assert "the job's share in the control plane's rules" in held.splitlines()[1]


def test_the_consumer_limits() -> None:
    text = said(rank(consumer=8.7))["consumer-bound"]
    assert "your own code took 87%" in text
    assert "Nothing to change in pario" in text


def test_the_decoder_limits() -> None:
    text = said(rank(consumer=0.5, decode=8.0))["decoder-bound"]
    assert "decoding 80%" in text
    assert "decode_threads" in text


@pytest.mark.parametrize(
    ("small", "reads", "told"),
    [(1000, 5000, False), (1001, 5000, True), (1001, 10_010, False), (1002, 10_000, True), (1001, 0, False)],
)
def test_small_requests(small: int, reads: int, told: bool) -> None:
    found = said(rank(file={"reads": reads, "small": small, "seconds": reads * 2e-3}))
    assert ("small requests" in found) == told
    if told:
        assert f"{small:,} of {reads:,} requests" in found["small requests"]
        assert "2.0 ms on average" in found["small requests"]
        assert "gap_bytes" in found["small requests"]


def test_small_requests_are_free_out_of_a_cache_and_belong_to_random_order() -> None:
    file = {"reads": 5000, "small": 5000, "seconds": 0.1}
    assert "come out of a cache" in said(rank(file=file))["small requests"]
    text = said(rank(file=file | {"seconds": 10.0}, options={"shuffle": "global"}))["small requests"]
    assert 'shuffle="block"' in text


@pytest.mark.parametrize(
    ("file", "told"),
    [
        ({"random": 201, "rotating": True}, True),
        ({"random": 200, "rotating": True}, False),
        ({"random": 1000, "rotating": False}, False),
        ({"random": 1000, "rotating": None, "shared": False}, False),
        ({"random": 1000, "rotating": None, "shared": True, "seconds": 3.1}, True),  # it takes as long as a seek
        ({"random": 1000, "rotating": None, "shared": True, "seconds": 1.0}, False),
        ({"random": 50, "rotating": True, "known": 60}, False),  # too few to say so
    ],
)
def test_random_requests(file: dict[str, Any], told: bool) -> None:
    found = said(rank(file=file))
    assert ("random requests" in found) == told
    if told:
        assert f"{file['random']:,} of 1,000 requests" in found["random requests"]
        assert 'shuffle="block"' in found["random requests"]


@pytest.mark.parametrize(("consumer", "told"), [(3.0, False), (3.6, False), (3.8, True)])
def test_stragglers(consumer: float, told: bool) -> None:
    """Busy 4 s on two ranks, 4 to 4.8 s on the third: 15 % of that are 0.72 s."""
    found = said(rank(0), rank(1, consumer=consumer), rank(2))
    assert ("straggler" in found) == told
    if told:
        assert (
            "rank 1 (node 1) is a straggler: it was busy 4.80 s, the median of the others 4.00 s (17% less)"
            in (found["straggler"])
        )
        assert "its own code" in found["straggler"]
    assert "straggler" not in said(rank(0, consumer=9.0))  # nobody beside it


def test_a_straggler_in_decoding_and_one_in_reading() -> None:
    assert "decode_threads" in said(rank(0), rank(1, decode=3.0))["straggler"]
    slow = said(rank(0, read=5.0), rank(1, read=6.0))
    assert "the store gave rank 1 (node 1) 167 MB/s, the other reading ranks 200 MB/s" in slow["straggler"]
    assert "straggler" not in said(rank(0, read=5.0), rank(1, read=5.5))


@pytest.mark.parametrize(("nbytes", "told"), [(10**9, False), (7 * 10**8, False), (69 * 10**7, True)])
def test_imbalance(nbytes: int, told: bool) -> None:
    found = said(rank(0), rank(1, node_bytes=nbytes))
    assert ("imbalance" in found) == told
    if told:
        assert "rank 0 got 1 GB, rank 1 690 MB (31% less)" in found["imbalance"]
        assert "Budget" in found["imbalance"]
    found = said(rank(0), rank(1, bytes_read=nbytes))
    assert ("imbalance" in found) == told
    assert not told or "one rank reads" in found["imbalance"]


@pytest.mark.parametrize(
    ("found", "told"),
    [
        ({"file": {"meta_seconds": 30.5, "opens": 7, "stats": 9}}, True),
        ({"file": {"meta_seconds": 29.5}}, False),
        ({"open": 31.0}, True),
    ],
)
def test_metadata(found: dict[str, Any], told: bool) -> None:
    text = said(rank(0), rank(1, **found)).get("metadata", "")
    assert bool(text) == told
    if told:
        assert "Rank 1 spent 3" in text
        assert "pario data index" in text
        assert "file" not in found or "7 opens, 9 looks at a path" in text


def test_more_is_read_than_used() -> None:
    text = said(rank(file={"nbytes": 16 * 10**8}))["read amplification"]
    assert "1.6 GB for 1 GB of records: 1.6 times as much" in text
    assert "read amplification" not in said(rank(file={"nbytes": 15 * 10**8}))


def test_reads_of_others_are_said() -> None:
    one = rank()
    one.kernel = {"rchar": 1_400_000_000}
    assert "untraced reads" not in said(one)
    one.kernel = {"rchar": 1_500_000_000}
    assert "read 1.5 GB by the kernel's count, of which 1 GB" in said(one)["untraced reads"]


def test_dropped_events_are_said() -> None:
    one = rank()
    one.dropped, one.dropped_reads, one.dropped_bytes = 12_000, 400, 10**6
    assert "12,000 events had no room, among them 400 requests of 1 MB" in said(one)["dropped events"]


def test_every_sentence_has_numbers_and_every_rule_is_tested() -> None:
    assert list(RULES) == [
        *("bound", "straggler", "imbalance", "random", "small", "metadata", "amplified", "unseen"),
        "dropped",
    ]
    worst = rank(
        0,
        file={"reads": 9000, "small": 9000, "random": 900, "rotating": True, "nbytes": 3 * 10**9},
        consumer=9.0,
        open=40.0,
    )
    worst.dropped = 1
    found = advise([worst, rank(1, node_bytes=10**8)])
    assert {each.rule for each in found} == {
        *("consumer-bound", "straggler", "imbalance", "random requests", "small requests"),
        *("metadata", "read amplification", "dropped events"),
    }
    for each in found:
        assert any(letter.isdigit() for letter in each.finding)
        assert each.finding.endswith(".")
        assert each.change.endswith(".")


def test_what_was_written_is_read_back() -> None:
    ranks = [rank(1), rank(0)]
    ranks[0].loaders[0].stats.knobs = {"inflight": {"value": 4, "reason": "enough", "pinned": False}}
    head = json.loads(json.dumps({"ranks": [asdict(each) for each in ranks]}))
    ranks[0].loaders[0].stats.knobs = {}  # written for others; no advice speaks of them
    assert read_ranks(head, "t.json") == ranks[::-1]
    assert Job(ranks).head() == "2 ranks on 2 nodes, 11.00 s, 2,000 requests of 2 GB together"
