"""py-lmdb's own test suite with pario.lmdb doing the reading, on files of LMDB 0.9 (format 1) and 1.0 (format 3).

The tool runs every read on both libraries and fails a test whose answers differ. It lies outside the repository:
PARIO_SHARED_TOOLS is the folder with pylmdb_suite/run.py. It downloads the tests of the installed py-lmdb by pip.
"""

from __future__ import annotations

import os
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest
from required import skip_or_fail

HOUSE = Path(__file__).resolve().parents[2]
PLACE = os.environ.get("PARIO_SHARED_TOOLS", "")

#: Tests that fail on purpose, and why. Each one must fail: a reason that no longer holds is taken out.
DIFFERENT = {
    "crash_test.BadCursorTest::test_cursor_open_failure": (
        "a handle opened in one transaction is valid in every other: there is nothing in it that could be stale"
    ),
    "engine_test.EngineSelectionTest::test_explicit_mismatch_rejected": (
        "the tool does not pass lib_version on to the candidate; test_lmdb_api.py::test_lib_version tests the refusal"
    ),
}


@pytest.mark.parametrize(("version", "least"), [(0, 475), (1, 470)], ids=["format1", "format3"])
def test_suite(version: int, least: int, tmp_path: Path) -> None:
    tool = Path(PLACE) / "pylmdb_suite" / "run.py"
    if not PLACE or not tool.exists():
        skip_or_fail(f"no {tool}" if PLACE else "PARIO_SHARED_TOOLS does not name the folder with pylmdb_suite/run.py")
    report = tmp_path / "report.xml"
    environment = {
        **os.environ,
        "CANDIDATE": "pario.lmdb",
        "PYTHONPATH": os.fspath(HOUSE),
        # The sdist's tests, once for both formats.
        "LMDB_TESTS": os.fspath(tmp_path.parent / "pylmdb-tests"),
        "LMDB_DEFAULT_LIB_VERSION": str(version),
    }
    done = subprocess.run(
        [sys.executable, os.fspath(tool), f"--junitxml={report}"],
        env=environment,
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert report.exists(), done.stdout[-4000:] + done.stderr[-4000:]
    failed, passed = set(), 0
    for case in ElementTree.parse(report).iter("testcase"):
        if any(child.tag in ("failure", "error") for child in case):
            failed.add(f"{case.get('classname')}::{case.get('name')}")
        elif not any(child.tag == "skipped" for child in case):
            passed += 1
    assert failed == set(DIFFERENT), done.stdout[-8000:]
    assert passed >= least
    assert "tests read through it" in done.stdout
