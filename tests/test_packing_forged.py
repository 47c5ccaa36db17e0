"""Packed files that somebody has made up: unpacking writes nowhere else, and fills no memory."""

from __future__ import annotations

import json
import os
import stat
import struct
import subprocess
import sys
import tarfile
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import lmdb
import numpy as np
import pytest
import xxhash
from pack_sources import lmdb_truth, packed, quiet, tree_truth, unpacked

from pario.codec import listing
from pario.codec.listing import Row, rows_of
from pario.codec.packing import Packing, inflated
from pario.comm.solo import Solo
from pario.errors import CorruptedError
from pario.packing import folder, tars, unpack
from pario.packing.items import NoItems
from pario.packing.sources import own_names

pytestmark = pytest.mark.hostile


def part(*rows: tuple[Any, ...]) -> bytes:
    """The part of a folder with these names."""
    whole = [("", 0o40755, 0, 0, 0, None), *rows]
    return zlib.compress(json.dumps({"rows": whole, "users": {}, "groups": {}}).encode())


@pytest.mark.parametrize("names", [["1-x", "x", "x"], ["x", "0-x", "x"], ["a", "b"], ["x", "x", "0-x", "1-x", "1-1-x"]])
def test_no_two_sources_have_one_name(names: list[str]) -> None:
    own = own_names(names)
    assert len(set(own)) == len(names)
    assert all(mine == name for mine, name in zip(own, names, strict=True) if names.count(name) == 1)


def test_a_source_is_never_written_through_the_link_of_another_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a file of 0.1.0 could say: the second source's LMDB would come into the folder of the first one."""
    outside = tmp_path / "outside"
    (tmp_path / "1-x").mkdir()
    for name in ("lock.mdb", "data"):
        (tmp_path / "1-x" / name).symlink_to(outside)
    (tmp_path / "1-x/x").write_bytes(b"0" * 40)
    given = [str(tmp_path / "1-x")]
    for number, letter in enumerate("ab"):
        (tmp_path / letter).mkdir()
        given.append(str(tmp_path / letter / "x"))
        with lmdb.open(given[-1], map_size=1 << 20) as env, env.begin(write=True) as txn:
            txn.put(b"%d" % number, b"value")
    monkeypatch.setattr("pario.packing.sources.own_names", lambda names: names)
    packed(given, str(tmp_path / "packed"), prefix=False, codec="raw", verify=False)
    unpacked(str(tmp_path / "packed"), str(tmp_path / "back"))
    assert not outside.exists()
    assert sorted(os.listdir(tmp_path / "back")) == ["1-1-x", "1-x", "2-x"]
    assert os.readlink(tmp_path / "back/1-x/lock.mdb") == str(outside)
    assert lmdb_truth(str(tmp_path / "back/1-1-x")) == lmdb_truth(given[1])
    assert lmdb_truth(str(tmp_path / "back/2-x")) == lmdb_truth(given[2])


