"""Sources of every kind for the tests of packing, and what is in an LMDB, a folder or a tar, told without pario."""

from __future__ import annotations

import hashlib
import io
import os
import stat
import tarfile
from collections.abc import Callable
from pathlib import Path

import lmdb
import numpy as np

from pario.comm.solo import Solo
from pario.packing.pack import PackOptions, Summary, Talk, pack
from pario.packing.unpack import unpack

__all__ = ["FOLDERS", "LMDBS", "TARS", "lmdb_truth", "packed", "quiet", "tree_truth", "unpacked"]

Truth = dict[bytes | None, tuple[dict[str, bool], list[tuple[bytes, bytes]]]]


def quiet(said: list[str] | None = None) -> Talk:
    return Talk((said if said is not None else []).append, lambda what, nbytes: lambda done: None)


def packed(sources: list[str], dst: str, said: list[str] | None = None, **options: object) -> Summary:
    with Solo() as world:
        return pack(world, sources, dst, PackOptions(**options), quiet(said))  # type: ignore[arg-type]


def unpacked(source: str, dst: str, said: list[str] | None = None, **options: bool) -> Summary:
    with Solo() as world:
        return unpack(world, source, dst, quiet(said), **options)


# -- what is in it -----------------------------------------------------------------------------------------------------


def lmdb_truth(path: str) -> Truth:
    """Flags and records of every database, the main one's (None) without the names of the others."""
    found: Truth = {}
    with lmdb.open(path, subdir=os.path.isdir(path), readonly=True, lock=False, max_dbs=64) as env:
        main: list[tuple[bytes, bytes]] = []
        with env.begin() as txn:
            entries = [(bytes(key), bytes(value)) for key, value in txn.cursor()]
        for key, value in entries:
            try:
                handle = env.open_db(key, create=False)
            except (lmdb.Error, TypeError):
                main.append((key, value))
                continue
            with env.begin(db=handle) as txn:
                found[key] = handle.flags(txn), [(bytes(k), bytes(v)) for k, v in txn.cursor()]
        found[None] = {}, main
    return found


def tree_truth(folder: str) -> dict[str, tuple[object, ...]]:
    """Kind, mode, time, content or target of every name; which names are one file."""
    found: dict[str, tuple[object, ...]] = {}
    first: dict[int, str] = {}
    names = [folder]
    for base, folders, files in os.walk(folder):
        names += [os.path.join(base, name) for name in (*folders, *files)]
    for path in sorted(names):
        status = os.lstat(path)
        content: object = None
        if stat.S_ISLNK(status.st_mode):
            content = os.readlink(path)
        elif stat.S_ISREG(status.st_mode):
            content = Path(path).read_bytes(), first.setdefault(status.st_ino, os.path.relpath(path, folder))
        found[os.path.relpath(path, folder)] = (status.st_mode, status.st_mtime_ns, content)
    return found


# -- LMDBs -------------------------------------------------------------------------------------------------------------


