"""Calls that do not come back, and whoever waits for them."""

from __future__ import annotations

import gc
import threading
import time
import weakref
from collections.abc import Callable

import pytest

from pario.errors import ParioError
from pario.tiers import patience as patience_module
from pario.tiers.patience import Patience, StalledError, Step


def until(what: Callable[[], bool]) -> bool:
    end = time.monotonic() + 20
    while not what() and time.monotonic() < end:
        time.sleep(0.005)
    return what()


def threads(name: str) -> int:
    return sum(thread.name == name for thread in threading.enumerate())


class Held:
    """A call that comes back when it is let go."""

    def __init__(self) -> None:
        self.began, self.go = threading.Event(), threading.Event()

    def __call__(self, step: Step) -> str:
        self.began.set()
        assert self.go.wait(60)
        return "late"


def test_what_comes_back_is_passed_on() -> None:
    patience = Patience("pario-test-1", 5.0)
    assert [patience.call(lambda _, k=k: k * k) for k in range(100)] == [k * k for k in range(100)]  # type: ignore[misc]
    assert threads("pario-test-1") == 1, "one after the other"

    def fails(_: Step) -> None:
        raise KeyError("x")

    with pytest.raises(KeyError, match="x"):
        patience.call(fails)
    patience.close()
    assert until(lambda: threads("pario-test-1") == 0)
    assert patience.call(lambda _: 7) == 7


def test_whoever_waits_goes_on() -> None:
    patience, held = Patience("pario-test-2", 0.3), Held()
    begin = time.monotonic()
    with pytest.raises(StalledError, match="nothing has come back"):
        patience.call(held)
    assert 0.2 <= time.monotonic() - begin < 5
    assert patience.has_left_calls
    held.go.set()
    assert until(lambda: not patience.has_left_calls)
    patience.close()
    assert until(lambda: threads("pario-test-2") == 0), "those that were left behind, too"


def test_when_one_is_left_behind_the_others_go_on_at_once() -> None:
    patience, first, second = Patience("pario-test-3", 1.5), Held(), Held()
    gave_up: list[float] = []

    def wait(held: Held) -> None:
        with pytest.raises(StalledError):
            patience.call(held)
        gave_up.append(time.monotonic())

    waiting = [threading.Thread(target=wait, args=(held,)) for held in (first, second)]
    waiting[0].start()
    assert first.began.wait(20)
    time.sleep(0.8)
    waiting[1].start()
    for each in waiting:
        each.join(20)
    assert gave_up[1] - gave_up[0] < 0.7, "not after a limit of its own"
    first.go.set()
    assert patience.has_left_calls, "one of them"
    second.go.set()
    assert until(lambda: not patience.has_left_calls)
    patience.close()


def test_what_goes_on_is_waited_for() -> None:
    patience = Patience("pario-test-4", 0.5)

    def slow(step: Step) -> str:
        for _ in range(12):
            time.sleep(0.1)
            step()
        return "done"

    assert patience.call(slow) == "done"
    patience.close()


def test_nothing_is_kept() -> None:
    """A call refers to open files, which are closed with the last reference."""

    class File:
        pass

    patience = Patience("pario-test-5", 0.3)
    gc.disable()
    try:
        for fails in (False, True):
            file = File()
            seen = weakref.ref(file)

            def work(_: Step, file: File = file, fails: bool = fails) -> None:
                if fails:
                    raise OSError(str(file))

            try:
                patience.call(work)
            except OSError:
                assert fails
            del file, work
            assert until(lambda: seen() is None)  # noqa: B023
    finally:
        gc.enable()
    assert threads("pario-test-5") == 1
    del patience
    gc.collect()
    assert until(lambda: threads("pario-test-5") == 0)


def test_without_a_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **more: object) -> None:
        raise ParioError("no thread")

    monkeypatch.setattr(patience_module, "start_thread", refuse)
    assert Patience("pario-test-6", 0.3).call(lambda _: threading.current_thread()) is threading.current_thread()
