"""Where compiled kernels are kept."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from pario.kernels import jit


@pytest.mark.parametrize("name", ["PARIO_NUMBA_CACHE", "NUMBA_CACHE_DIR"])
def test_a_chosen_directory_holds_one_state_of_the_sources(
    name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Numba does not see that a kernel inlined from another file has changed: each state has a folder of its own."""
    monkeypatch.delenv("PARIO_NUMBA_CACHE", raising=False)
    monkeypatch.setenv(name, str(tmp_path))
    before = jit.cache_directory()
    assert os.path.dirname(before) == str(tmp_path)
    original = os.scandir

    class Newer:
        """A folder one of whose files was edited."""

        def __init__(self, folder: str) -> None:
            self.folder = folder

        def __enter__(self) -> list[object]:
            (tmp_path / "edited.py").touch()
            with original(self.folder) as entries, original(tmp_path) as more:
                return [*entries, *(entry for entry in more if entry.is_file())]

        def __exit__(self, *_: object) -> None: ...

    monkeypatch.setattr(jit.os, "scandir", Newer)
    assert jit.cache_directory() != before
