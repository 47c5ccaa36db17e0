"""The side-car of checksums: believed only whole, of this state of the file, and from who may write the data."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import lmdb
import numpy as np
import pytest
import sidecars

import pario
from pario.locate.database import Database
from pario.locate.sidecar import sidecar_places
from pario.locate.sums import Found, find_sums, save_sums

SUMS = np.arange(50, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", os.fspath(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def path(tmp_path: Path) -> str:
    with lmdb.open(str(tmp_path / "set")) as env, env.begin(write=True) as txn:
        for i in range(50):
            txn.put(b"%04d" % i, bytes([i]) * i * 99)
    return str(tmp_path / "set" / "data.mdb")


def database(path: str) -> Database:
    with pario.Reader(path, comm="self", save_index=False) as reader:
        return reader.index.database


def look(path: str) -> tuple[Found | None, list[str]]:
    return find_sums(database(path), os.stat(path), 50)


def saved(path: str) -> str:
    return save_sums(database(path), os.stat(path), SUMS)


def test_what_was_saved_comes_back(path: str) -> None:
    assert look(path) == (None, [])
    sidecar = saved(path)
    assert sidecar == path + ".pario.sums"
    assert os.stat(sidecar).st_mode & 0o022 == 0
    found, unfit = look(path)
    assert found is not None
    assert unfit == []
    assert np.array_equal(found.values, SUMS)
    assert (found.sidecar, found.moved) == (sidecar, False)
    assert [name for name in os.listdir(os.path.dirname(path)) if "tmp" in name] == []


def test_a_copy_of_both_is_believed_and_known_to_be_one(path: str, tmp_path: Path) -> None:
    saved(path)
    copy = str(tmp_path / "copy.mdb")
    for ending in ("", ".pario.sums"):
        shutil.copyfile(path + ending, copy + ending)
    found, _ = look(copy)
    assert found is not None
    assert found.moved


def test_those_of_this_very_file_come_first(path: str) -> None:
    """Where the folder cannot be written, new ones are in the cache; beside the file may be those of an older one."""
    sidecar = saved(path)
    elsewhere = list(sidecar_places(path, None, ".sums"))[1]
    os.makedirs(os.path.dirname(elsewhere))
    os.utime(path, ns=(5, 5))
    os.rename(sidecar, sidecar + ".old")
    os.rename(saved(path), elsewhere)
    os.rename(sidecar + ".old", sidecar)
    found, unfit = look(path)
    assert found is not None
    assert (found.sidecar, found.moved, unfit) == (elsewhere, False, [])


def test_a_commit_makes_them_stale(path: str) -> None:
    saved(path)
    with lmdb.open(os.path.dirname(path)) as env, env.begin(write=True) as txn:
        txn.put(b"0000", b"x")  # as many records
    found, unfit = look(path)
    assert found is None
    assert "another state" in unfit[0]


def test_another_number_of_records_does_not_fit(path: str) -> None:
    saved(path)
    assert find_sums(database(path), os.stat(path), 49)[0] is None


def cut(data: bytes) -> bytes:
    return data[:-1]


def grown(data: bytes) -> bytes:
    return data + b"\0"


def other_kind(data: bytes) -> bytes:
    return data.replace(b'"xxh3_64"', b'"crc_320"')


def other_digit(data: bytes) -> bytes:
    return data[:-30] + bytes([data[-30] ^ 1]) + data[-29:]


def no_json(data: bytes) -> bytes:
    return data.replace(b'{"sums"', b'["sums"')


def list_of_them(data: bytes) -> bytes:
    head, _, rest = data.split(b"\n", 2)
    return b"\n".join([head, json.dumps([1]).encode(), rest])


DAMAGE: list[tuple[Callable[[bytes], bytes], str]] = [
    (cut, "cut short"),
    (grown, "more bytes"),
    (other_kind, "damaged"),
    (other_digit, "damaged"),
    (no_json, "make no sense"),
    (list_of_them, "make no sense"),
    (lambda data: b"", "no side-car of this version"),
    (lambda data: data[:40], "make no sense"),
    (lambda data: b"pario sums 1\n" + data, "no side-car of this version"),
    (lambda data: b"pario side-car 1\n" + b"[" * 60_000, "make no sense"),
]


@pytest.mark.parametrize(("damage", "why"), DAMAGE, ids=[why for _, why in DAMAGE])
def test_damage_is_named_and_the_next_place_is_tried(path: str, damage: Callable[[bytes], bytes], why: str) -> None:
    sidecar = Path(saved(path))
    sidecar.write_bytes(damage(sidecar.read_bytes()))
    found, unfit = look(path)
    assert found is None
    assert why in unfit[0]
    assert str(sidecar) in unfit[0]
    elsewhere = list(sidecar_places(path, None, ".sums"))[1]
    os.makedirs(os.path.dirname(elsewhere))
    os.rename(sidecar, sidecar.with_suffix(".bad"))
    good = saved(path)
    os.rename(good, elsewhere)
    os.rename(sidecar.with_suffix(".bad"), sidecar)
    found, unfit = look(path)
    assert found is not None
    assert found.sidecar == elsewhere
    assert len(unfit) == 1


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (lambda said, _: said.update(sums="crc_32"), "of the kind 'crc_32'"),
        (lambda said, _: said.update(state="of another"), "another state"),
        (lambda _, arrays: arrays.update(values=arrays["values"].astype(np.int64)), "'xxh3_64' (int64), not 'xxh3_64'"),
        (lambda said, arrays: arrays.clear(), "another state"),
        (lambda said, arrays: arrays.update(values=arrays["values"][:-1]), "another state"),
    ],
    ids=["kind", "state", "type", "no values", "fewer values"],
)
def test_what_it_says_of_itself(path: str, change: Callable[..., None], why: str) -> None:
    sidecars.edit(saved(path), change)
    found, unfit = look(path)
    assert found is None
    assert why in unfit[0]


def test_every_flipped_bit_of_it_is_found(path: str) -> None:
    sidecar, known, status = Path(saved(path)), database(path), os.stat(path)
    good = sidecar.read_bytes()
    about = good.split(b"\n", 2)[1]
    first = good.index(about) + len(about) + 1
    for at in range(first, len(good)):
        sidecar.write_bytes(good[:at] + bytes([good[at] ^ 1 << at % 8]) + good[at + 1 :])
        assert find_sums(known, status, 50)[0] is None


def test_not_from_other_users(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    sidecar = saved(path)
    status = os.stat(path)
    known = database(path)
    if os.geteuid() == 0:
        os.chown(sidecar, 54_321, -1)
    else:  # the same from the other side: now this user is the other one
        monkeypatch.setattr(os, "geteuid", lambda: 54_321)
        status = os.stat_result((*status[:4], 54_321, *status[5:]))
    found, unfit = find_sums(known, status, 50)
    assert found is None
    assert "belongs to user" in unfit[0]


def test_not_where_others_may_write(path: str) -> None:
    os.chmod(saved(path), 0o666)
    found, unfit = look(path)
    assert found is None
    assert "may write it" in unfit[0]


def test_links_and_pipes(path: str, tmp_path: Path) -> None:
    """A link leads to what is looked at like any other; saving replaces it, not what it leads to."""
    sidecar = Path(saved(path))
    target = tmp_path / "elsewhere"
    os.rename(sidecar, target)
    sidecar.symlink_to(target)
    assert look(path)[0] is not None
    before = target.read_bytes()
    saved(path)
    assert not sidecar.is_symlink()
    assert target.read_bytes() == before
    sidecar.unlink()
    sidecar.symlink_to("/dev/zero")
    assert "not a regular file" in look(path)[1][0]
    sidecar.unlink()
    os.mkfifo(sidecar)
    assert "not a regular file" in look(path)[1][0]


def test_where_it_cannot_be_saved(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(fd: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(pario.FileError, match=r"cannot be saved.*No space left"):
        saved(path)
    assert [name for name in os.listdir(os.path.dirname(path)) if "sums" in name] == []