@pytest.mark.parametrize("user", [0, 1000])
def test_no_file_gets_the_rights_of_who_unpacks_it(user: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """For root it is the owner that it claims; anybody else would lend it his own rights."""
    (tmp_path / "back").mkdir()
    made = folder.Restorer(str(tmp_path / "back"), part(("a", 0o106755, 0, 1000, 1000, None)), "x")
    made.write(made.files[0], memoryview(b"content"))
    owners = []
    monkeypatch.setattr(os, "geteuid", lambda: user)
    monkeypatch.setattr(os, "lchown", lambda _, uid, gid: owners.append((uid, gid)))
    made.finish()
    assert owners == [(1000 if user == 0 else -1, 1000)]
    assert stat.S_IMODE((tmp_path / "back/a").stat().st_mode) == (0o6755 if user == 0 else 0o755)


def test_a_folder_that_may_not_be_written_gets_its_mode_last(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """tests/system/test_packing_files.py shows that without root it could not be renamed."""
    source, modes, rename = tmp_path / "source", [], os.rename
    (source / "deep").mkdir(parents=True)
    (source / "deep").chmod(0o500)
    source.chmod(0o555)
    os.utime(source, ns=(1, 1_234_567_890_123_456_789))
    truth = tree_truth(str(source))
    packed([str(source)], str(tmp_path / "packed"), codec="raw")

    def seen(path: str, to: str) -> None:
        modes.append(stat.S_IMODE(os.stat(path).st_mode))
        rename(path, to)

    monkeypatch.setattr(os, "rename", seen)
    unpacked(str(tmp_path / "packed"), str(tmp_path / "back"))
    assert modes[-1] == 0o700
    assert tree_truth(str(tmp_path / "back")) == truth


BOMB = zlib.compress(bytes(1 << 20))


def test_parts_inflate_to_no_more_than_they_should() -> None:
    for most in (1 << 20, 1 << 21):
        assert inflated(BOMB, most) == bytes(1 << 20)
    for part_, most, why in ((BOMB, (1 << 20) - 1, "more than"), (BOMB[:-1], 1 << 20, "early"), (b"junk", 9, "header")):
        with pytest.raises(ValueError, match=why):
            inflated(part_, most)


def test_bombs_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a tree of names, and of the table of a tar's members."""
    monkeypatch.setattr(listing, "_TREE", 1000)
    with pytest.raises(CorruptedError, match="inflates to more than"):
        folder.Restorer(str(tmp_path), BOMB, "x")
    with pytest.raises(CorruptedError, match="inflates to more than"):
        tars.TarRestorer({"tar": b"", "members": BOMB}, NoItems(0), "x")


@pytest.mark.parametrize("at", [1, 2, 3, 4])
@pytest.mark.parametrize("number", [1 << 63, -(1 << 63) - 1, float("inf"), float("nan")])
def test_numbers_that_no_file_has_are_damage(at: int, number: float, tmp_path: Path) -> None:
    """Mode, time, user and group: the system would take none of them."""
    row: list[Any] = ["a", 0o100644, 0, 0, 0, None]
    row[at] = number
    with pytest.raises(CorruptedError, match="names of the folder is damaged"):
        folder.Restorer(str(tmp_path), part(tuple(row)), "x")


def test_texts_that_no_link_or_name_has_are_damage(tmp_path: Path) -> None:
    for mode, target in ((0o120777, "b\0c"), (0o120777, ""), (0o120777, "x" * 4096), (0o10644, None), (0o644, None)):
        with pytest.raises(CorruptedError, match="that no file has"):
            folder.Restorer(str(tmp_path), part(("a", mode, 0, 0, 0, target)), "x")
    folder.Restorer(str(tmp_path), part(("a", 0o120777, 0, 0, 0, "x" * 4095)), "x")
    with pytest.raises(CorruptedError, match="damaged"):
        folder.Restorer(str(tmp_path), zlib.compress(b"[" * 1_000_000), "x")


@pytest.mark.parametrize("name", ["", ".", "..", "a/b", "/a", "a\0b", "\ud800"])
def test_names_of_sources_never_lead_out_of_the_folder(name: str, tmp_path: Path) -> None:
    packing = Packing([], more={"sources": [{"source": "tar", "prefix": "", "in_folder": False, "file": name}]})
    packing.parts["owners"] = zlib.compress(b"")
    with Solo() as world:
        restored = unpack._Restored(world, "x", str(tmp_path / "back"), quiet(), False)
        with pytest.raises(CorruptedError, match="table of the sources"):
            restored._several(None, NoItems(0), packing, str(tmp_path / "made"), None)  # type: ignore[arg-type]
    assert os.listdir(tmp_path) == []


# -- the names of a tar ------------------------------------------------------------------------------------------------


def member(name: str, size: int = 0, kind: bytes = tarfile.REGTYPE, pax: dict[str, str] | None = None) -> bytes:
    """Its header, and its content of zeros."""
    info = tarfile.TarInfo(name)
    info.size, info.type, info.pax_headers = size, kind, pax or {}
    form = tarfile.PAX_FORMAT if pax else tarfile.GNU_FORMAT
    return info.tobuf(form) + bytes(-(-size // tarfile.BLOCKSIZE) * tarfile.BLOCKSIZE)


def names_in(rest: bytes, sizes: Sequence[int] = (0,), ranges: Sequence[Sequence[int]] = ()) -> list[Row] | None:
    """Of a packed tar. rest : without values; ranges : (record, offset, bytes) of each"""
    packing = Packing([], np.array(sizes, np.int64), more={"source": "tar"})
    members = np.array(ranges, "<i8").tobytes()
    packing.parts = {"tar": zlib.compress(rest + bytes(1024)), "members": zlib.compress(members)}
    return rows_of(packing, "x")


def test_a_path_may_be_as_long_as_the_system_takes() -> None:
    rows = names_in(member("a/" * 2047 + "f"))
    assert rows is not None
    assert [row.path for row in rows] == [b"", *(b"/".join([b"a"] * k) for k in range(1, 2048)), b"a/" * 2047 + b"f"]
    assert names_in(member("a/" * 2048 + "f")) is None


def test_folders_that_nobody_named_fill_no_memory() -> None:
    """Each of these names lies in 2,000 of its own, which have 4 MB of names."""
    assert names_in(b"".join(member(f"{i}/" + "a/" * 2000 + "f") for i in range(3)), [0] * 3) is not None
    assert names_in(b"".join(member(f"{i}/" + "a/" * 2000 + "f") for i in range(40)), [0] * 40) is None


def test_headers_that_say_too_much_are_not_read() -> None:
    file = member("f", 5)[: tarfile.BLOCKSIZE]
    assert names_in(file + bytes(507), [5], [(0, 512, 5)]) is not None
    assert names_in(member("f", pax={"comment": "x" * (1 << 19)})) is not None
    assert names_in(member("f", pax={"comment": "x" * (2 << 20)})) is None
    link = member("././@LongLink", 3 << 20, tarfile.GNUTYPE_LONGLINK)[: tarfile.BLOCKSIZE]
    assert names_in(link + member("f"), [3 << 20], [(0, 512, 3 << 20)]) is None, "its text in a hole"
    shared = {f"k{i}": "x" for i in range(200)}
    assert names_in(tarfile.TarInfo.create_pax_global_header(shared) + member("f")) is None
    assert names_in(member("f", pax={"size": "-1536"}) + member("g"), [0, 0]) is None, "a member that leads back"


@pytest.mark.parametrize("where", [(0, 512, 7), (0, 512, -5), (-1, 512, 5)])
def test_values_of_a_tar_lie_where_they_can(where: tuple[int, int, int]) -> None:
    assert names_in(member("f", 5)[: tarfile.BLOCKSIZE] + bytes(507), [5], [where]) is None


def test_a_time_of_a_million_digits_is_not_computed() -> None:
    """By a process that can be ended: int() of one takes a while, and holds the GIL."""
    given = "from test_packing_forged import *; print(names_in(50 * member('f', pax={'mtime': '1e999980'})))"
    done = subprocess.run([sys.executable, "-c", given], cwd=Path(__file__).parent, capture_output=True, timeout=60)
    assert done.stdout == b"None\n", done.stderr
    for time in ("nan", "inf", "1e19", "-1e19"):
        assert names_in(member("f", pax={"mtime": time})) is None
    rows = names_in(member("f", pax={"mtime": "-0.000000001"}))
    assert rows is not None
    assert rows[1].mtime_ns == -1
    assert rows[0].mtime_ns != -1, "of the folder, which is not known"


def test_a_file_that_is_called_like_a_folder_has_its_key() -> None:
    assert names_in(member("f/")) is None


# -- several sources ---------------------------------------------------------------------------------------------------


def test_all_sources_together_inflate_to_no_more_than_one_may() -> None:
    whole = {"rows": [("", 0o40755, 0, 0, 0, None)], "users": {}, "groups": {}}
    tree = zlib.compress(json.dumps(whole).encode() + b" " * (40 << 20))
    for number in (1, 2):
        told = [{"source": "folder", "prefix": f"{i}/"} for i in range(number)]
        packing = Packing([], np.empty(0, np.int64), more={"source": "several", "sources": told})
        packing.parts = {"owners": zlib.compress(b""), "0.tree": tree, "1.tree": tree}
        if number == 1:
            assert len(rows_of(packing, "x") or []) == 2
        else:
            with pytest.raises(CorruptedError, match="inflates to more than"):
                rows_of(packing, "x")


def test_parts_that_are_the_same_bytes_are_damage() -> None:
    packing = Packing([], np.empty(0, np.int64))
    packing.parts = {"0.tree": b"A" * 50, "1.tree": b"B" * 50}
    entry = packing.entry()
    (length,) = struct.unpack_from("<I", entry, 8)
    said = json.loads(entry[12 : 12 + length])
    said["parts"]["1.tree"] = said["parts"]["2.tree"] = said["parts"]["0.tree"]
    text = json.dumps(said).encode()
    forged = entry[:8] + struct.pack("<I", len(text)) + text + entry[12 + length : -8]
    with pytest.raises(CorruptedError, match="parts that overlap"):
        Packing.from_entry(forged + struct.pack("<Q", xxhash.xxh3_64_intdigest(forged)))
