"""Files of other machines and published data sets: outside the repository, named by PARIO_SHARED_DATA."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

PLACE = os.environ.get("PARIO_SHARED_DATA", "")
REASON = "set PARIO_SHARED_DATA to the folder with foreign/ and wild/ (files of other machines, published LMDBs)"


def files(folder: str, pattern: str) -> list[Path]:
    """The files, or one stand-in that skips (or, with PARIO_REQUIRE_SYSTEM=1, fails) with the reason."""
    found = sorted((Path(PLACE) / folder).glob(pattern)) if PLACE else []
    return found or [Path()]


def need(path: Path) -> None:
    if path != Path():
        return
    reason = f"no files in {PLACE}" if PLACE else REASON
    if os.environ.get("PARIO_REQUIRE_SYSTEM") == "1":
        pytest.fail(reason)
    pytest.skip(reason)
