"""The stores of a study behind one contract: where a set lies, how a job starts there, what was counted since."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks.cache import Unavailable
from benchmarks.stores import throttled
from benchmarks.study import stores
from benchmarks.study.cells import PRESETS, Cell
from benchmarks.study.jobs import Launcher
from benchmarks.study.run import Study
from benchmarks.study.stores import Store, open_store

RECIPES = ("plain", "lmm", "dio", "auto")


class FakeGroup:
    """A control group of which some reads are made: read(nbytes)."""

    def __init__(self, device: str, bytes_per_s: int | None = None) -> None:
        self.device, self.bytes_per_s = device, bytes_per_s
        self.sizes: list[int] = []

    def __enter__(self) -> FakeGroup:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def command(self, words: Any) -> list[str]:
        return ["inside", *words]

    def read(self, nbytes: int) -> None:
        self.sizes.append(nbytes)

    def bytes_read(self) -> int:
        return sum(self.sizes)

    def reads(self) -> int:
        return len(self.sizes)


class FakeMount:
    def __init__(self, source: str, page_cache: bool, **_: object) -> None:
        self.folder = "/mapped" if page_cache else "/explicit"
        self.reset()

    def __enter__(self) -> FakeMount:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def read(self, nbytes: int) -> None:
        self._counts["/set/data.mdb"].update(read=1, bytes=nbytes)
        self._counts["/set/data.mdb"]["most"] = 3
        self._counts["/set/data.mdb.pario.index"].update(read=1, bytes=nbytes)

    def counts(self) -> dict[str, Counter[str]]:
        return self._counts

    def reset(self) -> None:
        self._counts = {"/set/data.mdb": Counter(), "/set/data.mdb.pario.index": Counter()}


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """opened(name): (the store as a context, what was made for it: groups and mounts)"""
    made: list[Any] = []

    def remember(cls: type) -> Any:
        return lambda *args, **named: made.append(cls(*args, **named)) or made[-1]

    class FakeDisk:
        device = "7:0"

        def __enter__(self) -> FakeDisk:
            return self

        def __exit__(self, *_: object) -> None:
            pass

        def copy(self, folder: str) -> str:
            return folder.replace("/data", "/throttled")

    monkeypatch.setattr(stores, "Group", remember(FakeGroup))
    monkeypatch.setattr(stores, "device_of", lambda _: ("8:0", "sda"))
    monkeypatch.setattr(stores, "throttled_disk", lambda *_: FakeDisk())
    monkeypatch.setattr(stores, "latency_store", remember(FakeMount))
    return lambda name: (open_store(name, {"3k": HELD}, "/data"), made)


HELD: Any = SimpleNamespace(which="3k", folder="/data/set", file_bytes=1000)


@pytest.mark.parametrize("name", ["disk", "throttled", "latency"])
def test_a_store_counts_what_reached_it_since(opened, name: str) -> None:
    context, made = opened(name)
    with context as store:
        for one in made:
            one.read(7)
        store.reset()
        assert not any(store.counts().values())
        made[0].read(100)
        made[0].read(11)
        assert (store.counts()["bytes"], store.counts()["operations"]) == (111, 2)
        assert store.command(["python", "x"])[-2:] == ["python", "x"]
        assert (store.cap is None) == (name == "disk")


def test_each_recipe_opens_the_set_where_it_should(opened) -> None:
    found = {}
    for name in ("disk", "throttled", "latency"):
        with opened(name)[0] as store:
            found[name] = [store.folder(HELD, recipe) for recipe in RECIPES]
    mapped, explicit = "/mapped/set", "/explicit/set"
    assert found == {
        "disk": ["/data/set"] * 4,
        "throttled": ["/throttled/set"] * 4,
        "latency": [mapped, mapped, explicit, explicit],  # a file cannot be mapped where every read reaches the store
    }


def test_jobs_start_inside_the_group_that_counts(opened) -> None:
    for name, cap in (("disk", None), ("throttled", stores.CAP)):
        context, made = opened(name)
        with context as store:
            assert store.command(["x"]) == ["inside", "x"]
            assert made[-1].bytes_per_s == cap


def test_a_disk_that_nobody_counts_is_a_store_still(opened, monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(*_: object) -> Any:
        raise Unavailable("not root")

    monkeypatch.setattr(stores, "device_of", missing)
    with opened("disk")[0] as store:
        store.reset()
        assert store.counts() is None
        assert store.command(["x"]) == ["x"]
        assert store.folder(HELD, "auto") == "/data/set"
        assert type(store) is Store


def test_tools_of_root_are_found_without_its_path(monkeypatch: pytest.MonkeyPatch) -> None:
    """And this process's own environment stays as it is."""
    monkeypatch.setenv("PATH", "/usr/bin:/bin")
    assert throttled._run("sh", "-c", "echo $PATH") == "/usr/bin:/bin:/usr/sbin:/sbin"


def test_auto_finds_its_reads_in_flight_by_itself(opened, tmp_path) -> None:
    """On the store with latency too; the other recipes share sixteen."""
    study = Study(PRESETS["tiny"], name="tiny", launcher=Launcher(), data=tmp_path)
    study._sets = {"3k": SimpleNamespace(**vars(HELD), head=1, pixels=1, decoder="datum")}
    cell = Cell("latency", "3k", 4, 2, "cold", "none", RECIPES)
    with opened("latency")[0] as store:
        options = {name: study._task(store, cell, 8, name, {})["options"] for name in RECIPES}
    assert options == {"plain": {"inflight": 8}, "lmm": {"inflight": 8}, "dio": {"inflight": 8}, "auto": {}}
