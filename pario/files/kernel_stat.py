"""The kernel's own answers about a descriptor, as the bytes that a program expects in its memory."""

from __future__ import annotations

import ctypes
import struct

from pario.files.notify import raw_call
from pario.files.numbers import ARCHITECTURE, machine

__all__ = ["stat_bytes", "statfs_bytes", "statx_bytes"]

_AT_EMPTY_PATH = 0x1000
_buffer = ctypes.create_string_buffer(256)
_at, _empty = ctypes.addressof(_buffer), ctypes.create_string_buffer(1)
_nothing = ctypes.addressof(_empty)
#: bytes of struct stat; where st_nlink, st_size and st_blocks stand in it, and how st_nlink is packed
_STAT = (144, 16, 48, 64, "Q") if ARCHITECTURE == "x86_64" else (128, 20, 48, 64, "I")
_STATX = (256, 16, 40, 48, "I")
_BLOCK, _PAGE_BLOCKS = 4096, 8  # a page of memory, and how many blocks of 512 bytes it is
_STATFS_BYTES = 120


def stat_bytes(fd: int, of_file: bool) -> bytes:
    """struct stat. of_file : tell what a memfd will have when it is filled: blocks; and a link, since it has none"""
    numbers = machine()
    assert numbers is not None
    raw_call(numbers.newfstatat, fd, _nothing, _at, _AT_EMPTY_PATH)
    return _told(_STAT, of_file)


def statx_bytes(fd: int, mask: int, of_file: bool) -> bytes:
    """struct statx."""
    numbers = machine()
    assert numbers is not None
    raw_call(numbers.statx, fd, _nothing, _AT_EMPTY_PATH, mask, _at)
    return _told(_STATX, of_file)


def _told(layout: tuple[int, int, int, int, str], of_file: bool) -> bytes:
    nbytes, links, size, blocks, code = layout
    if of_file:
        struct.pack_into(code, _buffer, links, 1)
        pages = -(-struct.unpack_from("Q", _buffer, size)[0] // _BLOCK)
        struct.pack_into("Q", _buffer, blocks, _PAGE_BLOCKS * pages)
    return _buffer.raw[:nbytes]


def statfs_bytes(fd: int) -> bytes:
    """struct statfs."""
    numbers = machine()
    assert numbers is not None
    raw_call(numbers.fstatfs, fd, _at)
    return _buffer.raw[:_STATFS_BYTES]
