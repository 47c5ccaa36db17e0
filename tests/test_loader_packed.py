"""Loader and Reader on packed LMDBs: the records of the unpacked ones, in the same batches."""

from __future__ import annotations

import os
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from datum_message import datum
from packed_sets import pack_copy, values_like_text, write

from pario import Budget, Loader, Options, Reader, split
from pario.codec.registry import make
from pario.decode import Datum, Raw, Text
from pario.errors import CorruptedError, DecodeError

N = 300
VALUES = values_like_text(N)
ITEMS = [(b"key-%06d" % i, value) for i, value in enumerate(VALUES)]


@pytest.fixture(scope="module", params=[(), (7, 1, 40, 3)], ids=["alone", "blocks"])
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    """(unpacked, packed)"""
    folder = tmp_path_factory.mktemp("packed")
    packed = pack_copy(folder / "packed", ITEMS, dictionary=True, counts=request.param)
    return os.fspath(write(folder / "raw", ITEMS)), os.fspath(packed)


def records(batch: Any) -> list[bytes]:
    ends = batch["offsets"]
    return [batch["data"][a:b].tobytes() for a, b in pairwise(ends)]


def epoch(*given: Any, **more: Any) -> Iterator[tuple[list[int], list[bytes]]]:
    with Loader(*given, comm="self", **more) as loader:
        for batch in loader:
            yield batch.ids.tolist(), records(batch)


def test_a_reader_gives_values_and_hides_the_entry(pair: tuple[str, str]) -> None:
    with Reader(pair[1], comm="self", save_index=False) as reader:
        assert len(reader) == reader.index.n == N
        assert [value.tobytes() for value in reader.read(range(N))] == VALUES
        assert reader.keys([0, N - 1]) == [ITEMS[0][0], ITEMS[-1][0]]
        assert reader.packing is not None
        assert reader.packing.sizes.tolist() == list(map(len, VALUES))
        stored, ordinals = reader.read_stored([5])[0].tobytes(), reader.packing.ordinals(np.array([5]))
        assert reader.packing.value(stored, -1 if ordinals is None else 5) == VALUES[5] != stored
        assert reader.keys(range(N)) == [key for key, _ in ITEMS]


@pytest.mark.usefixtures("grows")
@pytest.mark.parametrize("more", [{}, {"shuffle": "global", "seed": 7}, {"select": b"key-0001"}])
def test_batches_are_those_of_the_unpacked_file(pair: tuple[str, str], more: dict[str, Any]) -> None:
    plain, packed = (list(epoch(path, 32, save_index=False, **more)) for path in pair)
    assert packed == plain
    assert all(values == [VALUES[i] for i in ids] for ids, values in packed)


#: Out of a tier that gets nothing, and out of one in the second epoch.
SEATS = ["scratch", "tier"]


@pytest.fixture(params=SEATS)
def form(request: pytest.FixtureRequest) -> str:
    """Who reads: each rank by itself, or the fill of the tier."""
    if request.param == "scratch":
        request.getfixturevalue("nothing_copied")
    return str(request.param)


@pytest.mark.parametrize("shuffle", [False, "global", "block"])
@pytest.mark.parametrize("decoder", [Datum(), Datum(crop=3, crop_mode="random"), Raw()])
def test_batches_without_the_ring(tmp_path: Path, decoder: Any, form: str, shuffle: Any) -> None:
    """Threads that read, unpack and decode, several at one batch: the batches are those of the unpacked file."""
    rng = np.random.default_rng(2)
    items = [(b"%05d" % i, datum(rng.integers(0, 30, (3, 20, 20), np.uint8), i)) for i in range(700)]
    plain, packed = os.fspath(write(tmp_path / "raw", items)), os.fspath(pack_copy(tmp_path / "packed", items))

    for path in (plain, packed):
        Reader(path, comm="self").close()  # saves the index

    def batches(path: str, recipe: str) -> list[Any]:
        options = Options(decode_threads=3)
        given: dict[str, Any] = {"shuffle": shuffle, "seed": 3, "recipe": recipe, "options": options}
        with Loader(path, 50, decoder, comm="self", **given) as loader:
            found = [
                (b.ids.tolist(), *(b[name].tobytes() for name in sorted(b.keys()))) for _ in range(2) for b in loader
            ]
            stage = loader._life.reader.stage
            assert (stage is None) == (recipe == "ring")
            assert stage is None or (stage.memory.held().sum() == 0) == (form == "scratch")
        return found

    wanted, found = batches(plain, "ring"), batches(packed, "auto")
    if shuffle == "block":  # blocks are pieces of the file: other ones
        assert sorted(i for ids, *_ in found for i in ids) == sorted([*range(700), *range(700)])
    else:
        assert found == wanted


