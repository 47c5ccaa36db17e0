"""Waiting on a word: between threads, between processes, with signals, and where there is no futex."""

from __future__ import annotations

import mmap
import os
import signal
import subprocess
import sys
import threading
import time

import numpy as np
import pytest

from pario.comm import futex

WAYS = ["futex", "sleeping"]


@pytest.fixture(params=WAYS)
def way(request, monkeypatch) -> str:
    """The futex, and what replaces it on other systems."""
    if request.param == "sleeping":
        monkeypatch.setattr(futex, "wait", futex._wait_sleeping)
        monkeypatch.setattr(futex, "wake_all", lambda address: 0)
    elif futex._NR is None:
        pytest.skip("no futex on this system")
    return request.param


def words(n: int = 64) -> tuple[np.ndarray, int]:
    """int32[n] in memory that children of fork share, and its address."""
    word = np.frombuffer(mmap.mmap(-1, 4 * n), dtype=np.int32)
    return word, word.ctypes.data


def test_timeout(way) -> None:
    _, address = words()
    begin, used = time.monotonic(), time.process_time()
    assert futex.wait(address, 0, 0.3) is False
    assert 0.29 < time.monotonic() - begin < 3
    assert time.process_time() - used < 0.1


def test_another_value_returns_at_once(way) -> None:
    word, address = words()
    for value in (5, -1, -(2**31), 2**31 - 1):
        word[0] = value
        begin = time.monotonic()
        assert futex.wait(address, 4, 10) is True
        assert time.monotonic() - begin < 5
        assert futex.wait(address, value, 0.001) is False


def test_between_threads(way) -> None:
    """The GIL is free while a thread waits, and two threads on one word are both woken."""
    word, address = words()
    seen: list[int] = []

    def wait() -> None:
        while word[3] == 0:
            futex.wait(address + 12, 0, 10)
        seen.append(int(word[3]))

    threads = [threading.Thread(target=wait) for _ in range(2)]
    for thread in threads:
        thread.start()
    time.sleep(0.05)
    assert seen == []
    word[3] = 9
    futex.wake_all(address + 12)
    for thread in threads:
        thread.join(5)
    assert seen == [9, 9]


def test_wake_counts_only_who_waits() -> None:
    if futex._NR is None:
        pytest.skip("no futex on this system")
    _, address = words()
    assert futex.wake_all(address) == 0
    thread = threading.Thread(target=futex.wait, args=(address, 0, 10))
    thread.start()
    end = time.monotonic() + 5
    while futex.wake_all(address) == 0:
        assert time.monotonic() < end
        time.sleep(0.001)
    thread.join(5)
    assert not thread.is_alive()


def test_ping_pong_between_processes(way) -> None:
    """Each side counts the other's word up, a thousand times; a missed wake would take a whole time-out."""
    word, address = words()
    rounds = 1000
    ping, pong = address, address + 64

    def play(mine: int, other: int, first: bool) -> None:
        for i in range(1, rounds + 1):
            if not first:
                while word[other // 4] < i:
                    futex.wait(address + other, i - 1, 5)
            word[mine // 4] = i
            futex.wake_all(address + mine)
            if first:
                while word[other // 4] < i:
                    futex.wait(address + other, i - 1, 5)

    del ping, pong
    begin = time.monotonic()
    child = os.fork()
    if child == 0:
        try:
            play(64, 0, first=False)
        finally:
            os._exit(0 if word[16] == rounds else 1)
    play(0, 64, first=True)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert time.monotonic() - begin < 20


def test_a_signal_ends_the_wait(way) -> None:
    """Python's handler runs at once, not at the end of the time-out."""
    _, address = words()
    heard = []
    before = signal.signal(signal.SIGALRM, lambda *_: heard.append(time.monotonic()))
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.1)
        begin = time.monotonic()
        end = begin + 20
        while not heard:
            assert time.monotonic() < end
            futex.wait(address, 0, 20 if way == "futex" else 1)  # time.sleep goes on after the handler
        assert heard[0] - begin < 5
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def test_ctrl_c_ends_the_wait() -> None:
    code = """if True:
        import numpy as np
        from pario.comm import futex
        word = np.zeros(1, dtype=np.int32)
        print("waiting", flush=True)
        while True:
            futex.wait(word.ctypes.data, 0, 60)
    """
    process = subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=os.getcwd()
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "waiting\n"
    time.sleep(0.2)
    process.send_signal(signal.SIGINT)
    _, error = process.communicate(timeout=20)  # a second is usual; a wait that swallows the signal takes a minute
    assert "KeyboardInterrupt" in error


def test_fence_of_other_processors() -> None:
    """The kernel that other processors use compiles to a full barrier here too."""
    from pario.kernels.fence import full_fence

    full_fence()
    assert full_fence() is None
    llvm = "".join(full_fence.inspect_llvm().values())
    if "define" in llvm:  # nothing is defined when it came from the disk cache
        assert "fence seq_cst" in llvm


def test_an_unknown_kernel_answer_falls_back(monkeypatch) -> None:
    """A sandbox without the system call: waiting becomes sleeping, not an error and not a busy loop."""
    if futex._NR is None:
        pytest.skip("no futex on this system")
    import ctypes

    monkeypatch.setattr(futex, "_nr", ctypes.c_long(1_000_000))  # ENOSYS
    word, address = words()
    begin = time.monotonic()
    assert futex.wait(address, 0, 0.2) is False
    assert time.monotonic() - begin > 0.19
    word[0] = 1
    assert futex.wait(address, 0, 5) is True
