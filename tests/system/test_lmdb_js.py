"""Stores that lmdb-js writes, by the package that npm has: LMDB's format 2 with free lists and a flag of its own."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from required import skip_or_fail

import pario

KINDS: dict[str, dict[str, Any]] = {
    "plain": {},
    "versions": {"useVersions": True},
    "compressed": {"compression": True},
    "large pages": {"pageSize": 16384},
    "duplicates": {"dupSort": True, "encoding": "ordered-binary"},
    "versions of bytes": {"useVersions": True, "encoding": "binary"},
    "bytes": {"encoding": "binary"},
}

#: Six rounds of values of other lengths, with a part deleted again: the free lists then have runs and empty places.
WRITE = """
const {open} = require('lmdb');
const [path, options] = [process.argv[2], JSON.parse(process.argv[3])];
const key = i => 'k' + String(i).padStart(6, '0'), size = (i, r) => (i * 37 + r * 11) % 9000;
const value = (i, r) => options.encoding == 'binary' ? Buffer.alloc(size(i, r), i % 256)
    : options.dupSort ? 'v' + r + i : {n: i, s: 'x'.repeat(size(i, r))};
(async () => {
    const db = open({path, ...options});
    for (let r = 0; r < 6; r++) {
        await db.transaction(() => {
            for (let i = 0; i < 400; i++)
                options.useVersions ? db.put(key(i), value(i, r), r * 1000 + i) : db.put(key(i), value(i, r));
        });
        await db.transaction(() => { for (let i = r; i < 400; i += 7) db.remove(key(i)); });
    }
    await db.flushed;
    await db.close();
    process.exit(0);
})();
"""


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> Path:
    npm = str(shutil.which("npm") or skip_or_fail("no npm"))
    folder = tmp_path_factory.mktemp("lmdb-js")
    (folder / "package.json").write_text("{}")
    (folder / "write.js").write_text(WRITE)
    done = subprocess.run(
        [npm, "install", "--no-audit", "--no-fund", "lmdb@3.5"], cwd=folder, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    return folder


@pytest.mark.parametrize("kind", KINDS)
def test_a_store_of_lmdb_js(package: Path, tmp_path: Path, kind: str) -> None:
    store, options = tmp_path / "store", KINDS[kind]
    write = ["node", "write.js", str(store), json.dumps(options)]
    done = subprocess.run(write, cwd=package, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr

    verify = [sys.executable, "-m", "pario", "data", "verify", str(store)]
    done = subprocess.run(verify, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "no damage found" in done.stdout
    with pario.Reader(str(store), comm="self") as reader:
        ids = range(len(reader))
        keys, values = reader.keys(ids), reader.read(ids)
        assert len(set(keys)) == sum(1 for i in range(400) if i % 7 != 5)  # those that the last round did not delete
        if options.get("encoding") == "binary":
            before = 8 if options.get("useVersions") else 0  # a version stands before each value
            for key, value in zip(keys, values, strict=True):
                number = int(key[1:])
                expected = bytes([number % 256]) * ((number * 37 + 5 * 11) % 9000)
                assert bytes(value)[before:] == expected
