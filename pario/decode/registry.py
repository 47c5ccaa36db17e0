"""The decoders by name: one line each. The command line, `head`, `info`, error messages and the documentation read it.

A record's first bytes suggest a decoder (`describe`); they prove nothing, so that a decoder is never chosen silently.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from pario.errors import OptionError


@dataclass(frozen=True)
class Entry:
    """name : on the command line, and of the module
    cls : the class, in `pario.decode`
    words : what its records are
    begins : (first bytes, kind) of records that this decoder reads
    call : what to write in a script
    """

    name: str
    cls: str
    words: str
    begins: tuple[tuple[bytes, str], ...] = ()
    call: str = ""

    @property
    def advice(self) -> str:
        return f"Use pario.decode.{self.call or self.cls + '()'}"


_ZLIB = tuple((bytes([0x78, level]), "zlib data") for level in (0x01, 0x5E, 0x9C, 0xDA))
_PICKLES = tuple((bytes([0x80, protocol]), "a pickle") for protocol in (2, 3, 4, 5))
_IMAGES = (
    (b"\xff\xd8\xff", "a JPEG"),
    (b"\x89PNG\r\n\x1a\n", "a PNG"),
    (b"GIF8", "a GIF"),
    (b"II*\0", "a TIFF"),
    (b"MM\0*", "a TIFF"),
    (b"\0\0\0\x0cjP  ", "a JPEG 2000"),
)
_INSIDE = "the decoder of what is inside"
_TRUST = "Pickle(allow=[]) for plain data and arrays; allow_pickle=True runs code of the file's author"

DECODERS = (
    Entry("raw", "Raw", "bytes of any kind, or numbers of a fixed size"),
    Entry("datum", "Datum", "Caffe's Datum"),
    Entry("tensor_protos", "TensorProtos", "Caffe2's TensorProtos"),
    Entry("image", "Image", "image files: JPEG, PNG, WebP, ...", _IMAGES),
    Entry("npy", "Npy", "NumPy's .npy files", ((b"\x93NUMPY", "a .npy array"),)),
    Entry("npz", "Npz", "NumPy's .npz files", ((b"PK\x03\x04", "a zip (perhaps .npz)"),)),
    Entry("json", "Json", "JSON", ((b"{", "perhaps JSON"), (b"[", "perhaps JSON"))),
    Entry("text", "Text", "text, or tokens: numbers of one dtype, as many as there are"),
    Entry("struct", "Struct", "fields of a fixed binary layout", call="Struct({...})"),
    Entry("msgpack", "MsgPack", "MessagePack"),
    Entry("pickle", "Pickle", "pickles", _PICKLES, _TRUST),
    Entry("zlib", "Zlib", "records compressed with zlib", _ZLIB, f"Zlib({_INSIDE})"),
    Entry("gzip", "Gzip", "records compressed with gzip", ((b"\x1f\x8b", "gzip data"),), f"Gzip({_INSIDE})"),
    Entry("zstd", "Zstd", "records compressed with zstd", ((b"\x28\xb5\x2f\xfd", "zstd data"),), f"Zstd({_INSIDE})"),
)

#: decoders around another one
WRAPPERS = ("zlib", "gzip", "zstd")

_OWN = "Give a function as decoder"
#: first bytes that no decoder of pario reads
_OTHERS = (
    (b"\xff\x0a", "a JPEG XL", _OWN),
    (b"\x04\x22\x4d\x18", "an lz4 frame", "Give a function as decoder: lz4.frame.decompress(b) unpacks it"),
    (b"\x89HDF\r\n\x1a\n", "an HDF5 file", _OWN),
)


def find(name: str) -> Entry:
    """The entry of this name. Raises OptionError, with the names that exist."""
    for entry in DECODERS:
        if entry.name == name:
            return entry
    names = ", ".join(entry.name for entry in DECODERS)
    raise OptionError(
        f"no decoder is called {name!r}; there are {names}",
        hint="module:function, or file.py:function, names one of your own",
    )


def describe(record: np.ndarray) -> tuple[str, str]:
    """("it begins with 89 50 4e 47, a PNG", advice) of a record u8[k]; the advice is "" for unknown kinds."""
    head = record[:16].tobytes()
    if not head:
        return "it is empty", ""
    kind, advice = _kind(head)
    begins = f"it begins with {head[:4].hex(' ')}"
    return (f"{begins}, {kind}" if kind else begins), advice


def _kind(head: bytes) -> tuple[str, str]:
    """(kind, advice) of a record's first 16 bytes; ("", "") for unknown ones."""
    found = [(kind, entry.advice) for entry in DECODERS for begin, kind in entry.begins if head.startswith(begin)]
    if found:
        return found[0]
    for begin, kind, advice in _OTHERS:
        if head.startswith(begin):
            return kind, advice
    if head[:4] == b"RIFF" and head[8:12] == b"WEBP":
        return "a WebP", find("image").advice
    if head[4:8] == b"ftyp" and head[8:12] in (b"avif", b"avis"):
        return "an AVIF", _OWN
    if head.lstrip()[:1] in (b"{", b"["):
        return "perhaps JSON", find("json").advice
    return "", ""
