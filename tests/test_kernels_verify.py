"""The checks of what stands before records, on pages written by hand."""

from __future__ import annotations

import struct
from collections.abc import Callable

import numpy as np
import pytest

from pario.kernels.nodes import FILE
from pario.kernels.verify import BAD_NODE, BAD_PAGE, check_values

P = 4096
LEAF, OVERFLOW, LEAF2 = 0x02, 0x04, 0x20
DUPDATA, SUBP = 0x04, 0x40
GOOD = (-1, 0)


def words(version: int = 1, **other: int) -> np.ndarray:
    """Of a 64-bit little-endian file."""
    header, base = (24, 24) if version == 3 else (16, 0)
    known = {"page_size": P, "header": header, "base": base, "version": version, "word": 8}
    known |= {"txnid": 50, "limit": P}
    return np.array([{**known, **other}.get(name, 0) for name in FILE], np.int64)


def header(pgno: int, flags: int, pages: int = 0, *, lower: int = 0, upper: int = 0, pad: int = 0) -> bytes:
    """Of a page of format 1, 64-bit, little-endian."""
    tail = struct.pack("<I", pages) if pages else struct.pack("<HH", lower, upper)
    return struct.pack("<QHH", pgno, pad, flags) + tail


def i64(*numbers: int) -> np.ndarray:
    return np.array(numbers, np.int64)


def check(
    data: bytes,
    starts: np.ndarray,
    offsets: np.ndarray,
    nbytes: np.ndarray,
    *,
    ids: np.ndarray | None = None,
    nodes: bool = True,
    dups: bool = False,
    file: np.ndarray | None = None,
) -> tuple[int, int]:
    ids = np.arange(len(starts)) if ids is None else ids
    file = words() if file is None else file
    none = np.empty(0, np.uint8)
    bad, fault = check_values(np.frombuffer(data, np.uint8), starts, offsets, nbytes, ids, nodes, dups, file, none)
    return int(bad), int(fault)


# -- overflow pages ----------------------------------------------------------------------------------------------------

#: A run of two pages, at page 7 of the file, and a leaf page of fixed-size duplicates, page 3.
RUN, FIXED = 7, 3
SOUND = header(RUN, OVERFLOW, 2).ljust(2 * P, b"v") + header(FIXED, LEAF | LEAF2, lower=18, pad=8).ljust(P, b"d")


def runs(data: bytes, nbytes: int = 5000) -> tuple[int, int]:
    """Three records: the run's value, a value in the middle of a page, the first item of the LEAF2 page."""
    starts, offsets = i64(16, 100, 2 * P + 16), i64(RUN * P + 16, 5 * P + 100, FIXED * P + 16)
    return check(data, starts, offsets, i64(nbytes, 10, 8), nodes=False, dups=True)


def test_sound_runs() -> None:
    assert runs(SOUND) == GOOD


def test_what_was_seen_is_not_checked_again() -> None:
    """Records 9 and 11; the second one, damaged afterwards, is looked at again if its bit is gone."""
    data = np.frombuffer(SOUND, np.uint8).copy()
    starts, offsets, nbytes, ids = i64(16, 2 * P + 16), i64(RUN * P + 16, FIXED * P + 16), i64(5000, 8), i64(9, 11)

    def found(seen: np.ndarray) -> tuple[int, int]:
        bad, fault = check_values(data, starts, offsets, nbytes, ids, False, True, words(), seen)
        return int(bad), int(fault)

    seen = np.zeros(2, np.uint8)
    assert found(seen) == GOOD
    assert seen.tolist() == [0, 0b1010]
    data[2 * P] ^= 1
    assert found(seen) == GOOD
    seen[1] = 0b10
    assert found(seen)[0] == 1
    assert seen[1] == 0b10, "what is wrong stays unseen"
    assert found(np.empty(0, np.uint8))[0] == 1
    assert runs(SOUND, 2 * P - 16) == GOOD  # the value fills its pages


@pytest.mark.parametrize(
    ("at", "code", "value", "bad"),
    [
        (0, "Q", RUN - 1, 0),
        (0, "Q", RUN + 1, 0),
        (0, "Q", RUN + (1 << 40), 0),
        (10, "H", LEAF, 0),
        (10, "H", OVERFLOW | 1, 0),
        (10, "H", 0, 0),
        (12, "I", 1, 0),
        (12, "I", 0, 0),
        (12, "I", 65537, -1),  # LMDB overwrites a value that shrinks in place: more pages than needed are sound
        (2 * P, "Q", FIXED - 1, 2),
        (2 * P + 10, "H", LEAF, 2),
    ],
)
def test_wrong_headers_of_runs(at: int, code: str, value: int, bad: int) -> None:
    data = bytearray(SOUND)
    struct.pack_into("<" + code, data, at, value)
    assert runs(bytes(data)) == (bad, BAD_PAGE if bad >= 0 else 0)


def test_a_value_that_is_a_byte_too_long_for_its_run() -> None:
    assert runs(SOUND, 2 * P - 15) == (0, BAD_PAGE)


