"""Token buckets on a clock that only tests move, and with real threads."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pario.plane.bucket import BURST_S, UNLIMITED, Bucket, Rates, Tokens


class Clock:
    """Waiting moves it."""

    def __init__(self) -> None:
        self.now = 0.0
        self.waits: list[float] = []

    def __call__(self) -> float:
        return self.now

    def wait(self, condition: threading.Condition, seconds: float) -> None:
        self.waits.append(seconds)
        self.now += seconds


def made(rates: Rates) -> tuple[Bucket, Clock]:
    clock = Clock()
    return Bucket(rates, clock=clock, wait=clock.wait), clock


def test_the_rate_is_kept() -> None:
    bucket, clock = made((1000.0, None))
    for _ in range(100):
        bucket.take(50, 1)
    # What was in the bucket came at once, and the last read is let in when all before it is paid for.
    assert clock.now == pytest.approx((100 * 50 - 50 - 1000 * BURST_S) / 1000)
    assert bucket.used == [5000, 100]


def test_operations_are_another_resource() -> None:
    bucket, clock = made((None, 10.0))
    for _ in range(21):
        bucket.take(1 << 30, 1)
    assert clock.now == pytest.approx((20 - 10 * BURST_S) / 10)
    bucket, clock = made((10.0, 1e9))
    bucket.take(1000, 1)
    bucket.take(0, 1)  # a stat waits for no bytes
    bucket.take(0, 0)
    assert clock.now == 0
    bucket.take(1, 1)
    assert clock.now == pytest.approx(100 - BURST_S)


def test_a_read_larger_than_the_bucket_waits_for_earlier_ones_only() -> None:
    bucket, clock = made((100.0, None))
    bucket.take(1000, 1)
    assert clock.now == 0
    bucket.take(1, 1)
    assert clock.now == pytest.approx((1000 - 100 * BURST_S) / 100)


def test_no_more_than_a_burst_is_kept() -> None:
    bucket, clock = made((100.0, None))
    clock.now = 1000.0
    bucket.take(int(100 * BURST_S), 1)
    bucket.take(100, 1)
    before = clock.now
    bucket.take(1, 1)
    assert clock.now - before == pytest.approx(1.0)


def test_without_a_limit_nobody_waits() -> None:
    bucket, clock = made(UNLIMITED)
    bucket.take(1 << 60, 1 << 60)
    bucket.take(1, 1)
    assert clock.waits == []


@settings(max_examples=100, deadline=None)
@given(
    st.lists(
        st.tuples(st.floats(1, 1e6), st.integers(0, 10**6), st.floats(0, 5)), min_size=1, max_size=30
    )
)
def test_never_more_than_the_rates_allow(steps: list[tuple[float, int, float]]) -> None:
    """Whatever the rate does: what was taken before the last read is at most what came, and one read per change, since
    a lower rate forgives a part of the debt."""
    clock = Clock()
    bucket = Bucket((steps[0][0], None), clock=clock, wait=clock.wait)
    came, highest = steps[0][0] * BURST_S, steps[0][0]
    for rate, nbytes, pause in steps:
        bucket.set_rates((rate, None))
        before = clock.now
        bucket.take(nbytes, 1)
        clock.now += pause
        came += (clock.now - before) * rate
        highest = max(highest, rate)
    reads = sum(nbytes for _, nbytes, _ in steps)
    if len({rate for rate, _, _ in steps}) == 1:
        assert reads - steps[-1][1] <= came + 1e-3
    assert all(wait <= 10**6 / min(rate for rate, _, _ in steps) + 1e-6 for wait in clock.waits)


def test_a_debt_too_small_for_the_clock() -> None:
    """At this time the next number of a clock is 2 ns away."""
    bucket, clock = made((1e6, None))
    clock.now = 1e7
    bucket.take(100_000, 1)
    bucket._tokens[0].due = clock.now + 2e-9
    bucket.take(1, 1)
    assert clock.waits == []
    bucket.take(10, 1)
    assert clock.waits == [pytest.approx(1e-6, rel=0.1)]


@pytest.mark.parametrize(("before", "after"), [(1000.0, 10.0), (10.0, 1000.0), (100.0, 100.0)])
def test_a_new_rate_makes_nobody_wait_longer(before: float, after: float) -> None:
    tokens = Tokens(before, 0.0)
    tokens.take(5 * before, 0.0)
    waited = tokens.due - 1.0
    tokens.set_rate(after, 1.0)
    assert tokens.due - 1.0 == pytest.approx(waited * min(1.0, before / after))


def test_a_limit_where_there_was_none_and_back() -> None:
    tokens = Tokens(None, 0.0)
    tokens.take(1e12, 0.0)
    tokens.set_rate(10.0, 1.0)
    assert tokens.due <= 1.0
    tokens.take(100, 1.0)
    assert tokens.due == pytest.approx(1.0 + 10 - BURST_S)
    tokens.set_rate(None, 1.0)
    assert tokens.due <= 1.0


def test_how_long_threads_were_held_up() -> None:
    bucket, clock = made((100.0, None))
    bucket.take(110, 1)
    bucket.take(100, 1)  # waits for a second
    clock.now += 1.0  # and now the debt is paid
    assert bucket.hold_ups() == pytest.approx((2.0, 1.0, 0.0))
    bucket.take(10, 1)
    assert bucket.hold_ups() == (0.0, 0.0, 0.0)
    bucket, clock = made((None, 10.0))
    bucket.take(1, 11)
    bucket.take(1, 1)
    assert bucket.hold_ups() == pytest.approx((1.0, 0.0, 1.0))


# -- threads -----------------------------------------------------------------------------------------------------------


def run(*calls: Callable[[], None]) -> list[threading.Thread]:
    threads = [threading.Thread(target=call, daemon=True) for call in calls]
    for thread in threads:
        thread.start()
    return threads


def joined(threads: list[threading.Thread], limit_s: float = 5.0) -> None:
    for thread in threads:
        thread.join(limit_s)
        assert not thread.is_alive()


@pytest.mark.parametrize("change", ["rate", "no limit", "close"])
def test_waiting_threads_notice(change: str) -> None:
    """Eight threads for which there are no tokens before tomorrow."""
    came = threading.Semaphore(0)
    bucket = Bucket((1e-3, None), held_up=came.release)
    bucket.take(1000, 1)
    threads = run(*[lambda: bucket.take(1, 1)] * 8)
    assert came.acquire(timeout=5)
    assert all(thread.is_alive() for thread in threads)
    assert bucket.hold_ups()[1] > 0
    begin = time.monotonic()
    {
        "rate": lambda: bucket.set_rates((1e9, None)),
        "no limit": lambda: bucket.set_rates(UNLIMITED),
        "close": bucket.close,
    }[change]()
    joined(threads)
    assert time.monotonic() - begin < 1.0
    assert bucket.used == [1008, 9]
    if change == "close":
        bucket.take(10**9, 1)
        bucket.take(10**9, 1)


def test_first_come_first_served() -> None:
    order: list[int] = []
    bucket = Bucket((1000.0, None))
    bucket.take(300, 1)
    threads = []
    for k in range(5):

        def take(k: int = k) -> None:
            bucket.take(10, 1)
            order.append(k)

        threads += run(take)
        end = time.monotonic() + 5
        while len(bucket._waiting) < k + 1 and time.monotonic() < end:
            time.sleep(0.001)
    joined(threads)
    assert order == list(range(5))


def test_threads_together_keep_the_rate() -> None:
    bucket = Bucket((2e6, None))
    begin = time.monotonic()

    def reads() -> None:
        for _ in range(50):
            bucket.take(1000, 1)

    joined(run(*[reads] * 8))
    seconds = time.monotonic() - begin
    assert seconds >= (8 * 50 * 1000 - 1000) / 2e6 - BURST_S - 1e-3
    assert bucket.used == [400_000, 400]


def test_an_interrupted_thread_leaves_the_line() -> None:
    def interrupted(condition: threading.Condition, seconds: float) -> None:
        raise KeyboardInterrupt

    bucket = Bucket((1.0, None), wait=interrupted)
    bucket.take(10, 1)
    with pytest.raises(KeyboardInterrupt):
        bucket.take(1, 1)
    assert bucket.used == [10, 1]
    bucket.close()
    bucket.take(1, 1)


def test_who_waits_for_bytes_takes_its_operation_when_it_goes_on() -> None:
    """Those who come during one long wait do not all go on at its end."""
    bucket, ended = Bucket((1e6, 10.0)), []
    begin = time.monotonic()
    bucket.take(500_000, 1)  # paid for after 0.4 s

    def take() -> None:
        bucket.take(1, 1)
        ended.append(time.monotonic() - begin)

    threads = [threading.Thread(target=take) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert len(ended) == 6
    assert all(at > 0.4 + (k - 1) / 10 - 0.01 for k, at in enumerate(sorted(ended)))


def test_who_is_interrupted_takes_nothing() -> None:
    clock, over = Clock(), [False]

    def wait(condition: threading.Condition, seconds: float) -> None:
        if not over[0]:
            raise KeyboardInterrupt
        clock.wait(condition, seconds)

    bucket = Bucket((1e6, None), clock=clock, wait=wait)
    bucket.take(2_000_000, 1)
    with pytest.raises(KeyboardInterrupt):
        bucket.take(5_000_000, 1)
    over[0] = True
    bucket.take(1, 1)
    assert clock.now == pytest.approx(2 - BURST_S)
    assert bucket.used == [2_000_001, 2]


def test_a_new_rate_is_that_of_all_who_wait() -> None:
    """In the order in which they came, and of both resources."""
    clock, ended = Clock(), []

    def wait(condition: threading.Condition, seconds: float) -> None:
        condition.wait(0.001)  # others take the lock meanwhile

    bucket = Bucket((100.0, 10.0), clock=clock, wait=wait)
    bucket.take(110, 1)  # paid for at 1.0

    def take(k: int) -> None:
        bucket.take(100, 1)
        ended.append((k, clock.now))

    threads = []
    for k in range(3):  # at 1, 2, 3 s
        threads.append(threading.Thread(target=take, args=(k,)))
        threads[-1].start()
        end = time.monotonic() + 20
        while len(bucket._waiting) <= k and time.monotonic() < end:
            time.sleep(0.001)
    bucket.set_rates((200.0, 10.0))  # now at 0.5, 1, 1.5 s
    assert [each.at for each in bucket._waiting] == pytest.approx([0.5, 1.0, 1.5])
    bucket.set_rates((None, 1.0))  # one operation after the other
    assert [each.at for each in bucket._waiting] == pytest.approx([0.0, 1.0, 2.0])
    clock.now = 100.0
    for thread in threads:
        thread.join(30)
    assert sorted(k for k, _ in ended) == [0, 1, 2]
