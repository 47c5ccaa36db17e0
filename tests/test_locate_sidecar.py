"""The side-car: the same index when it is loaded, never believed when it is stale or damaged."""

from __future__ import annotations

import contextlib
import logging
import os
import resource
import shutil
import stat
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from lmdb_cases import index_of, opened, oracle, right, same
from sidecars import Arrays, edit

from pario.errors import SnapshotError
from pario.locate.sidecar import Trustees, same_sidecar, sidecar_places


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache directory of the test's own."""
    monkeypatch.setenv("XDG_CACHE_HOME", os.fspath(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def path(tmp_path: Path) -> str:
    """A small database with keys of different lengths, whose file order is not key order."""
    with opened(tmp_path / "set", 1) as env:
        rng = np.random.default_rng(8)
        for part in np.split(rng.permutation(1200), 4):
            with env.begin(write=True) as txn:
                for i in part.tolist():
                    txn.put(b"%d" % (i * i), rng.bytes(int(rng.integers(0, 3000))))
    return os.fspath(tmp_path / "set" / "data.mdb")


def test_a_commit_makes_it_stale(path: str) -> None:
    before = index_of(path)
    with opened(os.path.dirname(path), 1) as env, env.begin(write=True) as txn:
        txn.put(b"one more", b"value")
    after = index_of(path)
    assert after.bytes_read > 0
    assert after.n == before.n + 1
    assert after.database.fingerprint != before.database.fingerprint
    assert after.content_id != before.content_id
    right(after, path)
    # The keys of the first one are gone, and are not mistaken for those of the second.
    assert before.n > 2  # those of the first and the last record were read with the index
    with pytest.raises(SnapshotError, match="replaced"):
        before.keys([1])


def test_a_node_sees_the_side_car_of_rank_0_or_another_or_none(tmp_path: Path) -> None:
    """Cache directories may be one per node."""
    sidecar = tmp_path / "x.index"
    sidecar.write_bytes(bytes(100))
    os.utime(sidecar, ns=(7, 7))
    assert same_sidecar(os.fspath(sidecar), (100, 7))
    assert not same_sidecar(os.fspath(sidecar), (101, 7))
    assert not same_sidecar(os.fspath(sidecar), (100, 8))
    assert not same_sidecar(os.fspath(sidecar), None)
    sidecar.unlink()
    assert not same_sidecar(os.fspath(sidecar), (100, 7))


def test_a_moved_copy_has_the_same_content(path: str, tmp_path: Path) -> None:
    first = index_of(path)
    copy = os.fspath(tmp_path / "copy.mdb")
    shutil.copyfile(path, copy)
    shutil.copyfile(next(sidecar_places(path)), next(sidecar_places(copy)))  # of another file: not believed
    second = index_of(copy)
    assert second.bytes_read > 0
    assert second.database.fingerprint != first.database.fingerprint
    assert second.content_id == first.content_id


def _edit(change: Callable[[dict[str, Any], Arrays], object]) -> Callable[[str], None]:
    return lambda place: edit(place, change)


def _replace(name: str, change: Callable[[np.ndarray], np.ndarray]) -> Callable[[str], None]:
    return _edit(lambda _, arrays: arrays.update({name: change(arrays[name])}))


def _write_into(name: str, row: int, value: int) -> Callable[[str], None]:
    return _edit(lambda _, arrays: arrays[name].__setitem__(row, value))


def _drop(name: str) -> Callable[[str], None]:
    return _edit(lambda said, arrays: (arrays if name in arrays else said).pop(name))


def _say(name: str, value: object) -> Callable[[str], None]:
    return _edit(lambda said, _: said.update({name: value}))


def _rewrite(old: bytes, new: bytes) -> Callable[[str], None]:
    """In the line of JSON, without its checksum."""
    return lambda place: void(Path(place).write_bytes(Path(place).read_bytes().replace(old, new, 1)))


def void(_: object) -> None:
    """Nothing."""


SIDECAR_DAMAGE: dict[str, Callable[[str], None]] = {
    "empty": lambda place: os.truncate(place, 0),
    "half": lambda place: os.truncate(place, os.path.getsize(place) // 2),
    "a byte less": lambda place: os.truncate(place, os.path.getsize(place) - 1),
    "a byte more": lambda place: os.truncate(place, os.path.getsize(place) + 1),
    "text": lambda place: void(Path(place).write_text("no index")),
    "another version": _rewrite(b"pario side-car 1", b"pario side-car 9"),
    "an earlier version": lambda place: void(Path(place).write_bytes(b"\x89HDF\r\n\x1a\n" + bytes(4096))),
    "another line": _rewrite(b"key_width", b"key_wedth"),
    "no JSON": _rewrite(b"{", b"["),
    "a list": lambda place: void(Path(place).write_bytes(b"pario side-car 1\n[]\n")),
    "much JSON": lambda place: void(Path(place).write_bytes(b"pario side-car 1\n" + b"[" * 1_000_000)),
    "arrays without end": _rewrite(b'"|u1", ', b'"|u1", 999999999'),
    "arrays of objects": _rewrite(b'"|u1"', b'"|O8"'),
    "another state": _say("fingerprint", "0" * 32),
    "no state": _drop("fingerprint"),
    "no extents": _drop("extents"),
    "no keys": _drop("key_data"),
    "no key starts": _drop("key_starts"),
    "extents of another shape": _replace("extents", lambda a: a[:-2]),
    "half an extent": _replace("extents", lambda a: a[:-1]),
    "extents of bytes": _replace("extents", lambda a: a.astype(np.uint8)),
    "an extent elsewhere": _write_into("extents", 14, 4096),
    "file order twice the same": _write_into("by_offset", 7, 0),
    "file order out of range": _write_into("by_offset", 7, 1 << 40),
    "file order of another shape": _replace("by_offset", lambda a: a[:-1]),
    "file order of bytes": _replace("by_offset", lambda a: a.view(np.uint8)),
    "no file order": _drop("by_offset"),
    "keys cut": _replace("key_data", lambda a: a[:-1]),
    "keys of numbers": _replace("key_data", lambda a: a.astype(np.int64)),
    "key starts of bytes": _replace("key_starts", lambda a: a.astype(np.uint8)),
    "a width in words": _say("key_width", "wide"),
}


@pytest.mark.parametrize("name", SIDECAR_DAMAGE)
def test_a_damaged_sidecar_is_made_again(path: str, name: str) -> None:
    first = index_of(path)
    assert first.sidecar is not None
    SIDECAR_DAMAGE[name](first.sidecar)
    second = index_of(path)
    assert second.bytes_read > 0
    right(second, path)
    same(first, second)
    assert index_of(path).bytes_read == 0


def test_noise_in_a_sidecar(path: str) -> None:
    """Flipped bytes anywhere: the index is right, whether it was believed or not, and keys are right or refused."""
    first = index_of(path)
    assert first.sidecar is not None
    whole = Path(first.sidecar).read_bytes()
    expected = [key for key, _ in oracle(path)]
    rng = np.random.default_rng(1)
    refused = 0
    for _ in range(60):
        raw = np.frombuffer(whole, np.uint8).copy()
        raw[rng.integers(0, len(raw), 20)] ^= 255
        Path(first.sidecar).write_bytes(raw.tobytes())
        index = index_of(path, save=False)
        same(first, index)
        try:
            assert index.keys(np.arange(index.n)) == expected
        except SnapshotError:
            refused += 1
        index.close()
    assert refused < 60


def test_named_databases_have_sidecars_of_their_own(tmp_path: Path) -> None:
    names = [b"a", b"a/b", b"..", b"\xff\xfe", b"main", b"n" * 200]
    with opened(tmp_path, 1) as env:
        for name in names:
            with env.begin(write=True, db=env.open_db(name)) as txn:
                txn.put(b"name", name)
    path = os.fspath(tmp_path / "data.mdb")
    places = {next(sidecar_places(path, name)) for name in [None, *names]}
    assert len(places) == len(names) + 1
    for name in names:
        index = index_of(path, name)
        assert index.sidecar is not None
        assert os.path.dirname(index.sidecar) == os.fspath(tmp_path)
        right(index, path, name)
        assert index_of(path, name).bytes_read == 0
    assert index_of(path, b"main").n == 1


@pytest.fixture
def blocked(path: str) -> str:
    """Beside the dataset nothing can be saved: a directory stands there."""
    place = Path(next(sidecar_places(path)))
    place.mkdir()
    (place / "something").touch()
    return path


def test_the_cache_directory_is_second(blocked: str, cache: Path, caplog: pytest.LogCaptureFixture) -> None:
    first = index_of(blocked)
    second = index_of(blocked)
    assert first.sidecar == second.sidecar
    assert Path(first.sidecar or "").is_relative_to(cache)
    assert second.bytes_read == 0
    right(second, blocked)
    assert not [r for r in caplog.records if r.levelno >= logging.WARNING]


def test_without_any_place(blocked: str, cache: Path, caplog: pytest.LogCaptureFixture) -> None:
    cache.write_text("a file where the directory should be")
    index = index_of(blocked)
    assert index.sidecar is None
    right(index, blocked)
    warnings = [r.getMessage() for r in caplog.records if r.levelno >= logging.WARNING]
    assert len(warnings) == 1
    assert "cannot be saved" in warnings[0]
    assert blocked in warnings[0]


@pytest.fixture
def file_limit() -> Iterator[Callable[[int], None]]:
    """Sets the largest file that this process may write: writes fail as on a full disk."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    yield lambda limit: resource.setrlimit(resource.RLIMIT_FSIZE, (limit, before[1]))
    resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.mark.parametrize("room", [0, 100, 5000, 15000, 30000])
def test_full_disk(
    path: str, room: int, file_limit: Callable[[int], None], cache: Path, caplog: pytest.LogCaptureFixture
) -> None:
    index_of(path, save=False)  # kernels compiled and cached
    file_limit(room)
    index = index_of(path)
    file_limit(resource.getrlimit(resource.RLIMIT_FSIZE)[1])
    assert index.sidecar is None
    right(index, path)
    assert any("cannot be saved" in r.getMessage() for r in caplog.records)
    left = [p for p in [*Path(path).parent.iterdir(), *cache.rglob("*")] if p.is_file()]
    assert sorted(p.name for p in left) == ["data.mdb", "lock.mdb"]


def test_not_saved_on_request(path: str, cache: Path) -> None:
    index = index_of(path, save=False)
    assert index.sidecar is None
    assert not os.path.exists(next(sidecar_places(path)))
    assert not cache.exists()
    right(index, path)


ME = os.geteuid()
#: (mode, user, group) of the side-car; of the data file; is the side-car believed?
OWNERS = {
    "mine": ((0o644, ME, 7), (0o644, 4711, 7), True),
    "root's": ((0o644, 0, 0), (0o644, 4711, 7), True),
    "the data file's owner's": ((0o644, 4711, 7), (0o444, 4711, 7), True),
    "a third one's": ((0o644, 4712, 7), (0o644, 4711, 7), False),
    "a third one's, who may write the data file": ((0o644, 4712, 7), (0o666, 4711, 7), False),
    "the group may write it": ((0o664, ME, 7), (0o644, ME, 7), False),
    "the group may write both": ((0o664, ME, 7), (0o664, ME, 7), True),
    "another group may write it": ((0o664, ME, 8), (0o664, ME, 7), False),
    "everybody may write it": ((0o646, ME, 7), (0o664, ME, 7), False),
    "everybody may write both": ((0o666, ME, 7), (0o666, ME, 7), True),
}


def _status(mode: int, uid: int, gid: int, kind: int = stat.S_IFREG) -> os.stat_result:
    return os.stat_result((kind | mode, 1, 1, 1, uid, gid, 0, 0, 0, 0))


@pytest.mark.parametrize("name", OWNERS)
def test_whose_sidecars_are_believed(name: str) -> None:
    sidecar, data, believed = OWNERS[name]
    with contextlib.nullcontext() if believed else pytest.raises(ValueError, match="user"):
        Trustees.of(_status(*data)).check(_status(*sidecar))


def test_a_sidecar_that_is_no_file() -> None:
    with pytest.raises(ValueError, match="regular"):
        Trustees.of(_status(0o644, ME, 7)).check(_status(0o644, ME, 7, stat.S_IFIFO))


def test_a_sidecar_that_everybody_may_write_is_made_again(path: str) -> None:
    first = index_of(path)
    assert first.sidecar is not None
    os.chmod(first.sidecar, 0o666)
    assert index_of(path).bytes_read > 0
    assert stat.S_IMODE(os.stat(first.sidecar).st_mode) & 0o022 == 0
    assert index_of(path).bytes_read == 0
