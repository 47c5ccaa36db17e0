"""A forged side-car delivers no wrong bytes: it is refused and made again, or reading raises CorruptedError.

The forger knows the fingerprint and makes all checksums right. Each kind of forgery meets each way of reading; the
default run takes every kind once and every way often, the marker `full` all of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from forged import DB, FORGERIES, OF_DUPLICATES, Forgery, Set, forge, write
from lmdb_cases import FORMATS

import pario
from pario.errors import CorruptedError
from pario.locate import probe as probe_module
from pario.locate import sidecar as sidecar_module
from pario.options import Recipe

pytestmark = pytest.mark.hostile

#: what a way brings: (record, its bytes), and whether the side-car was refused
Brought = Iterator[tuple[int, bytes]]


def loader(path: Path, **more: Any) -> pario.Loader:
    options = {"slot_bytes": 128 << 10, "slots": 3, "block_bytes": 32 << 10, "mix_blocks": 4}
    options.update(more.pop("options", {}))
    more.setdefault("recipe", "ring")
    return pario.Loader(path, 16, db=DB, save_index=False, options=pario.Options(**options), **more)


def loaded(opened: pario.Loader) -> Brought:
    for batch in opened:
        offsets = batch["offsets"]
        for k, i in enumerate(batch.ids.tolist()):
            yield i, batch["data"][offsets[k] : offsets[k + 1]].tobytes()


def through(**more: Any) -> Callable[[Path], tuple[bool, list[tuple[int, bytes]]]]:
    def take(path: Path) -> tuple[bool, list[tuple[int, bytes]]]:
        with loader(path, **more) as opened:
            return opened.index.bytes_read > 0, list(loaded(opened))

    return take


def slowly(record: np.ndarray) -> dict[str, Any]:
    return {"data": np.frombuffer(bytes(record).ljust(20_000, b"\0"), np.uint8), "n": len(record)}


def decoded(path: Path) -> tuple[bool, list[tuple[int, bytes]]]:
    """A function that decodes record by record, in threads."""
    with loader(path, decoder=slowly) as opened:
        found = []
        for batch in opened:
            for i, data, n in zip(batch.ids.tolist(), batch["data"], batch["n"].tolist(), strict=True):
                found.append((i, bytes(data)[:n]))
        return opened.index.bytes_read > 0, found


def reader(order: Callable[[int], np.ndarray], at_once: int) -> Callable[[Path], tuple[bool, list[tuple[int, bytes]]]]:
    def take(path: Path) -> tuple[bool, list[tuple[int, bytes]]]:
        with pario.Reader(path, db=DB, save_index=False) as opened:
            found = []
            ids = order(len(opened))
            for part in np.split(ids, range(at_once, len(ids), at_once)):
                records = opened.read(part)
                found += [(int(i), bytes(record)) for i, record in zip(part, records, strict=True)]
            return opened.index.bytes_read > 0, found

    return take


def mixed(n: int) -> np.ndarray:
    return np.random.default_rng(5).permutation(n)


WAYS = {
    "reader": reader(np.arange, 1000),
    "reader, one by one": reader(mixed, 1),
    "ring": through(),
    "ring, global": through(shuffle="global"),
    "ring, block": through(shuffle="block"),
    "ring, decoded in threads": decoded,
    "a tier that gets nothing": through(recipe="auto"),
    "a tier that gets nothing, global": through(shuffle="global", recipe="auto"),
    "a tier that gets nothing, block": through(shuffle="block", recipe="auto"),
    "tier by default": through(recipe="auto"),
    "tier by default, global": through(recipe="auto", shuffle="global"),
    "past the page cache": through(recipe=Recipe("ring", fetch="direct")),
    "past the page cache, global": through(shuffle="global", recipe=Recipe("ring", fetch="direct")),
    "prov": through(recipe="prov"),
    "coal, global": through(recipe="coal", shuffle="global"),
    "stag, block": through(recipe="stag", shuffle="block"),
}
KINDS = {**FORGERIES, **{f"{name}, of duplicates": forgery for name, forgery in OF_DUPLICATES.items()}}
#: Kinds that are found without comparing a side-car with the file, each with another way.
CELLS = [(kind, list(WAYS)[i % len(WAYS)]) for i, kind in enumerate(KINDS) if KINDS[kind].found != "sample"]


@pytest.fixture(scope="module")
def sets(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Set]:
    made: dict[tuple[Any, ...], Set] = {}

    def get(**more: Any) -> Set:
        key = tuple(sorted(more.items()))
        if key not in made:
            made[key] = write(tmp_path_factory.mktemp("forged"), **more)
        return made[key]

    return get


@pytest.fixture
def blind(monkeypatch: pytest.MonkeyPatch) -> None:
    """Side-cars are not compared with the file: the sample of leaf pages happens to miss everything."""

    def record_of(pool: Any, database: Any, places: Any, keys: Any) -> Any:
        pages = probe_module.PageReader(lambda: pool, database.snapshot)
        tree = probe_module.Tree(pages.one, database.snapshot, database.snapshot.main)
        return probe_module.named_database(tree, database.name)

    monkeypatch.setattr(sidecar_module, "probe", record_of)


def forged(made: Set, forgery: Forgery) -> None:
    extents = made.extents.copy()
    more = forgery.change(made, extents) or {}
    assert more or not np.array_equal(extents, made.extents), "nothing was forged"
    forge(made, **{"extents": extents, **more})  # type: ignore[arg-type]


def holds(made: Set, kind: str, way: str) -> str:
    """How the way ends; fails for a wrong byte."""
    with pytest.MonkeyPatch.context() as patch:
        if "gets nothing" in way:
            patch.setattr("pario.feed.seat.begin_fill", lambda *_: None)
        try:
            refused, found = WAYS[way](made.path)
        except CorruptedError:
            return "reading"
    assert sorted(i for i, _ in found) == list(range(len(made.values)))
    for i, data in found:
        assert data == made.values[i], f"{kind}: record {i} through {way}"
    return "loading" if refused else "nothing"


def kinds(way: str, version: int) -> list[str]:
    """All of them in format 1; in the others each one by two of the ways."""
    at = list(WAYS).index(way)
    return [kind for i, kind in enumerate(KINDS) if version == FORMATS[0] or (i - at) % len(WAYS) < 2]


def of_kind(sets: Callable[..., Set], kind: str, **more: Any) -> tuple[Set, Forgery]:
    made = sets(dups=KINDS[kind] in OF_DUPLICATES.values(), **more)
    forged(made, KINDS[kind])
    return made, KINDS[kind]


@pytest.mark.parametrize("dups", [False, True])
def test_the_forger_can_write_what_is_believed(sets: Callable[..., Set], dups: bool) -> None:
    made = sets(dups=dups)
    forge(made, made.extents)
    with pario.Reader(made.path, db=DB, save_index=False) as opened:
        assert opened.index.bytes_read == 0
        assert opened.keys(range(len(opened))) == made.keys


# -- of a file whose leaf pages are all compared -----------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_it_is_refused(sets: Callable[..., Set], kind: str) -> None:
    made, _ = of_kind(sets, kind)
    with pario.Reader(made.path, db=DB, save_index=False) as opened:
        assert opened.index.bytes_read > 0
        ids = range(len(made.values))
        assert [bytes(record) for record in opened.read(ids)] == made.values
        assert opened.keys(ids) == made.keys


@pytest.mark.parametrize(
    "kind", ["an old value in a free page", "an old large value in free pages", "half of the records missing"]
)
def test_without_the_leaf_pages_it_is_refused(
    monkeypatch: pytest.MonkeyPatch, sets: Callable[..., Set], kind: str
) -> None:
    """By the list of free pages, and by the number of records."""
    monkeypatch.setattr(probe_module, "_check_leaves", lambda *_: None)
    made, _ = of_kind(sets, kind)
    with pario.Reader(made.path, db=DB, save_index=False) as opened:
        assert opened.index.bytes_read > 0


@pytest.mark.full
@pytest.mark.parametrize("version", FORMATS)
@pytest.mark.parametrize("way", WAYS)
def test_it_is_refused_on_every_way(sets: Callable[..., Set], way: str, version: int) -> None:
    for kind in kinds(way, version):
        made, _ = of_kind(sets, kind, version=version)
        assert holds(made, kind, way) == "loading", kind


# -- by what is read alone ---------------------------------------------------------------------------------------------


def read_without_sample(sets: Callable[..., Set], kind: str, way: str, **more: Any) -> None:
    made, forgery = of_kind(sets, kind, **more)
    if forgery.found == "loading":
        assert holds(made, kind, way) == "loading"
    elif forgery.found == "reading":
        assert holds(made, kind, way) in ("reading", "loading")


@pytest.mark.parametrize(("kind", "way"), CELLS)
def test_its_records_are_checked(blind: None, sets: Callable[..., Set], kind: str, way: str) -> None:
    read_without_sample(sets, kind, way)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("kind", ["a value a byte longer", "a large value from its second page on"])
def test_every_way_checks_records(blind: None, sets: Callable[..., Set], kind: str, way: str) -> None:
    made, _ = of_kind(sets, kind)
    assert holds(made, kind, way) == "reading"


@pytest.mark.full
@pytest.mark.parametrize("version", FORMATS)
@pytest.mark.parametrize("way", WAYS)
def test_its_records_are_checked_on_every_way(blind: None, sets: Callable[..., Set], way: str, version: int) -> None:
    for kind in kinds(way, version):
        read_without_sample(sets, kind, way, version=version)
