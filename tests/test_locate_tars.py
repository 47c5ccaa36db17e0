"""Tars read as they are: the same records as Python's tarfile tells, the side-car, samples of several members, and tars
that are damaged, changed or no tars at all. The oracle is tarfile, and the LMDB that `pack` makes of the same tar."""

from __future__ import annotations

import gzip
import logging
import os
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tars import content, odd_members, samples, shards, truth, write_tar

import pario
from pario.cli import main
from pario.decode import Text
from pario.errors import (
    CorruptedError,
    EmptyError,
    FileError,
    InvalidError,
    MissingError,
    OptionError,
    SnapshotError,
)
from pario.fetch.posix import PosixFetcher
from pario.fetch.snapshot import read_snapshot
from pario.format.tar import TarSnapshot
from pario.kernels.fill import has_status
from pario.options import Recipe

SMALL = pario.Options(slot_bytes=128 << 10, slots=3, block_bytes=32 << 10, mix_blocks=4)
FIELDS = {"jpg": ("{}.jpg", None), "cls": ("{}.cls", Text())}


def read(loader: pario.Loader, pairs: list[tuple[bytes, bytes]], steps: int | None = None) -> list[int]:
    """The ids of the next epoch, or of its first steps; all values are right."""
    seen: list[int] = []
    for _, batch in zip(range(len(loader) if steps is None else steps), loader, strict=False):
        o = batch["offsets"]
        for row, i in enumerate(batch.ids.tolist()):
            assert batch["data"][o[row] : o[row + 1]].tobytes() == pairs[i][1]
        seen += batch.ids.tolist()
    return seen


@pytest.mark.parametrize("shuffle", [False, "global", "block"])
@pytest.mark.parametrize("tiers", [(), None])
def test_every_member_once(tmp_path: Path, shuffle: Any, tiers: Any) -> None:
    """As the index is made, and as it is loaded; out of the file and out of memory."""
    path = write_tar(tmp_path / "x.tar", odd_members())
    pairs = truth(path)
    for again in (False, True):
        more = {} if tiers is None else {"tiers": tiers}
        options = pario.Options(slot_bytes=512 << 10, slots=3, block_bytes=32 << 10, mix_blocks=4, **more)
        with pario.Loader(path, 7, shuffle=shuffle, options=options) as loader:
            assert (loader.index.bytes_read == 0) == again
            for _ in range(2):
                assert sorted(read(loader, pairs)) == list(range(len(pairs)))
            assert loader.keys(range(len(pairs))) == [key for key, _ in pairs]


def test_the_order_is_that_of_the_packed_tar(tmp_path: Path) -> None:
    """A script that named the packed LMDB gets the same batches of the tar."""
    path = write_tar(tmp_path / "x.tar", samples(0, 60))
    assert main(["data", "pack", path, f"{tmp_path}/x.lmdb"]) == 0
    for given in ({}, {"fields": FIELDS}, {"select": b"00001"}):
        each = []
        for one in (path, f"{tmp_path}/x.lmdb"):
            with pario.Loader(one, 8, shuffle="global", seed=5, options=SMALL, **given) as loader:
                each.append([(b.ids.tolist(), {k: np.asarray(v).tolist() for k, v in b.items()}) for b in loader])
        assert each[0] == each[1]


def test_shards_and_resuming(tmp_path: Path) -> None:
    pattern = shards(tmp_path / "set", 3, 40)
    pairs = [pair for k in range(3) for pair in truth(tmp_path / "set" / f"shard-{k:03d}.tar")]
    with pario.Loader(pattern, 16, shuffle="global", options=SMALL) as loader:
        whole = read(loader, pairs)
        assert sorted(whole) == list(range(240))
    with pario.Loader(f"{tmp_path}/set/*.tar", 16, shuffle="global", options=SMALL) as loader:
        begin = read(loader, pairs, 4)
        state = loader.state_dict()
    paths = sorted((tmp_path / "set").glob("*.tar"))
    with pario.Loader(paths, 16, shuffle="global", options=SMALL) as loader:
        loader.load_state_dict(state)
        assert begin + read(loader, pairs) == whole