def test_checksums_take_room_in_a_run() -> None:
    one = SOUND[: 2 * P], i64(16), i64(RUN * P + 16)
    assert check(*one, i64(2 * P - 20), file=words(sum_size=4)) == GOOD
    assert check(*one, i64(2 * P - 19), file=words(sum_size=4)) == (0, BAD_PAGE)


@pytest.mark.parametrize(
    ("start", "offset", "nbytes"),
    [(16 - 8, RUN * P + 8, 10), (16, RUN * P + 16, -1), (2 * P + 8, 2 * P + 16, 10), (1, RUN * P + 16, 10)],
    ids=["in the header", "negative length", "behind what was read", "before what was read"],
)
def test_places_where_no_value_can_be(start: int, offset: int, nbytes: int) -> None:
    assert check(SOUND[: 2 * P], i64(start), i64(offset), i64(nbytes)) == (0, BAD_PAGE)


def test_a_later_transaction_wrote_the_page() -> None:
    def run(txnid: int) -> bytes:
        return struct.pack("<QQHHI", RUN, txnid, 0, OVERFLOW, 1).ljust(P, b"v")

    one = i64(24), i64(RUN * P + 24), i64(100)
    assert check(run(50), *one, file=words(3)) == GOOD
    assert check(run(51), *one, file=words(3)) == (0, BAD_PAGE)
    assert check(run((1 << 64) - 1), *one, file=words(3)) == (0, BAD_PAGE)


def test_big_endian_and_32_bit_words() -> None:
    page = struct.pack(">IHHI", RUN, 0, OVERFLOW, 1).ljust(P, b"v")
    one = i64(12), i64(RUN * P + 12), i64(P - 12)
    file = words(header=12, word=4, big=1)
    assert check(page, *one, file=file) == GOOD
    assert check(page, *one[:2], i64(P - 11), file=file) == (0, BAD_PAGE)
    assert check(page, *one, file=words(header=12, word=4)) == (0, BAD_PAGE)


# -- leaf pages --------------------------------------------------------------------------------------------------------


def leaf(even: bool) -> tuple[bytes, np.ndarray, np.ndarray]:
    """(page 9 with three nodes, places of their values in it, their sizes); keys of 3 bytes."""
    page = bytearray(P)
    head, base = (24, 24) if even else (16, 0)
    at, pointers, places, sizes = P, [], [], (20, 0, 7)
    for size in sizes:
        begin = 8 + 3 + (1 if even else 0)
        at = (at - begin - size) & ~1
        struct.pack_into("<IHH3s", page, at, size, 0, 3, b"key")
        pointers.append(at - base)
        places.append(at + begin)
    struct.pack_into("<3H", page, head, *pointers)
    struct.pack_into("<Q", page, 0, 9)
    struct.pack_into("<HHHH", page, head - 8, 0, LEAF, head - base + 6, at - base)
    return bytes(page), i64(*places), i64(*sizes)


def nodes(page: bytes, places: np.ndarray, sizes: np.ndarray, even: bool) -> tuple[int, int]:
    ids = np.arange(3) if places[0] > places[-1] else np.arange(3)[::-1].copy()  # file order descends
    return check(page, places, 9 * P + places, sizes, ids=ids, file=words(3 if even else 1))


@pytest.mark.parametrize("even", [False, True])
def test_values_of_a_leaf_page(even: bool) -> None:
    page, places, sizes = leaf(even)
    assert nodes(page, places, sizes, even) == GOOD
    assert nodes(page, places[::-1].copy(), sizes[::-1].copy(), even) == GOOD
    for i in range(3):
        for change in (1, -1, 256):
            wrong = sizes.copy()
            wrong[i] += change
            assert nodes(page, places, wrong, even)[0] == i, "another length"
        moved = places.copy()
        moved[i] += 2
        assert nodes(page, moved, sizes, even)[0] == i, "another place"


def test_where_a_value_begins_depends_on_the_format() -> None:
    """Keys of odd length are followed by a byte in format 3."""
    page, places, sizes = leaf(True)
    last = places[2:], 9 * P + places[2:], sizes[2:]
    assert check(page, *last, file=words(3)) == GOOD
    assert check(page, *last, file=words(1, header=24, base=24)) == (0, BAD_NODE)


def test_a_value_is_not_searched_for_where_the_job_took_its_place_from_the_leaf() -> None:
    page, places, sizes = leaf(False)
    assert check(page, places, 9 * P + places, sizes + 1, nodes=False) == GOOD


@pytest.mark.parametrize(
    ("change", "fault"),
    [
        (lambda page: struct.pack_into("<Q", page, 0, 8), BAD_PAGE),
        (lambda page: struct.pack_into("<H", page, 10, LEAF | 1), BAD_PAGE),
        (lambda page: struct.pack_into("<H", page, 10, OVERFLOW), BAD_PAGE),
        (lambda page: struct.pack_into("<H", page, 10, LEAF | LEAF2), BAD_NODE),
        (lambda page: struct.pack_into("<H", page, 12, 16), BAD_NODE),
        (lambda page: struct.pack_into("<H", page, 12, 8000), BAD_NODE),
    ],
    ids=["page number", "flags", "overflow", "fixed size", "no nodes", "more nodes than fit"],
)
def test_wrong_headers_of_a_leaf_page(change: Callable[[bytearray], None], fault: int) -> None:
    page, places, sizes = leaf(False)
    made = bytearray(page)
    change(made)
    assert nodes(bytes(made), places, sizes, False) == (0, fault)


