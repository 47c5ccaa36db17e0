"""Members of tars of every kind, as Python's tarfile tells; damaged ones and hostile ones. The oracle is tarfile."""

from __future__ import annotations

import io
import tarfile
from pathlib import Path

import pytest
from tars import LONG, odd_members, truth, write_tar

from pario.errors import CorruptedError, FileError, InvalidError
from pario.format.tar import BLOCK, Members, is_header


def members(data: bytes) -> dict[bytes, bytes]:
    """name -> content; read through windows that end at the file's end."""
    found = Members(lambda at, nbytes: data[at : at + nbytes], len(data))
    return {one.name: data[one.offset : one.offset + one.nbytes] for one in found if not one.linked}


@pytest.mark.parametrize("kind", [tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT])
def test_every_format(tmp_path: Path, kind: int) -> None:
    given = odd_members()
    if kind == tarfile.USTAR_FORMAT:  # which has no room for a name of 101 bytes without a slash
        given = [(name, value) for name, value in given if not name.startswith("zz")]
    path = write_tar(tmp_path / "x.tar", given, format=kind)
    assert sorted(members(Path(path).read_bytes()).items()) == truth(path)
    assert len(truth(path)) == len(given)


def test_what_is_no_file(tmp_path: Path) -> None:
    """Folders, links and devices have no content; hard links are told of; the last of a name counts."""
    data = io.BytesIO()
    with tarfile.open(fileobj=data, mode="w", format=tarfile.GNU_FORMAT) as tar:
        for name, kind in (("dir", tarfile.DIRTYPE), ("soft", tarfile.SYMTYPE), ("pipe", tarfile.FIFOTYPE)):
            info = tarfile.TarInfo(name)
            info.type, info.linkname = kind, LONG + "x" * 200  # a long link stands in a header of its own
            tar.addfile(info)
        for value in (b"first", b"second"):
            info = tarfile.TarInfo("twice")
            info.size = len(value)
            tar.addfile(info, io.BytesIO(value))
        info = tarfile.TarInfo("hard")
        info.type, info.linkname = tarfile.LNKTYPE, "twice"
        tar.addfile(info)
    assert members(data.getvalue()) == {b"twice": b"second"}
    every = Members(lambda at, nbytes: data.getvalue()[at : at + nbytes], len(data.getvalue()))
    assert [one.name for one in every if one.linked] == [b"hard"]


def header(name: bytes, size: bytes, kind: bytes = b"0") -> bytes:
    block = bytearray(BLOCK)
    block[:100], block[124:136], block[156:157] = name.ljust(100, b"\0"), size.ljust(12, b"\0"), kind
    block[257:265] = b"ustar\00000"
    block[148:156] = b"%06o\0 " % (sum(block) + 8 * 32)
    assert is_header(bytes(block))
    return bytes(block)


def pax(*records: bytes) -> bytes:
    told = b"".join(records)
    return header(b"pax", b"%o" % len(told), b"x") + told.ljust(BLOCK, b"\0")


END = bytes(2 * BLOCK)
FILE = header(b"x", b"3") + b"abc".ljust(BLOCK, b"\0")
BASE_256 = b"\x80" + (3).to_bytes(11, "big")


@pytest.mark.parametrize(
    ("data", "found"),
    [
        (FILE + END, {b"x": b"abc"}),
        (FILE, {b"x": b"abc"}),  # without an end
        (header(b"x", BASE_256) + b"abc".ljust(BLOCK, b"\0") + END, {b"x": b"abc"}),
        (pax(b"12 path=abc\n") + FILE + END, {b"abc": b"abc"}),
        (pax(b"10 size=2\n") + FILE + END, {b"x": b"ab"}),
        (pax(b"14 comment=12\n") + FILE + END, {b"x": b"abc"}),
        (header(b"d/", b"0", b"\0") + FILE + END, {b"x": b"abc"}),  # a folder of V7
        (header(b"y", b"3", b"Z") + b"abc".ljust(BLOCK, b"\0") + FILE + END, {b"x": b"abc"}),  # a kind of its own
        (FILE + END + b"no tar" * 100, {b"x": b"abc"}),
    ],
)
def test_what_others_write(data: bytes, found: dict[bytes, bytes]) -> None:
    assert members(data) == found
    with tarfile.open(fileobj=io.BytesIO(data)) as tar:
        assert [one.name.encode() for one in tar if one.isreg()] == list(found)


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (header(b"x", b"2000") + b"abc", "1,024 bytes would end behind the end of the file, which has 515"),
        (header(b"x", b"\x80" + b"\xff" * 11), "would end behind the end of the file"),
        (header(b"x", b"\xff" * 12), "-1 bytes"),
        (header(b"x", b"+7"), "no number for its size"),
        (header(b"x", b"1_0"), "no number for its size"),
        (FILE + b"\1" * BLOCK, "neither a header nor the end of the tar is there, behind the member 'x'"),
        (FILE + FILE[:100], "neither a header nor the end"),
        (FILE + END + FILE + END, "another tar follows behind the end of this one"),
        (FILE + END * 20 + FILE + END, "another tar follows behind the end of this one"),
        (header(b"x", b"3", b"S") + FILE, "sparse"),
        (pax(b"22 GNU.sparse.major=1\n") + FILE + END, "sparse"),
        (pax(b"99 path=abc\n") + FILE + END, "no record"),
        (pax(b"0 path=abc\n") + FILE + END, "no record"),
        (pax(b"path") + FILE + END, "no record"),
        (pax(b"11 size=-2\n") + FILE + END, "a pax header says that the size is"),
        (header(b"g", b"14", b"g") + b"12 path=abc\n".ljust(BLOCK, b"\0") + FILE + END, "sets their name or size"),
        (header(b"l", b"77777777", b"L") + bytes(1 << 24), "enough for any name"),
        (header(b"l", b"20000", b"L") + b"n" * 8192 + FILE + END, "paths have at most"),
    ],
)
def test_hostile(data: bytes, said: str) -> None:
    with pytest.raises(FileError, match=said) as caught:
        members(data)
    assert isinstance(caught.value, (CorruptedError, InvalidError))
    assert caught.value.offset is not None
    assert caught.value.hint


def test_a_header_full_of_records() -> None:
    """A path behind 100,000 records counts; each is looked at in place."""
    told = b"6 a=b\n" * 100_000 + b"12 path=abc\n"
    data = header(b"pax", b"%o" % len(told), b"x") + told + bytes(-len(told) % BLOCK) + FILE + END
    assert members(data) == {b"abc": b"abc"}


def test_checksums_of_signed_bytes() -> None:
    block = bytearray(header("ß".encode(), b"0"))
    signed = sum(byte - 256 * (byte > 127) for byte in block[:148] + b" " * 8 + block[156:])
    block[148:156] = b"%06o\0 " % signed
    assert members(bytes(block) + END) == {"ß".encode(): b""}
    block[0] ^= 0x80
    assert not is_header(bytes(block))


def test_every_cut_is_told_or_harmless(tmp_path: Path) -> None:
    """A tar that ends early: all that is found is right, and only a cut between two members finds fewer in silence."""
    whole = Path(write_tar(tmp_path / "x.tar", [("a", b"1" * 600), ("b", b"2" * 600)])).read_bytes()[: 6 * BLOCK]
    for end in range(1, len(whole)):
        try:
            found = members(whole[:end])
        except FileError:
            continue
        assert end == 3 * BLOCK
        assert found == {b"a": b"1" * 600}
