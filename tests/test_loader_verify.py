"""`Loader(verify=True)`: flipped bits on every way of reading, the policies, and what is said without checksums."""

from __future__ import annotations

import os
import pickle
from pathlib import Path
from typing import Any

import lmdb
import numpy as np
import pytest
from flips import Flipped, all_found, checksums, flip, written

import pario
from pario.decode import Datum, Raw
from pario.errors import ChecksumError, CorruptedError, MissingError
from pario.options import Recipe

SMALL = {"slot_bytes": 64 << 10, "slots": 3, "block_bytes": 32 << 10, "mix_blocks": 4}
NONE = pario.Options(tiers=(), **SMALL)  # type: ignore[arg-type]
PLAIN = pario.Options(**SMALL)  # type: ignore[arg-type]
RING: dict[str, Any] = {"recipe": "ring", "options": PLAIN}
MEMORY = pario.Options(tiers=(pario.Tier("memory", "64MiB"),), **SMALL)  # type: ignore[arg-type]


def damaged(folder: str, kind: str, n: int, bad: int) -> Flipped:
    """A set with checksums, of which `bad` values have a flipped bit; never the first: decoders learn from it."""
    values = written(folder, kind, n)
    checksums(folder)
    chosen = 1 + np.random.default_rng(5).permutation(n - 1)[:bad]
    return flip(folder, values, sorted(chosen.tolist()))


@pytest.fixture(scope="module")
def sets(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Flipped]:
    folder = tmp_path_factory.mktemp("flipped")
    return {kind: damaged(str(folder / kind), kind, 120, 40) for kind in ("packed", "straight", "decoded")}


def nothing(value: Any) -> dict[str, Any]:
    return {"data": bytes(value)}


#: kind of values, decoder, and how
WAYS: dict[str, tuple[str, Any, dict[str, Any]]] = {
    "tier without a chunk, packed": ("packed", None, {"options": PLAIN}),
    "tier without a chunk, straight": ("straight", Datum(), {"options": PLAIN, "shuffle": "global"}),
    "tier without a chunk, straight in key order": ("straight", Datum(), {"options": PLAIN}),
    "tier without a chunk, decoded": ("decoded", Datum(), {"options": PLAIN, "shuffle": "block"}),
    "tier by default": ("straight", Datum(), {"options": PLAIN, "shuffle": "global", "epochs": 2}),
    "tier by default, packed": ("packed", None, {"options": PLAIN}),
    "ring": ("packed", None, {**RING, "shuffle": "global"}),
    "ring, a function": ("packed", nothing, {**RING, "shuffle": "block"}),
    "ring, first epoch": ("decoded", Datum(), {**RING, "save_index": False}),
    "memory tier": ("straight", Datum(), {"options": MEMORY, "shuffle": "global", "epochs": 2}),
    "memory tier, packed": ("packed", None, {"options": MEMORY}),
    "direct": ("decoded", Datum(), {"options": NONE, "recipe": Recipe("ring", fetch="direct"), "shuffle": "global"}),
    "plain": ("decoded", Datum(), {"recipe": "plain", "shuffle": "global"}),
    "lmm": ("packed", None, {"recipe": "lmm", "options": PLAIN}),
}


@pytest.mark.parametrize("way", WAYS)
def test_a_flipped_bit_never_passes(way: str, sets: dict[str, Flipped], request: pytest.FixtureRequest) -> None:
    kind, decoder, how = WAYS[way]
    if "without a chunk" in way:
        request.getfixturevalue("nothing_copied")
    if "first epoch" in way:
        os.rename(sidecar := sets[kind].file + ".pario.index", sidecar + ".away")
    try:
        stats = all_found(sets[kind], comm="self", decoder=decoder, **how)
    finally:
        if "first epoch" in way:
            os.rename(sidecar + ".away", sidecar)
    assert stats["staged"] == way.startswith(("memory", "tier"))


@pytest.mark.full
@pytest.mark.parametrize("way", ["tier by default, packed", "ring", "ring, a function", "memory tier, packed", "lmm"])
def test_ten_thousand_flipped_bits(way: str, ten_thousand: Flipped) -> None:
    _, decoder, how = WAYS[way]
    all_found(ten_thousand, comm="self", decoder=decoder, **how)


@pytest.fixture(scope="module")
def ten_thousand(tmp_path_factory: pytest.TempPathFactory) -> Flipped:
    return damaged(str(tmp_path_factory.mktemp("many") / "set"), "packed", 10_500, 10_000)


