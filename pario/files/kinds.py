"""The extension that programs expect of data that begins like this."""

from __future__ import annotations

__all__ = ["EXTENSIONS", "HEAD_BYTES", "LONGEST_EXTENSION", "extension_of"]

#: Bytes of a value's beginning that `extension_of` looks at.
HEAD_BYTES = 16

_BEGINNINGS = {
    b"\x89PNG\r\n\x1a\n": ".png",
    b"\xff\xd8\xff": ".jpg",
    b"GIF87a": ".gif",
    b"GIF89a": ".gif",
    b"BM": ".bmp",
    b"II*\0": ".tif",
    b"MM\0*": ".tif",
    b"\x93NUMPY": ".npy",
    b"PK\x03\x04": ".zip",
    b"\x1f\x8b\x08": ".gz",
    b"\x28\xb5\x2f\xfd": ".zst",
    b"\xfd7zXZ\0": ".xz",
    b"BZh": ".bz2",
    b"\x04\x22\x4d\x18": ".lz4",
    b"%PDF-": ".pdf",
    b"\x89HDF\r\n\x1a\n": ".h5",
    b"PAR1": ".parquet",
    b"fLaC": ".flac",
    b"OggS": ".ogg",
    b"ID3": ".mp3",
    b"\x1a\x45\xdf\xa3": ".mkv",
    b"SIMPLE  =": ".fits",
}
#: RIFF....WEBP: the kind stands behind the size.
_RIFF = {b"WEBP": ".webp", b"WAVE": ".wav", b"AVI ": ".avi"}
_BRANDS = {b"avif": ".avif", b"heic": ".heic", b"jxl ": ".jxl"}

EXTENSIONS = frozenset([*_BEGINNINGS.values(), *_RIFF.values(), *_BRANDS.values(), ".mp4"])
LONGEST_EXTENSION = max(map(len, EXTENSIONS))


def extension_of(head: bytes) -> str:
    """Of a value that begins with `head` (HEAD_BYTES, or the whole value); "" if it is of none of these kinds."""
    for beginning, extension in _BEGINNINGS.items():
        if head.startswith(beginning):
            return extension
    if head[:4] == b"RIFF":
        return _RIFF.get(head[8:12], "")
    if head[4:8] == b"ftyp":
        return _BRANDS.get(head[8:12], ".mp4")
    return ""