def test_a_damaged_value_without_the_ring(tmp_path: Path, form: str) -> None:
    rng = np.random.default_rng(2)
    items = [(b"%05d" % i, datum(rng.integers(0, 30, (3, 20, 20), np.uint8), i)) for i in range(200)]
    packed = pack_copy(tmp_path / "packed", items)
    with Reader(os.fspath(packed), comm="self") as reader:
        offset = int(reader.index.extents_of(np.array([77]))[0][0])
    with open(packed / "data.mdb", "r+b") as file:
        file.seek(offset + 40)
        byte = file.read(1)
        file.seek(offset + 40)
        file.write(bytes([byte[0] ^ 255]))
    options = Options(decode_threads=2)
    with Loader(os.fspath(packed), 50, Datum(), comm="self", options=options, on_error="skip") as loader:
        found = {int(i): row.copy() for b in loader for i, row in zip(b.ids, b["data"], strict=True)}
        assert loader.stats()["skipped"] == 1
    assert sorted(found) == [i for i in range(200) if i != 77]
    assert all(row.tobytes() in items[i][1] for i, row in found.items())
    with (
        Loader(os.fspath(packed), 50, Datum(), comm="self", options=options) as loader,
        pytest.raises(DecodeError, match="record 77"),
    ):
        list(loader)


def test_a_saved_index_knows_the_entry(pair: tuple[str, str], tmp_path: Path) -> None:
    path = os.fspath(pack_copy(tmp_path / "p", ITEMS))
    for _ in range(2):  # grown or walked and saved, then loaded
        with Loader(path, 64, comm="self", shuffle="block") as loader:
            assert loader.records == loader.index.n == N
            assert sorted(i for batch in loader for i in batch.ids.tolist()) == list(range(N))
            assert loader.keys([N - 1]) == [ITEMS[-1][0]]
    with Loader(path, 64, comm="self") as loader:
        assert loader.index.sidecar is not None


def test_budgets_and_splits_count_raw_bytes_and_records(pair: tuple[str, str]) -> None:
    plain, packed = (list(epoch(path, Budget(4000), save_index=False)) for path in pair)
    assert packed == plain
    parts = [split(path, (0.8, 0.2), seed=1, comm="self")[1] for path in pair]
    told = [list(epoch(path, 16, select=part, save_index=False)) for path, part in zip(pair, parts, strict=True)]
    assert told[0] == told[1]


def test_fixed_rows_are_unpacked_in_their_rows(tmp_path: Path) -> None:
    rng = np.random.default_rng(5)
    rows = rng.integers(0, 9, (100, 600), np.uint8)
    path = os.fspath(pack_copy(tmp_path / "p", [(b"%04d" % i, row.tobytes()) for i, row in enumerate(rows)]))
    for decoder in (Raw(dtype="uint8", shape=(20, 30)), lambda value: np.frombuffer(value, np.uint8).reshape(20, 30)):
        with Loader(path, 40, decoder, comm="self", save_index=False, options=Options(decode_threads=2)) as loader:
            got = np.concatenate([batch["data"] for batch in loader])
            assert (got.reshape(100, 600) == rows).all()
            told = loader.stats()
            assert told["unpacked_bytes"] == rows.nbytes
            assert 0 < told["packed_bytes"] < rows.nbytes
            assert loader.report().sentence


def test_several_files_each_with_its_own_codecs(pair: tuple[str, str], tmp_path: Path) -> None:
    others = [(b"b%04d" % i, value) for i, value in enumerate(values_like_text(90, seed=1))]
    more = [(b"c%04d" % i, value) for i, value in enumerate(values_like_text(80, seed=2))]
    of_b, of_c = pack_copy(tmp_path / "b", others, [make("raw")]), pack_copy(tmp_path / "c", more)
    packed = [pair[0], os.fspath(of_b), os.fspath(of_c)]
    plain = [pair[0], os.fspath(write(tmp_path / "rb", others)), os.fspath(write(tmp_path / "rc", more))]
    for options in ({}, {"shuffle": "global"}, {"weights": [2, 1, 1], "shuffle": "global"}):
        found = [list(epoch(paths, 33, save_index=False, **options)) for paths in (plain, packed)]
        assert found[0] == found[1]
    with Reader(packed, comm="self", save_index=False) as reader:
        assert len(reader) == N + 90 + 80
        assert reader.read([N + 3])[0].tobytes() == others[3][1]
        assert reader.keys([N + 89, N + 90]) == [others[-1][0], more[0][0]]