def test_the_error_says_where(sets: dict[str, Flipped]) -> None:
    bad = min(sets["packed"].bad)
    loader = pario.Loader(sets["packed"].path, 7, comm="self", verify=True)
    with pytest.raises(ChecksumError, match=r"expected 0x[0-9a-f]{16}, found 0x[0-9a-f]{16}") as caught:
        list(loader)
    error = caught.value
    assert isinstance(error, CorruptedError)
    assert (error.path, error.rank, error.record, error.key) == (sets["packed"].file, 0, bad, b"%06d" % bad)
    assert error.page is not None
    assert error.offset is not None
    assert error.offset // 4096 == error.page
    assert error.hint is not None
    assert 'on_error="skip"' in error.hint
    assert "Restore the file" in error.hint
    assert pickle.loads(pickle.dumps(error)).record == bad


@pytest.mark.parametrize("kind", ["packed", "decoded"])
def test_another_record_takes_the_row(kind: str, sets: dict[str, Flipped]) -> None:
    flipped = sets[kind]
    decoder = None if kind == "packed" else Datum()
    with pario.Loader(flipped.path, 60, decoder, comm="self", verify=True, on_error="substitute") as loader:
        seen = 0
        for batch in loader:
            assert len(batch.ids) == 60
            assert not flipped.bad & set(batch.ids.tolist())
            for row, i in enumerate(batch.ids.tolist()):
                if kind == "packed":
                    a, b = batch["offsets"][row : row + 2]
                    assert batch["data"][a:b].tobytes() == flipped.values[i]
                else:
                    assert batch["data"][row].tobytes() in flipped.values[i]
            seen += batch.skipped
        assert seen == loader.skipped == len(flipped.bad)
        (why,) = loader.stats()["bad"]
        assert "checksum" in why


def test_too_many(sets: dict[str, Flipped]) -> None:
    options = pario.Options(max_bad=3)
    how: dict[str, Any] = {"on_error": "skip", "options": options}
    loader = pario.Loader(sets["decoded"].path, 7, Datum(), comm="self", verify=True, **how)
    with pytest.raises(ChecksumError, match="more than max_bad=3 records"):
        list(loader)


def test_a_value_is_not_decoded_before_it_is_compared(sets: dict[str, Flipped]) -> None:
    """Who unpickles, for example, must not see it."""
    flipped, seen = sets["packed"], []

    def look(value: Any) -> dict[str, Any]:
        seen.append(bytes(value))
        return {"data": bytes(value)}

    all_found(flipped, comm="self", decoder=look)
    assert set(seen) <= set(flipped.values)


def test_a_reader_and_a_look_ahead(sets: dict[str, Flipped]) -> None:
    flipped = sets["packed"]
    bad, good = min(flipped.bad), min(set(range(120)) - flipped.bad)
    with pario.Reader(flipped.path, comm="self", verify=True) as reader:
        assert bytes(reader.read([good])[0]) == flipped.values[good]
        with pytest.raises(ChecksumError, match="checksum") as caught:
            reader.read([good, bad])
        assert caught.value.record == bad
        assert len(reader.read([bad], verify=False)) == 1
    with pario.Loader(flipped.path, 120, comm="self", verify=True) as loader, pytest.raises(ChecksumError):
        loader.peek()


def test_the_first_record(tmp_path: Path) -> None:
    """The decoder learns from it, or from the next one that is what it was."""
    values = written(str(tmp_path / "set"), "decoded", 20)
    checksums(str(tmp_path / "set"))
    flipped = flip(str(tmp_path / "set"), values, [0, 1])
    with pytest.raises(ChecksumError) as caught:
        pario.Loader(flipped.path, 7, Datum(), comm="self", verify=True)
    assert caught.value.record == 0
    all_found(flipped, comm="self", decoder=Datum())


def test_without_checksums(tmp_path: Path) -> None:
    path = str(tmp_path / "set")
    written(path, "packed", 30)
    for what in (pario.Reader, lambda *a, **k: pario.Loader(*a, 7, **k)):
        with pytest.raises(MissingError, match=f"this file has no checksums.*python -m pario data checksum {path}"):
            what(path, comm="self", verify=True)
    checksums(path)
    with lmdb.open(path) as env, env.begin(write=True) as txn:
        txn.put(b"one more", b"value")
    with pytest.raises(MissingError, match=r"no checksums fit.*another state of the data.*-m pario data checksum"):
        pario.Loader(path, 7, comm="self", verify=True)


def test_another_database_of_the_file(tmp_path: Path) -> None:
    path = str(tmp_path / "set")
    with lmdb.open(path, max_dbs=2) as env, env.begin(write=True) as txn:
        for name in (b"a", b"b"):
            for i in range(20):
                txn.put(b"%d" % i, name * (i + 1), db=env.open_db(name, txn=txn))
    checksums(path, "a")
    with pario.Loader(path, 7, Raw(), comm="self", db="a", verify=True) as loader:
        assert sum(len(batch.ids) for batch in loader) == 20
    with pytest.raises(MissingError, match=r"checksum .* --db b"):
        pario.Loader(path, 7, Raw(), comm="self", db="b", verify=True)
