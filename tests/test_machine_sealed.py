"""Memory that processes of one machine hand to each other."""

from __future__ import annotations

import errno
import mmap
import os

import pytest

from pario import machine

PAGE = mmap.PAGESIZE


def test_memory_is_whole_and_its_size_stays() -> None:
    fd = machine.sealed_memory("test", 8 * PAGE, whole=True)
    try:
        assert os.fstat(fd).st_blocks * 512 == 8 * PAGE  # no page can be missing later
        assert machine.is_sealed(fd, 8 * PAGE)
        assert not machine.is_sealed(fd, PAGE)
        for nbytes in (PAGE, 9 * PAGE):
            with pytest.raises(PermissionError):
                os.ftruncate(fd, nbytes)
        with open("/dev/null") as other:
            assert not machine.is_sealed(other.fileno(), 0)
    finally:
        os.close(fd)


def test_what_cannot_be_had_leaves_no_file(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(fd: int, offset: int, nbytes: int) -> None:  # really trying takes the machine's memory
        raise OSError(errno.ENOSPC, "no page is left")

    before = os.listdir("/proc/self/fd")
    monkeypatch.setattr(os, "posix_fallocate", refuse)
    with pytest.raises(OSError, match="no page is left"):
        machine.sealed_memory("test", PAGE, whole=True)
    assert os.listdir("/proc/self/fd") == before
