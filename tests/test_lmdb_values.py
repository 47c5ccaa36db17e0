"""Values that lie beside each other are read by one call, and what lies between them into memory of its own."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from pathlib import Path

import lmdb as real
import pytest

#: Allocations of more than 8 KiB become mappings of their own: whoever writes to a freed one finds no memory there.
FREED = """
import ctypes, sys
import pario.lmdb as lmdb
from pario.lmdb import native
native.compile_now()
libc = ctypes.CDLL(None)
libc.malloc.restype, libc.malloc.argtypes = ctypes.c_void_p, [ctypes.c_size_t]
keys = [b"%04d" % i for i in range(0, 200, 2)]
right = {key: key * 1250 for key in keys}
with lmdb.open(sys.argv[1], lock=False) as env:
    for _ in range(2):
        with env.begin() as txn:
            assert dict(txn.cursor().getmulti(keys)) == right
        M_TOP_PAD, M_MMAP_THRESHOLD = -2, -3
        assert libc.mallopt(M_MMAP_THRESHOLD, 8192) and libc.mallopt(M_TOP_PAD, 0)
        mapped = 0
        while mapped < 8:  # until the heap has no free piece of that size any more
            mapped = mapped + 1 if libc.malloc(9000) % 4096 == 16 else 0
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="another allocator")
def test_what_lies_between_values_is_read_into_memory_that_is_not_freed(tmp_path: Path) -> None:
    place = os.fspath(tmp_path / "x.lmdb")
    with real.open(place, map_size=1 << 24) as env, env.begin(write=True) as txn:
        for i in range(200):
            txn.put(b"%04d" % i, b"%04d" % i * 1250)
    done = subprocess.run([sys.executable, "-c", FREED, place], capture_output=True, text=True, timeout=200)
    assert (done.returncode, done.stderr) == (0, "")