def test_samples_of_shards(tmp_path: Path) -> None:
    """Each sample once, with its own members, whichever shard it is in; names may come again in another shard."""
    pattern = shards(tmp_path / "set", 2, 40)
    write_tar(tmp_path / "set" / "shard-001.tar", [(name, value + b"!") for name, value in samples(0, 40)])
    with pario.Loader(pattern, 16, shuffle="global", fields=FIELDS, options=SMALL) as loader:
        assert loader.records == 80
        seen = []
        for batch in loader:
            for number, jpg, label in zip(batch.ids.tolist(), batch["jpg"], batch["cls"], strict=True):
                i, mark = number % 40, b"!" * (number // 40)
                assert jpg == content(f"{i}", 300 + i % 50) + mark
                assert label == str(i % 10) + mark.decode()
                seen.append(number)
        assert sorted(seen) == list(range(80))


def test_a_sample_that_lacks_a_member(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    given = [one for one in samples(0, 20) if one[0] != "000007.cls"]
    path = write_tar(tmp_path / "x.tar", given)
    with pario.Loader(path, 5, shuffle="global", fields=FIELDS, on_error="skip") as loader:
        assert sum(len(batch.ids) for batch in loader) == 19
    assert "1 of 20 samples have no record of field 'cls'" in caplog.text


# -- the side-car ------------------------------------------------------------------------------------------------------


def test_a_side_car_of_another_tar_is_made_anew(tmp_path: Path) -> None:
    """Another tar of the same size, time and inode: the headers tell."""
    path = write_tar(tmp_path / "x.tar", [(f"{i:03d}", b"a" * 600) for i in range(100)])
    with pario.Reader(path) as reader:
        assert reader.index.bytes_read
    before = os.stat(path)
    other = [(f"{i:03d}", b"b" * (600 if i % 2 else 700)) for i in range(100)]
    write_tar(path, other)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert os.stat(path).st_size == before.st_size
    with pario.Reader(path) as reader:
        assert reader.index.bytes_read
        assert [value.tobytes() for value in reader.read(range(100))] == [value for _, value in other]


def test_hard_links_and_names_that_come_twice_are_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = write_tar(tmp_path / "x.tar", [("a", b"1"), ("b", b"2"), ("a", b"3")])
    with pario.Reader(path) as reader:
        assert reader.read([0])[0].tobytes() == b"3"
    assert "1 of its members have the name of a later one" in caplog.text


# -- a tar that changes ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("recipe", ["auto", "ring"])
@pytest.mark.parametrize("how", ["same size", "longer", "shorter"])
def test_a_tar_that_changes(tmp_path: Path, recipe: Recipe, how: str) -> None:
    """It is an error, and no batch holds other bytes than those of the tar that was opened."""
    given = [(f"{i:03d}", content(str(i), 5000)) for i in range(200)]
    path = write_tar(tmp_path / "x.tar", given)
    pairs = truth(path)
    options = pario.Options(tiers=(), slots=3, slot_bytes=256 << 10)
    with pario.Loader(path, 8, shuffle="global", recipe=recipe, options=options) as loader:
        read(loader, pairs, 2)
        with open(path, "r+b") as file:
            if how == "same size":
                file.seek(1024)
                file.write(bytes(900_000))
            else:
                file.truncate(os.path.getsize(path) + (512 if how == "longer" else -1_000_000))
        with pytest.raises(FileError) as caught:
            read(loader, pairs)
        assert isinstance(caught.value, SnapshotError) or how == "shorter"
        assert caught.value.path == path


def test_a_tar_that_changes_while_it_comes_into_memory(tmp_path: Path) -> None:
    """What the memory tier takes was compared before: a changed tar is an error, or all of it was there before."""
    path = write_tar(tmp_path / "x.tar", [(f"{i:03d}", content(str(i), 40_000)) for i in range(200)])
    pairs = truth(path)
    with pario.Loader(path, 4, shuffle="global") as loader:
        read(loader, pairs, 1)
        with open(path, "r+b") as file:
            file.write(bytes(8 << 20))
        with suppress(SnapshotError):
            read(loader, pairs)


@pytest.mark.parametrize(
    ("age_s", "waits_s"), [(0.005123, 0.015), (0.1, 0), (-5.25, 0.02), (0.25, 0.77), (1.5, 0), (-3.0, 1.02)]
)
def test_a_tar_that_was_written_just_now(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, age_s: float, waits_s: float
) -> None:
    """It becomes older first: what changes it later must change its time, which may be of whole seconds, or of a clock
    ahead of ours."""
    path = write_tar(tmp_path / "x.tar", samples(0, 2))
    whole = age_s in (0.25, 1.5, -3.0)
    mtime_ns = 2 * 10**18 + (0 if whole else 500_000_000)
    os.utime(path, ns=(0, mtime_ns))
    waited: list[float] = []
    monkeypatch.setattr("pario.fetch.snapshot.time.time", lambda: mtime_ns / 1e9 + age_s)
    monkeypatch.setattr("pario.fetch.snapshot.time.sleep", waited.append)
    with closing(PosixFetcher(path)) as fetcher:
        assert read_snapshot(fetcher, tars=True).txnid == mtime_ns
    assert sum(waited) == pytest.approx(waits_s, abs=1e-3)


def test_the_kernel_sees_a_change(tmp_path: Path) -> None:
    """What copies chunks into memory asks the system for the tar's size and time."""
    path = write_tar(tmp_path / "x.tar", samples(0, 5))
    with open(path, "r+b") as file:
        status = os.fstat(file.fileno())
        size, mtime_ns = status.st_size, status.st_mtime_ns
        for state in ((size, mtime_ns), (size + 1, mtime_ns), (size, mtime_ns + 1), (size, mtime_ns + 10**9)):
            stamp = np.frombuffer(TarSnapshot.of(*state).stamp, np.uint8)
            assert has_status(file.fileno(), stamp) == (state == (size, mtime_ns))


# -- what cannot be read -----------------------------------------------------------------------------------------------


def test_errors(tmp_path: Path) -> None:
    path = write_tar(tmp_path / "x.tar", samples(0, 5))
    with pytest.raises(OptionError, match="a tar has no named databases"):
        pario.Loader(path, 2, db="x")
    (tmp_path / "x.tar.gz").write_bytes(gzip.compress(Path(path).read_bytes()))
    with pytest.raises(InvalidError, match=r"(?s)compressed.*pario data pack \S*x.tar.gz \S*x.tar.gz.lmdb"):
        pario.Loader(f"{path}.gz", 2)
    (tmp_path / "cut.tar").write_bytes(Path(path).read_bytes()[:2000])
    with pytest.raises(CorruptedError, match=r"(?s)would end behind the end of the file.*cut.tar.*offset 1024"):
        pario.Loader(tmp_path / "cut.tar", 2)
    empty = write_tar(tmp_path / "empty.tar", [])
    with pytest.raises(FileError, match="zeros"):
        pario.Loader(empty, 2)
    with pytest.raises(MissingError, match=r"shard-002"):
        pario.Loader(f"{tmp_path}/shard-{{002..003}}.tar", 2)
    with pytest.raises(MissingError, match=r"stands for 0 files.*lower number first"):
        pario.Loader(f"{tmp_path}/shard-{{5..3}}.tar", 2)
    with pytest.raises(MissingError, match="no such file"):
        pario.Loader(f"{tmp_path}/shard-{{0..{'9' * 200}}}.tar", 2)
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "a.jpg").touch()
    with pytest.raises(MissingError, match=r"pario data pack \S*folder \S*folder.lmdb"):
        pario.Loader(tmp_path / "folder", 2)


def test_a_tar_of_links_only(tmp_path: Path) -> None:
    import tarfile

    with tarfile.open(tmp_path / "x.tar", "w") as tar:
        info = tarfile.TarInfo("soft")
        info.type, info.linkname = tarfile.SYMTYPE, "elsewhere"
        tar.addfile(info)
    with pytest.raises(EmptyError, match="holds no file"):
        pario.Reader(tmp_path / "x.tar")


def test_other_tools_say_what_it_is(tmp_path: Path) -> None:
    """py-lmdb's interface reads no tar, and says what to do."""
    import pario.lmdb

    path = write_tar(tmp_path / "x.tar", samples(0, 5))
    with pytest.raises(pario.lmdb.Error, match="a tar"):
        pario.lmdb.open(path, subdir=False, readonly=True, lock=False)


def test_the_index_is_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = write_tar(tmp_path / "x.tar", samples(0, 5))
    with caplog.at_level(logging.INFO), pario.Reader(path):
        pass
    assert f"the index of {path} is saved as {path}.pario.index" in caplog.text


# -- commands ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("names", ["{:06d}", "d/{:x}q"])
def test_info_writes_a_line_that_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str], names: str) -> None:
    """Of a tar, of several, and of the LMDB that `pack` makes of one: samples, whatever their names are made of."""

    def samples_of(first: int) -> list[tuple[str, bytes]]:
        numbers = [(i * 7919) % 1000 for i in range(first, first + 30)]
        return [(f"{names.format(i)}.{kind}", f"{kind} {i}".encode()) for i in numbers for kind in ("seg.txt", "txt")]

    for k in range(2):
        write_tar(tmp_path / f"s-{k}.tar", [*samples_of(100 * k)])
    path = f"{tmp_path}/s-0.tar"
    assert main(["data", "pack", path, f"{tmp_path}/s.lmdb"]) == 0
    for one in (path, f"{tmp_path}/s-{{0..1}}.tar", f"{tmp_path}/s.lmdb"):
        capsys.readouterr()
        assert main(["data", "head", one]) == 0
        assert f"{names.format(0)}.txt" in capsys.readouterr().out
        assert main(["data", "info", one]) == 0
        (line,) = [line for line in capsys.readouterr().out.splitlines() if "loader = " in line]
        made: dict[str, Any] = {"pario": pario}
        exec(line.strip().replace('shuffle="global"', "shuffle=False"), made)
        with made["loader"] as loader:
            batch = next(iter(loader))
            assert batch["txt"][0] == "txt 0"
            assert batch["seg_txt"][0] == "seg.txt 0"