def test_a_prediction_is_judged_for_its_own_file_alone(pair: tuple[str, str], tmp_path: Path) -> None:
    told = {"prediction": {"codec": "zstd:3", "records_per_second": 1.0, "decode_seconds": 1.0}}
    path = os.fspath(pack_copy(tmp_path / "p", ITEMS, more=told))
    for paths, judged in ((path, True), ([path, pair[1]], False), (pair[1], False)):
        with Loader(paths, 33, comm="self", save_index=False) as loader:
            for _ in loader:
                pass
            report = str(loader.report())
        assert "unpacked " in report
        assert ("the prediction for zstd:3 held" in report) == judged


def test_fields(tmp_path: Path) -> None:
    items = []
    for i in range(40):
        items += [(b"image-%04d" % i, bytes([i]) * 500), (b"label-%04d" % i, b"class %d" % i)]
    path = os.fspath(pack_copy(tmp_path / "p", sorted(items)))
    fields = {"image": ("image-%04d", Raw(dtype="uint8")), "label": ("label-%04d", Text())}
    with Loader(path, 16, fields=fields, comm="self", save_index=False, shuffle="global") as loader:
        seen = 0
        for batch in loader:
            for k, number in enumerate(batch.ids.tolist()):
                assert (batch["image"][k] == number).all()
                assert batch["label"][k] == f"class {number}"
                seen += 1
        assert seen == loader.records == 40


def damaged(path: Path, record: int) -> str:
    """A copy of ITEMS packed, in which a byte of one packed value is another one."""
    packed = os.fspath(pack_copy(path, ITEMS))
    with Reader(packed, comm="self", save_index=False) as reader:
        offset, nbytes = reader.index.extents_of(np.array([record]))
        at = int(offset[0]) + int(nbytes[0]) - 1
    with open(os.path.join(packed, "data.mdb"), "r+b") as file:
        file.seek(at)
        byte = file.read(1)[0]
        file.seek(at)
        file.write(bytes([byte ^ 0x40]))
    return packed


def test_a_damaged_value_is_a_bad_record(tmp_path: Path) -> None:
    path = damaged(tmp_path / "p", 17)
    got = [i for ids, _ in epoch(path, 32, on_error="skip", save_index=False) for i in ids]
    assert got == [i for i in range(N) if i != 17]
    with pytest.raises(DecodeError, match="record 17"):
        list(epoch(path, 32, save_index=False))
    with Reader(path, comm="self", save_index=False) as reader, pytest.raises(DecodeError, match="record 17"):
        reader.read([16, 17])
    text = Loader(path, 50, lambda value: len(value), comm="self", on_error="substitute", save_index=False)
    with text as loader:
        lengths = np.concatenate([batch["data"] for batch in loader])
        assert lengths.tolist() == [len(VALUES[i if i != 17 else 18]) for i in range(N)]


def test_a_damaged_entry_is_one_clear_error(tmp_path: Path) -> None:
    path = os.fspath(pack_copy(tmp_path / "p", ITEMS, dictionary=True))
    file = os.path.join(path, "data.mdb")
    data = Path(file).read_bytes()
    at = data.index(b"PARIOPK\x01") + 400
    Path(file).write_bytes(data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :])
    with pytest.raises(CorruptedError, match="reserved entry"):
        Loader(path, 8, comm="self", save_index=False)


def test_a_user_s_last_key_of_that_form_is_a_record(tmp_path: Path) -> None:
    items = [*ITEMS[:9], (b"\xff\xff\xff\xffpario-packed", b"a value of the user's")]
    with Reader(os.fspath(write(tmp_path / "u", items)), comm="self", save_index=False) as reader:
        assert len(reader) == 10
        assert reader.packing is None
        assert reader.read([9])[0].tobytes() == items[9][1]


def test_a_state_goes_on_and_knows_the_file(pair: tuple[str, str]) -> None:
    with Loader(pair[1], 32, comm="self", shuffle="global", save_index=False) as loader:
        taken = [next(iter(loader)).ids.tolist()]
        state = loader.state_dict()
        whole = [*taken, *(batch.ids.tolist() for batch in epoch_of(loader, 0))]
    with Loader(pair[1], 32, comm="self", shuffle="global", save_index=False) as loader:
        loader.load_state_dict(state)
        assert [*taken, *(batch.ids.tolist() for batch in loader)] == [whole[0], *whole[2:]]


def epoch_of(loader: Loader, number: int) -> Iterator[Any]:
    loader.set_epoch(number)
    yield from loader