def test_a_node_that_holds_no_value() -> None:
    """F_BIGDATA: what stands there is a page number."""
    page, places, sizes = leaf(False)
    made = bytearray(page)
    struct.pack_into("<H", made, int(places[1]) - 11 + 4, 1)
    assert nodes(bytes(made), places, sizes, False) == (1, BAD_NODE)


def test_records_of_one_page_under_each_others_numbers() -> None:
    page, places, sizes = leaf(False)
    all_of = page, places, 9 * P + places, sizes
    assert check(*all_of, ids=i64(40, 41, 42)) == GOOD
    assert check(*all_of, ids=i64(40, 42, 41)) == (1, BAD_NODE)
    assert check(*all_of, ids=i64(40, 41, 43)) == (2, BAD_NODE)
    twice = i64(0, 2, 0)
    assert check(page, places[twice], 9 * P + places[twice], sizes[twice], ids=40 + twice) == GOOD


# -- several values per key --------------------------------------------------------------------------------------------


def items(flags: int, *values: bytes, pgno: int = 9, room: int = P) -> tuple[bytes, list[int]]:
    """(a page or sub-page whose keys are values, where each begins in it)"""
    if flags & LEAF2:
        pad = len(values[0])
        page = header(pgno, flags, lower=16 + 2 * len(values), pad=pad) + b"".join(values)
        return page.ljust(room, b"\0"), [16 + i * pad for i in range(len(values))]
    page, at, places = bytearray(room), room, []
    for i, value in enumerate(values):
        at = (at - 8 - len(value)) & ~1
        struct.pack_into("<IHH", page, at, 0, 0, len(value))
        page[at + 8 : at + 8 + len(value)] = value
        struct.pack_into("<H", page, 16 + 2 * i, at)
        places.append(at + 8)
    page[:16] = header(pgno, flags, lower=16 + 2 * len(values), upper=at)
    return bytes(page), places


def in_a_node(sub: bytes) -> tuple[bytes, int]:
    """(page 9 with one key whose values are in a sub-page, where that begins)"""
    page, at = bytearray(P), P - 11 - len(sub)
    at &= ~1
    struct.pack_into("<IHH3s", page, at, len(sub), DUPDATA, 3, b"key")
    page[at + 11 : at + 11 + len(sub)] = sub
    page[:18] = header(9, LEAF, lower=18, upper=at) + struct.pack("<H", at)
    return bytes(page), at + 11


def page_of_items(flags: int, within: bool) -> tuple[bytes, np.ndarray]:
    """(page 9, where its three values of 5 bytes begin)"""
    values = b"alpha", b"betas", b"gamma"
    if not within:
        page, places = items(flags, *values)
        return page, i64(*places)
    sub, places = items(flags | SUBP, *values, room=90)
    page, begin = in_a_node(sub)
    return page, begin + i64(*places)


@pytest.mark.parametrize("within", [False, True], ids=["tree", "sub-page"])
@pytest.mark.parametrize("flags", [LEAF, LEAF | LEAF2], ids=["any size", "one size"])
def test_duplicates(flags: int, within: bool) -> None:
    page, places = page_of_items(flags, within)
    sizes = i64(5, 5, 5)
    assert check(page, places, 9 * P + places, sizes, dups=True) == GOOD
    assert check(page, places, 9 * P + places, sizes, ids=i64(9, 3, 5), dups=True) == GOOD, "their keys tell nothing"
    assert check(page, places, 9 * P + places, sizes, dups=False) == (0, BAD_NODE)
    for i in range(3):
        for size in (4, 6):
            assert check(page, places, 9 * P + places, np.where(np.arange(3) == i, size, 5), dups=True)[0] == i
        moved = places + np.where(np.arange(3) == i, 2, 0)
        assert check(page, moved, 9 * P + moved, sizes, dups=True)[0] == i


@pytest.mark.parametrize("within", [False, True], ids=["tree", "sub-page"])
def test_behind_the_last_duplicate_of_one_size(within: bool) -> None:
    page, places = page_of_items(LEAF | LEAF2, within)
    behind = places[2:] + 5
    assert check(page, behind, 9 * P + behind, i64(5), dups=True) == (0, BAD_NODE)


def test_a_sub_page_is_no_value() -> None:
    page, places = page_of_items(LEAF, True)
    begin = i64(int(struct.unpack_from("<H", page, 16)[0]) + 11)
    assert check(page, begin, 9 * P + begin, i64(90), dups=True) == (0, BAD_NODE)
    assert places[0] > begin[0]
