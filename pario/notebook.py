"""What objects look like in a notebook: a table, and small pictures. Knows nothing of the objects."""

from __future__ import annotations

import base64
import struct
import zlib
from collections.abc import Iterable, Mapping
from html import escape
from typing import Any

import numpy as np

#: Pictures of a batch that are shown, and pixels of their longer side at most.
_MOST, _SIDE = 8, 96


def html(title: str, rows: Iterable[tuple[str, str, str]]) -> str:
    """A table. rows : (name, text, which is escaped, and HTML behind it)"""
    cells = (f"<tr><th>{escape(name)}</th><td>{escape(text)}{more}</td></tr>" for name, text, more in rows)
    return f'<table class="pario"><caption>{escape(title)}</caption>{"".join(cells)}</table>'


def shown(thing: Any) -> str:
    """What its repr says."""
    return html(type(thing).__name__, [("", repr(thing), "")])


def html_of_arrays(title: str, arrays: Mapping[str, Any]) -> str:
    """A table with dtype and shape of each, and its first pictures or values."""
    rows = []
    for name, value in arrays.items():
        drawn, kind = pictures(value), type(value).__name__
        if hasattr(value, "shape"):
            kind, value = f"{value.dtype}{list(value.shape)}", value[:4]
        rows.append((name, kind if drawn else f"{kind}: {str(value)[:200]}", drawn))
    return html(title, rows)


def pictures(array: Any) -> str:
    """The first ones of u8 or float [b, h, w, c] or [b, c, h, w], c 1 or 3, as `<img>` of a few KB each; "" for
    anything else."""
    if not isinstance(array, np.ndarray) or array.ndim != 4 or array.dtype.kind not in "uf" or array.itemsize > 8:
        return ""
    if array.shape[1] in (1, 3) and array.shape[3] > 3:
        array = array.transpose(0, 2, 3, 1)
    if array.shape[3] not in (1, 3) or min(array.shape[1:3]) < 4:
        return ""
    step = -(-max(array.shape[1:3]) // _SIDE)
    return "".join(map(_image, array[:_MOST, ::step, ::step]))


def _image(pixels: np.ndarray) -> str:
    """Of [h, w, c]; values other than u8 are stretched from their least to their most."""
    if pixels.dtype != np.uint8:
        finite = np.nan_to_num(pixels.astype(np.float64), posinf=0, neginf=0)
        pixels = ((finite - finite.min()) * (255 / (np.ptp(finite) or 1))).astype(np.uint8)
    height, width, channels = pixels.shape
    lines = np.zeros((height, 1 + width * channels), np.uint8)  # each begins with its filter: 0, none
    lines[:, 1:] = pixels.reshape(height, -1)
    head = struct.pack(">IIBBBBB", width, height, 8, 2 if channels == 3 else 0, 0, 0, 0)
    parts = ((b"IHDR", head), (b"IDAT", zlib.compress(lines.tobytes())), (b"IEND", b""))
    png = b"\x89PNG\r\n\x1a\n" + b"".join(
        struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data)) for kind, data in parts
    )
    return f'<img src="data:image/png;base64,{base64.b64encode(png).decode()}" width="{max(width, 48)}">'
