"""The size that an image file says it has, read before a codec allocates memory for it: 35 bytes of GIF may ask for 4
billion pixels.

Formats whose size a few lines cannot find are refused: that of an AVIF stands in its AV1 stream, and its container may
say another one.
"""

from __future__ import annotations

import re
import struct
from struct import unpack_from

import numpy as np

from pario.decode.base import describe

JPEG = b"\xff\xd8\xff"

#: No image has more pixels than this.
_MOST = 1 << 28
#: Memory that a codec may use for an image of few bytes, and what each byte of the file allows in addition.
_BUDGET, _MORE = 128 << 20, 192
#: Most scans of a progressive JPEG: one of 20 bytes takes as long as any other. 10 are usual.
_SCANS = 64
#: Most clear codes of a GIF: each costs OpenCV a table of 4096 codes, some 10 us, however few codes follow it.
#: Encoders that do not compress make one for every 254 pixels.
_CLEARS = 80_000
#: Most tiles of a JPEG 2000: each takes 6 KB.
_TILES = 1 << 13
#: Deflate, PNG's compression, makes bytes at most this many times smaller.
_DEFLATE = 1032


class BadImage(Exception):
    """Bytes that no installed codec can decode; never leaves the decoders."""


def check(record: np.ndarray) -> None:
    """Raise BadImage for an image file u8[k] that is of an unknown format, or would take more memory or time than so
    few bytes are worth."""
    file = record.tobytes()
    found = [(kind, measure) for begin, kind, measure in _KINDS if re.match(begin, file)]
    if not found:
        raise BadImage(f"no {', '.join(kind for _, kind, _ in _KINDS)} file; {describe(record)[0]}")
    kind, measure = found[0]
    try:
        height, width, cost = measure(file)
    except (struct.error, LookupError, ValueError, ArithmeticError) as error:
        raise BadImage(f"{kind}: the header is damaged") from error
    most = min(_MOST, (_BUDGET + _MORE * len(file)) // cost)
    if height * width > most:
        raise BadImage(f"{kind}: {height} x {width} pixels are more than {most:,}, the most for {len(file):,} bytes")


# -- (height, width, bytes of memory per pixel) ------------------------------------------------------------------------


def _jpeg(file: bytes) -> tuple[int, int, int]:
    """Of a file whose pixels come in several scans, the codec keeps all coefficients."""
    at, height, width, parts, progressive = 2, 0, 0, 0, False
    while True:
        at = file.index(b"\xff", at)
        while (marker := file[at]) == 0xFF:
            at += 1
        at += 1
        if marker == 0 or marker == 1 or 0xD0 <= marker <= 0xD8:
            continue
        if marker == 0xDA:
            break
        if 0xC0 <= marker <= 0xCF and marker not in (0xC4, 0xC8, 0xCC):
            height, width, parts = unpack_from(">HHB", file, at + 3)
            progressive = marker & 3 == 2
        at += max(2, *unpack_from(">H", file, at))
    if progressive:
        data = np.frombuffer(file, np.uint8)
        scans = np.count_nonzero(data[1:][data[:-1] == 0xFF] == 0xDA)
        if scans > _SCANS:
            raise BadImage(f"JPEG: {scans:,} scans are more than {_SCANS}")
    return height, width, 3 if file[at + 2] == parts and not progressive else 9


def _png(file: bytes) -> tuple[int, int, int]:
    """OpenCV allocates, and fills, whatever a PNG says."""
    width, height = unpack_from(">II", file, 16)
    if height * width // 8 > _DEFLATE * len(file) + 4096 and height * width <= _MOST:
        raise BadImage(f"PNG: {len(file)} bytes cannot hold {height} x {width} pixels")
    at = 8
    while at + 8 <= len(file):  # chunks: length, name, content, checksum
        (nbytes,) = unpack_from(">I", file, at)
        if nbytes > len(file):
            raise BadImage(f"PNG: a part of {nbytes:,} bytes at byte {at} of {len(file):,}")
        at += 12 + nbytes
    return height, width, 6


def _gif(file: bytes) -> tuple[int, int, int]:
    from pario.kernels.gif import gif_codes  # loads Numba

    width, height = unpack_from("<HH", file, 6)
    clears, others = gif_codes(np.frombuffer(file, np.uint8))
    if clears > _CLEARS:
        raise BadImage(f"GIF: {clears:,} of {clears + others:,} codes clear the codec's table; most are {_CLEARS:,}")
    return height, width, 16


def _bmp(file: bytes) -> tuple[int, int, int]:
    old = unpack_from("<I", file, 14) == (12,)
    width, height = unpack_from("<HH" if old else "<ii", file, 18)
    return abs(height), abs(width), 6


def _webp(file: bytes) -> tuple[int, int, int]:
    kind = file[12:16]
    if kind == b"VP8 ":
        width, height = (n & 0x3FFF for n in unpack_from("<HH", file, 26))
    elif kind == b"VP8L":
        (bits,) = unpack_from("<I", file, 21)
        width, height = 1 + (bits & 0x3FFF), 1 + (bits >> 14 & 0x3FFF)
    elif kind == b"VP8X":
        width, height = (1 + int.from_bytes(file[at : at + 3], "little") for at in (24, 27))
    else:
        raise ValueError
    return height, width, 12


def _tiff(file: bytes) -> tuple[int, int, int]:
    """Of the first directory: of the image or of a tile, whichever is larger."""
    order = "<" if file[:2] == b"II" else ">"
    (at,) = unpack_from(f"{order}I", file, 4)
    said = {256: 0, 257: 0, 322: 0, 323: 0, 277: 1}  # width, height, those of a tile, samples
    for entry in range(at + 2, at + 2 + 12 * unpack_from(f"{order}H", file, at)[0], 12):
        tag, kind = unpack_from(f"{order}HH", file, entry)
        if tag in said:
            said[tag] = max(said[tag], *unpack_from(order + {3: "H", 4: "I"}[kind], file, entry + 8))
    width, height, tile_width, tile_height, samples = said.values()
    if tile_width * tile_height > width * height:
        width, height = tile_width, tile_height
    return height, width, 8 * max(2, samples)


_SIZES = re.compile(rb"\xff\x4f\xff\x51(?=.{4}(.{32}))", re.DOTALL)


def _jp2(file: bytes) -> tuple[int, int, int]:
    """Of the largest stream in it."""
    found = []
    for match in _SIZES.finditer(file):
        right, below, left, above, tile_width, tile_height, tile_left, tile_above = unpack_from(">8I", match[1])
        if -(-(right - tile_left) // tile_width) * -(-(below - tile_above) // tile_height) > _TILES:
            raise BadImage(f"JPEG 2000: more than {_TILES:,} tiles")
        found.append((below - above, right - left))
    return *max(found, key=lambda size: size[0] * size[1]), 24


_PNM = re.compile(rb"P[1-6](?:\s|#[^\r\n]*\n)+(\d{1,9})(?:\s|#[^\r\n]*\n)+(\d{1,9})\s")


def _pnm(file: bytes) -> tuple[int, int, int]:
    match = _PNM.match(file)
    if match is None:
        raise ValueError
    return int(match[2]), int(match[1]), 6


_KINDS = (
    (JPEG, "JPEG", _jpeg),
    (b"\x89PNG\r\n\x1a\n", "PNG", _png),
    (b"GIF8[79]a", "GIF", _gif),
    (b"BM", "BMP", _bmp),
    (b"(?s)RIFF....WEBP", "WebP", _webp),
    (b"II\\*\0|MM\0\\*", "TIFF", _tiff),
    (b"\0\0\0\x0cjP  \r\n\x87\n|\xff\x4f\xff\x51", "JPEG 2000", _jp2),
    (b"P[1-6]", "PNM", _pnm),
)
