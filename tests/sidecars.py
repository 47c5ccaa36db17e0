"""Changes to saved indexes, checksums included."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import numpy as np

from pario.locate.stored import read_stored, write_stored

Arrays = dict[str, np.ndarray]


def read(place: str) -> tuple[dict[str, Any], Arrays]:
    with open(place, "rb") as raw:
        said, arrays = read_stored(raw)
        return said, {name: array[:].copy() for name, array in arrays.items()}


def edit(place: str, change: Callable[[dict[str, Any], Arrays], object]) -> None:
    """change(what it says, its arrays) changes them."""
    said, arrays = read(place)
    change(said, arrays)
    fd = os.open(place, os.O_WRONLY | os.O_TRUNC)
    try:
        write_stored(fd, said, arrays)
    finally:
        os.close(fd)
