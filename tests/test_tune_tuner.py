"""The control law of the prefetch depth, against simulated stores whose best depth is known from arithmetic."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
from simulated_store import Job, Store, jain

from pario.tune.depth import Depth
from pario.tune.knobs import START_DEPTH, Knob
from pario.tune.tuner import FastProbe, Window

#: seconds of latency, bytes per second, bytes of a read
FUSE = 0.020, 200e6, 197_000
FUSE_LONG = 0.020, 200e6, 1 << 20
LUSTRE = 0.005, 1.5e9, 1 << 20
HARD_DISK = 0.005, 18e6, 197_000


def depth(least: int = 1, most: int = 64) -> Depth:
    return Depth(Knob("reads in flight", least, most, START_DEPTH))


def one_job(kind: tuple[float, float, int], jitter: float = 0.3, **how: float) -> tuple[Store, Job]:
    latency, bytes_per_s, nbytes = kind
    store = Store(latency, bytes_per_s, jitter=jitter)
    job = Job(store, nbytes, depth(), **how)  # type: ignore[arg-type]
    job.start()
    return store, job


@pytest.mark.parametrize("jitter", [0.0, 0.3])
@pytest.mark.parametrize("kind", [FUSE, FUSE_LONG, LUSTRE, HARD_DISK])
def test_the_store_is_busy_with_few_reads(kind, jitter) -> None:
    store, job = one_job(kind, jitter)
    store.run(8)
    cap = store.bytes_per_s
    assert job.time_to(0.9 * cap, 0) <= 1
    assert job.rate(2, 8) >= (0.95 if jitter == 0 else 0.92) * cap
    # Of few reads one or two wait: half of four is a queue of two.
    assert job.mean_depth(2, 8) <= max(1.6 * store.smallest_depth(kind[2]), store.smallest_depth(kind[2]) + 2.5)


@pytest.mark.parametrize("start", [2, 4, 8])
def test_a_disk_is_not_swamped(start) -> None:
    """One read at a time: those of a second group would only delay the first one's last. Not even if the pages of the
    tree have brought the depth to eight."""
    for nbytes in (197_000, 1 << 20):
        store = Store(0.0, 18e6, jitter=0.0)
        job = Job(store, nbytes, Depth(Knob("reads in flight", 1, 64, start)))
        job.start()
        store.run(3)
        assert max(value for _, value in job.depths) <= max(4, start // 2)
        assert job.rate(0, 3) >= 0.95 * store.bytes_per_s
        assert job.mean_depth(1.5, 3) <= 4.5


def test_where_no_depth_is_enough() -> None:
    """Small reads: as many as there may be, although each probe says that half of them are as fast."""
    store, job = one_job((0.020, 200e6, 4096))
    store.run(10)
    assert job.mean_depth(3, 10) >= 58
    assert job.rate(3, 10) >= 0.9 * 64 * 4096 / 0.020


def test_a_store_that_becomes_slower_and_faster() -> None:
    latency, bytes_per_s, nbytes = FUSE
    store, job = one_job(FUSE)
    store.run(4)
    store.bytes_per_s = bytes_per_s / 3
    store.run(10)
    assert job.time_to(0.9 * store.bytes_per_s, 4) <= 5
    assert job.mean_depth(7, 10) <= 2 * store.smallest_depth(nbytes)
    store.bytes_per_s = bytes_per_s
    store.run(16)
    assert job.time_to(0.9 * bytes_per_s, 10) <= 5
    store.latency = 3 * latency
    store.run(24)
    assert job.time_to(0.9 * bytes_per_s, 16) <= 15
    store.latency = latency
    store.run(32)
    assert job.time_to(0.9 * bytes_per_s, 24) <= 5
    assert job.mean_depth(29, 32) <= 1.5 * store.smallest_depth(nbytes)


@pytest.mark.parametrize(
    "kind", [FUSE, FUSE_LONG, (0.020, 200e6, 4 << 20), (0.003, 50e6, 197_000), (0.002, 200e6, 1 << 20)]
)
def test_a_job_alone_has_the_store_for_itself(kind) -> None:
    """Few bytes in queues are few long reads, and a probe must not cost what the others bring."""
    rates = []
    for seed in range(5):
        store = Store(*kind[:2], seed=seed)
        job = Job(store, kind[2], depth())
        job.start()
        store.run(10)
        rates.append(job.rate(2, 10) / store.bytes_per_s)
    assert sum(rates) / len(rates) >= 0.965  # 0.971 to 0.990


@pytest.mark.parametrize("kind", [FUSE, FUSE_LONG, LUSTRE])
def test_a_store_that_answers_ten_times_later(kind) -> None:
    """The first slow reads are no queue: nothing shrinks before that is known."""
    latency, bytes_per_s, nbytes = kind
    store, job = one_job(kind)
    store.run(4)
    store.latency = 10 * latency
    store.run(14)
    cap = min(bytes_per_s, 64 * nbytes / store.latency)
    quarters = [4 + 0.25 * k for k in range(40)]
    assert 0.25 * sum(job.rate(when, when + 0.25) < cap / 2 for when in quarters) <= 1.5
    store.latency = latency
    store.run(20)
    assert job.time_to(0.9 * bytes_per_s, 14) <= 1


def test_jobs_with_reads_of_other_sizes_share_a_store() -> None:
    """By bytes, not by reads."""
    found = []
    pairs = [(197_000, 1 << 20, 50e6, 0.020), (65_536, 1 << 20, 50e6, 0.020), (197_000, 400_000, 100e6, 0.010)]
    for (one, other, bytes_per_s, latency), seed in itertools.product(pairs, range(2)):
        store = Store(latency, bytes_per_s, seed=seed)
        jobs = [Job(store, nbytes, depth()) for nbytes in (one, other)]
        for number, job in enumerate(jobs):
            job.start(2.0 * number)
        store.run(20)
        rates = [job.rate(10, 20) for job in jobs]
        assert sum(rates) >= 0.95 * bytes_per_s
        found.append(jain(rates))
    assert sum(found) / len(found) >= 0.95
    assert min(found) >= 0.85


@pytest.mark.parametrize("kind", [FUSE, FUSE_LONG, LUSTRE])
def test_four_jobs_share_a_store(kind) -> None:
    latency, bytes_per_s, nbytes = kind
    store = Store(latency, bytes_per_s)
    jobs = [Job(store, nbytes, depth()) for _ in range(4)]
    for number, job in enumerate(jobs):
        job.start(2.0 * number)
    store.run(22)
    rates = [job.rate(12, 22) for job in jobs]
    assert jain(rates) >= 0.95
    assert sum(rates) >= 0.95 * bytes_per_s
    alone = latency + nbytes / bytes_per_s
    assert max(job.mean_latency(12, 22) for job in jobs) <= 6 * alone


def test_jobs_do_not_chase_each_others_queue() -> None:
    """One that probes while the others do not takes their queue for a slow store. It must not double its depth then."""
    latency, bytes_per_s, nbytes = FUSE_LONG
    store = Store(latency, bytes_per_s, seed=1)
    jobs = [Job(store, nbytes, Depth(Knob("reads in flight", 1, 64, START_DEPTH), day=0.1)) for _ in range(4)]
    for number, job in enumerate(jobs):
        job.start(2.0 * number)
    store.run(24)
    assert sum(job.mean_depth(12, 24) for job in jobs) <= 6 * store.smallest_depth(nbytes)
    assert max(job.mean_latency(12, 24) for job in jobs) <= 6 * (latency + nbytes / bytes_per_s)


def test_the_bound_is_left_again() -> None:
    """A store that wants more than there may be, and then few: the law goes on probing at the bound."""
    latency, _, nbytes = FUSE
    store, job = one_job(FUSE)
    store.run(4)
    store.latency = 5 * latency
    store.run(16)
    assert job.time_to(0.9 * 64 * nbytes / (5 * latency), 4) <= 8
    assert job.depth.knob.value >= 55
    store.latency = latency
    store.run(26)
    assert job.mean_depth(22, 26) <= 1.5 * store.smallest_depth(nbytes)


@pytest.mark.parametrize("consumer_s", [0.040, 0.002, 0.0012])
def test_no_more_than_the_consumer_needs(consumer_s) -> None:
    """It never waits, and few reads are in flight: six groups of 42, as in a ring of six slots."""
    store, job = one_job(FUSE, consumer_s=consumer_s, ahead=6 * 42, group=42)
    store.run(16)
    assert job.rate(8, 16) >= 0.97 * (42 * FUSE[2] * int(8 / consumer_s / 42)) / 8
    needed = FUSE[0] / consumer_s
    assert job.mean_depth(8, 16) <= max(2, 1.6 * needed)


def test_a_consumer_that_becomes_fast_again() -> None:
    store, job = one_job(FUSE, consumer_s=0.040, ahead=6 * 42, group=42)
    store.run(12)
    assert job.depth.knob.value <= 2
    assert "consumer" in job.depth.knob.reason
    job.consumer_s = 1e-5
    store.run(18)
    assert job.time_to(0.9 * store.bytes_per_s, 12) <= 3


def test_a_pinned_depth_stays() -> None:
    store = Store(*FUSE[:2])
    job = Job(store, FUSE[2], depth(5, 5))
    job.start()
    store.run(3)
    assert (job.depth.knob.setting.value, job.depths) == (5, [])
    assert 0.015 < job.depth.latency < 0.030  # measured all the same, for the length of parts


def test_bounds_are_kept() -> None:
    store = Store(*FUSE[:2])
    job = Job(store, FUSE[2], depth(4, 12))
    job.start()
    store.run(6)
    assert {value for _, value in job.depths} <= set(range(4, 13))
    assert job.mean_depth(2, 6) > 11


# -- single windows ----------------------------------------------------------------------------------------------------

QUIET = Window(1, 0.25, latency=0.02, nbytes=1e5, most=64, in_flight=64, rate=100)


def test_a_queue_behind_the_first_read_is_looked_into() -> None:
    """Four reads of 10 ms each, one after the other, and four that are served together."""
    law = FastProbe()
    assert law.step(4, replace(QUIET, latency=0.025, alone=0.010)).value == 1
    assert law.drains
    assert law.step(1, replace(QUIET, latency=0.010, most=1)).value <= 4
    assert law._base == 0.010
    assert FastProbe().step(4, replace(QUIET, latency=0.012, alone=0.010)).value == 8
    assert FastProbe().step(8, replace(QUIET, latency=0.030, alone=0.010)).value == 16  # less than half of eight times


def test_a_leap_is_looked_into_from_above() -> None:
    """Twice as many reads: as slow as before, slower still, as fast as before the leap, and twice as slow."""

    def leapt() -> FastProbe:
        law, value = FastProbe(), 2
        for number in (1, 1, 1, 1, 1, 1):
            value = law.step(value, replace(QUIET, number=number, latency=max(0.010, 1e-3 * value))).value
        assert not law.hurried
        assert law.step(16, replace(QUIET, latency=0.1)).value == 32
        return law

    assert leapt().step(32, replace(QUIET, latency=0.102)).value == 64
    assert leapt().step(32, replace(QUIET, latency=0.25)).value == 32
    assert leapt().step(32, replace(QUIET, latency=0.016)) == (16, "a stall has passed: 16 ms each")
    law = leapt()
    for depth in (32, 16):
        assert law.step(depth, replace(QUIET, latency=0.2)).value == 16
    assert law.step(16, replace(QUIET, number=3, latency=0.1)).value < 16  # number 2 passed: its reads were slow
    assert law.drains


def test_a_failed_read_halves_it() -> None:
    law = FastProbe()
    assert law.step(9, replace(QUIET, failed=True)).value == 4
    assert law.step(1, replace(QUIET, failed=True)).value == 1


def test_reads_that_are_not_there_say_nothing() -> None:
    found = FastProbe().step(32, replace(QUIET, most=5))
    assert (found.value, found.reason) == (32, "no more than 5 reads were there to be made at once")


def test_reads_of_another_size_begin_anew() -> None:
    """Leaf pages before an epoch, and then records of a megabyte: their latency is no queue."""
    law = FastProbe()
    value = 2
    for _ in range(2):
        value = law.step(value, replace(QUIET, latency=0.001, nbytes=4096)).value
    assert value == 8
    assert law.step(8, replace(QUIET, latency=0.060, nbytes=1 << 20)).value == 16
    assert law._base == 0.060


def test_the_same_trace_gives_the_same_depths() -> None:
    """A queue of one read per ms behind 20 ms, replayed."""

    def replay() -> list[int]:
        law, value, found = FastProbe(), START_DEPTH, []
        for number in itertools.count():
            value = law.step(value, replace(QUIET, number=number, latency=max(0.020, value * 1e-3))).value
            found.append(value)
            if number == 60:
                return found

    found = replay()
    assert found == replay()
    assert found[:4] == [4, 8, 16, 32]
    assert all(21 <= value <= 32 or value in (11, 12) for value in found[6:])  # or a probe
    assert set(found[6:]) & {11, 12}