def _text(rng: np.random.Generator, n: int) -> bytes:
    return b" ".join([b"red", b"green", b"blue", b"seven"][k] for k in rng.integers(0, 4, n // 4))


def plain(folder: str) -> None:
    """JSON-like values, one without a byte, a large one that does not compress, one of zeros."""
    rng = np.random.default_rng(1)
    with lmdb.open(folder, map_size=64 << 20, sync=False) as env, env.begin(write=True) as txn:
        for i in range(600):
            txn.put(b"%06d" % i, b'{"id": %d, "words": "%s"}' % (i, _text(rng, 200)))
        txn.put(b"empty", b"")
        txn.put(b"large", rng.bytes(300_000))
        txn.put(b"zeros", bytes(70_000))


def huge_values(folder: str) -> None:
    """5 MB values among small and empty ones."""
    rng = np.random.default_rng(2)
    with lmdb.open(folder, map_size=64 << 20, sync=False) as env, env.begin(write=True) as txn:
        for i, size in enumerate((0, 1, 5_000_001, 0, 127, 128)):
            txn.put(b"%d" % i, rng.bytes(size // 2) + bytes(size - size // 2))


def all_kinds(folder: str) -> None:
    """Named databases with every flag that py-lmdb has, an empty one, records beside them in the main one."""
    rng = np.random.default_rng(3)
    with lmdb.open(folder, map_size=64 << 20, max_dbs=16, sync=False) as env:
        kinds: dict[bytes, dict[str, bool]] = {
            b"plain": {},
            b"empty": {},
            b"dup": {"dupsort": True},
            b"dupfixed": {"dupsort": True, "dupfixed": True},
            b"dupint": {"dupsort": True, "dupfixed": True, "integerdup": True},
            b"int": {"integerkey": True},
            b"reverse": {"reverse_key": True},
            "пакет \u2713".encode(): {},
        }
        for name, flags in kinds.items():
            handle = env.open_db(name, **flags)
            with env.begin(write=True, db=handle) as txn:
                for i in range(0 if name == b"empty" else 120):
                    key = np.uint64(i * 7).tobytes() if name == b"int" else b"%d key" % (i * 31 % 120)
                    for k in range(1 + 40 * (i % 5 == 0) if "dupsort" in flags else 1):
                        number = np.uint64(k * 1000 + i).tobytes()
                        txn.put(key, number if "dupfixed" in flags else number + _text(rng, 60))
        with env.begin(write=True) as txn:
            txn.put(b"in main", b"a" * 5000)
            txn.put(b"zz in main", b"a record behind the names")


def one_record(folder: str) -> None:
    with lmdb.open(folder, map_size=1 << 20, sync=False) as env, env.begin(write=True) as txn:
        txn.put("\u00fcber".encode(), b"the only one")


def no_record(folder: str) -> None:
    with lmdb.open(folder, map_size=1 << 20, sync=False):
        pass


def longest_keys(folder: str) -> None:
    """Keys up to the limit, and one close to the reserved ones."""
    with lmdb.open(folder, map_size=4 << 20, sync=False) as env, env.begin(write=True) as txn:
        for i in range(50):
            txn.put(b"%03d" % i + b"k" * 508, b"value" * i)
        txn.put(b"\xff" * 6 + b"z", b"behind the shortest reserved key")


def reserved_form(folder: str) -> None:
    """A user's last key that has the reserved form, and a value that is not an entry."""
    with lmdb.open(folder, map_size=4 << 20, sync=False) as env, env.begin(write=True) as txn:
        for i in range(50):
            txn.put(b"%03d" % i, b"value" * i)
        txn.put(b"\xff" * 4 + b"pario-packed", b"mine")


LMDBS: dict[str, Callable[[str], None]] = {
    maker.__name__: maker
    for maker in (plain, huge_values, all_kinds, one_record, no_record, longest_keys, reserved_form)
}


# -- folders -----------------------------------------------------------------------------------------------------------


def tree(folder: str) -> None:
    """Links of both kinds, empty folders, modes, times, names that are not ASCII or not UTF-8."""
    rng = np.random.default_rng(4)
    root = Path(folder)
    (root / "deep/er/est").mkdir(parents=True)
    (root / "nothing in it").mkdir(mode=0o750)
    for i in range(40):
        (root / "deep" / f"{i}.txt").write_bytes(_text(rng, 300))
    (root / "deep.txt").write_bytes(b"sorts between deep and deep/")
    (root / "deep/er/est/пример ✓.bin").write_bytes(rng.bytes(5000))
    (root / "empty").write_bytes(b"")
    (root / "run.sh").write_text("#!/bin/sh\n")
    (root / "run.sh").chmod(0o755)
    with open(os.path.join(os.fsencode(folder), b"caf\xe9"), "wb") as file:
        file.write(b"latin 1")
    os.link(root / "run.sh", root / "deep/same")
    os.symlink("../run.sh", root / "deep/link")
    os.symlink("nowhere", root / "dangling")
    os.symlink("deep", root / "to a folder")
    os.utime(root / "empty", ns=(1, 1_234_567_890_123_456_789))
    os.utime(root / "dangling", ns=(5, 5_000_000_001), follow_symlinks=False)
    (root / "secret").write_bytes(b"for me")
    (root / "secret").chmod(0o400)
    (root / "closed").mkdir()
    (root / "closed/file").write_bytes(b"inside")
    (root / "closed").chmod(0o555)
    os.utime(root / "deep", ns=(7, 1_000_000_000_000_000_007))


def bare(folder: str) -> None:
    os.mkdir(folder)


FOLDERS = {maker.__name__: maker for maker in (tree, bare)}


# -- tars --------------------------------------------------------------------------------------------------------------


def _tar(path: str, mode: str, form: int) -> None:
    rng = np.random.default_rng(5)
    with tarfile.open(path, mode, format=form) as tar:  # type: ignore[call-overload]
        def add(name: str, content: bytes = b"", **fields: object) -> None:
            member = tarfile.TarInfo(name)
            member.size = len(content)
            for field, value in {"mtime": 1_600_000_000, **fields}.items():
                setattr(member, field, value)
            tar.addfile(member, io.BytesIO(content))

        add("./z", b"first in the tar, last by name", mode=0o600)
        add("folder", type=tarfile.DIRTYPE, mode=0o755)
        for i in range(30):
            add(f"folder/{i}.json", _text(rng, 700))
        add("empty")
        add("long/" * 40 + "name", rng.bytes(3000))
        add("ünïcode", b"name")
        add("link", type=tarfile.SYMTYPE, linkname="z")
        add("hard", type=tarfile.LNKTYPE, linkname="folder/3.json")
        add("twice", b"the first")
        add("twice", b"the second")


def pax(path: str) -> None:
    _tar(path + ".tar", "w", tarfile.PAX_FORMAT)


def gnu(path: str) -> None:
    _tar(path + ".tar", "w", tarfile.GNU_FORMAT)


def squeezed(path: str) -> None:
    _tar(path + ".tar.gz", "w:gz", tarfile.GNU_FORMAT)


def xz(path: str) -> None:
    _tar(path + ".tar.xz", "w:xz", tarfile.PAX_FORMAT)


TARS = {maker.__name__: maker for maker in (pax, gnu, squeezed, xz)}


def digest(path: str) -> str:
    return hashlib.sha256(Path(path).read_bytes()).hexdigest()
