"""Values that ask for gigabytes or minutes, and the process that decodes them under limits of memory and time.

A case is (decoder, good value, hostile value), all made when they are wanted; HOSTILE[group][name]. `python hostile.py
NAMES` prints a line of JSON for each.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import gzip
import io
import json
import pickle
import resource
import struct
import sys
import time
import zipfile
import zlib
from collections.abc import Callable
from typing import Any

import cv2
import msgpack
import numpy as np
import zstandard
from made_records import arrays, made

from pario.checkpoint.manifest import read_manifest, read_part
from pario.codec.packing import MAGIC, Packing, _sum
from pario.codec.registry import CODECS, make
from pario.decode import (
    Datum,
    Draw,
    Gzip,
    Image,
    Json,
    MsgPack,
    Npy,
    Npz,
    Pickle,
    Raw,
    Struct,
    TensorProtos,
    Text,
    Zlib,
    Zstd,
)
from pario.decode.measured import BadImage, check
from pario.errors import DecodeError, ParioError
from pario.kernels.sums import sum_values
from pario.tiers.asking import read_servers, unpacked

Case = tuple[Callable[[], Any], bytes, Callable[[], bytes]]
HOSTILE: dict[str, dict[str, Case]] = {}


def group(name: str, decoder: Callable[[], Any], good: bytes, **cases: Callable[[], bytes]) -> None:
    HOSTILE.setdefault(name, {}).update({case: (decoder, good, value) for case, value in cases.items()})


# -- compressed records ------------------------------------------------------------------------------------------------


def deflated(pack: Callable[[], Any], mib: int) -> bytes:
    """So many MiB of zeros, whose end is missing."""
    stream = pack()
    head = stream.compress(bytes(1 << 20)) + stream.flush(zlib.Z_FULL_FLUSH)
    return head + (stream.compress(bytes(1 << 20)) + stream.flush(zlib.Z_FULL_FLUSH)) * (mib - 1)


def skippable(said: int, content: bytes = b"") -> bytes:
    return struct.pack("<II", 0x184D2A50, said) + content


ZSTD = b"\x28\xb5\x2f\xfd"
NO_SIZE = zstandard.ZstdCompressor(write_content_size=False)

group(
    "zlib", lambda: Zlib(Raw("u1")), zlib.compress(b"abc"),
    gigabytes=lambda: deflated(zlib.compressobj, 1024),
    small_gigabytes=lambda: deflated(zlib.compressobj, 200),
    empty=lambda: b"",
    two=lambda: zlib.compress(b"abc") * 2,
    zeros_behind=lambda: zlib.compress(b"abc") + b"\0",
    cut=lambda: zlib.compress(b"abc")[:-2],
    empty_blocks=lambda: b"\x78\x9c" + b"\0\0\0\xff\xff" * 60_000,
    dictionary=lambda: b"\x78\xbb" + bytes(40),
)  # fmt: skip
group(
    "gzip", lambda: Gzip(Raw("u1")), gzip.compress(b"abc"),
    gigabytes=lambda: gzip.compress(bytes(1 << 20)) * 1000,
    one_member=lambda: deflated(lambda: zlib.compressobj(9, zlib.DEFLATED, 31), 1024),
    short_members=lambda: gzip.compress(b"") * 15_000,
    padding=lambda: gzip.compress(b"abcd") + bytes(300_000),
    garbage_behind=lambda: gzip.compress(b"abc") + b"\0\0x",
    half_a_member_behind=lambda: gzip.compress(b"abc") + gzip.compress(b"d")[:-9],
    long_name=lambda: b"\x1f\x8b\x08\x08" + bytes(6) + b"n" * 300_000,
    empty_blocks=lambda: gzip.compress(b"")[:10] + b"\0\0\0\xff\xff" * 60_000,
)  # fmt: skip
group(
    "zstd", lambda: Zstd(Raw("u1")), zstandard.compress(b"abc"),
    gigabytes=lambda: zstandard.compress(bytes(1 << 20)) * 1000,
    gigabytes_without_sizes=lambda: NO_SIZE.compress(bytes(1 << 20)) * 1000,
    one_frame=lambda: ZSTD + b"\0\x58" + b"\x02\0\x10\0" * 10_000,
    rle_frame=lambda: ZSTD + b"\xe0" + b"\xff" * 8 + b"\x02\0\x10\0" * 60_000 + b"\x03\0\x10\0",
    largest_size=lambda: ZSTD + b"\xe0" + b"\xff" * 8 + b"\x01\0\0",
    size_of_100_mb=lambda: ZSTD + b"\xa0" + struct.pack("<I", 100 << 20) + b"\x01\0\0",
    size_of_0=lambda: ZSTD + b"\x20\0" + b"\x19\0\0abc",
    largest_window=lambda: ZSTD + b"\0\xff" + b"\x19\0\0abc",
    window_of_128_mib=lambda: ZSTD + b"\0\x88" + b"\x19\0\0abc",
    short_frames=lambda: zstandard.compress(b"") * 30_000,
    short_frames_without_sizes=lambda: NO_SIZE.compress(b"") * 30_000,
    short_skippable=lambda: skippable(0) * 35_000,
    long_skippable=lambda: skippable(0xFFFFFFFF),
    empty_blocks=lambda: ZSTD + b"\0\x58" + bytes(3) * 90_000 + b"\x01\0\0",
    reserved_block=lambda: ZSTD + b"\0\x58\x0f\0\0",
    cut=lambda: zstandard.compress(b"abc")[:-1],
    garbage_behind=lambda: zstandard.compress(b"abc") + b"x",
    empty_first_then_cut=lambda: zstandard.compress(b"") + zstandard.compress(b"abc")[:-1],
    empty=lambda: b"",
)  # fmt: skip
group(
    "bytes", lambda: Zstd(None), zstandard.compress(b"abc"),
    gigabytes=lambda: zstandard.compress(bytes(1 << 20)) * 1000,
    just_above_the_limit=lambda: zstandard.compress(bytes((120 << 20) + 1)),
)  # fmt: skip


# -- images ------------------------------------------------------------------------------------------------------------


def picture(kind: str, *options: int, size: int = 8, dtype: str = "u1") -> bytes:
    return cv2.imencode(kind, np.zeros((size, size, 3), dtype), list(options))[1].tobytes()


def patched(file: bytes, *changes: tuple[int, bytes]) -> bytes:
    out = bytearray(file)
    for at, part in changes:
        out[at : at + len(part)] = part
    return bytes(out)


def chunk(name: bytes, content: bytes) -> bytes:
    return struct.pack(">I", len(content)) + name + content + struct.pack(">I", zlib.crc32(name + content))


def png(width: int, height: int, *chunks: bytes, depth: int = 8, kind: int = 2, pixels: bytes | None = None) -> bytes:
    content = zlib.compress(bytes(100)) if pixels is None else pixels
    head = chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, depth, kind, 0, 0, 0))
    return b"\x89PNG\r\n\x1a\n" + head + b"".join(chunks) + chunk(b"IDAT", content) + chunk(b"IEND", b"")


def jpeg(width: int, height: int, *options: int) -> bytes:
    file = picture(".jpg", *options)
    at = next(at for at in (file.find(b"\xff\xc0"), file.find(b"\xff\xc2")) if at >= 0)
    return patched(file, (at + 5, struct.pack(">HH", height, width)))


def scans(width: int, height: int, count: int) -> bytes:
    """A progressive JPEG with so many scans of nothing."""
    file = jpeg(width, height, cv2.IMWRITE_JPEG_PROGRESSIVE, 1)
    first = file.index(b"\xff\xda")
    scan = b"\xff\xda\0\x08\x01\x01\0\x01\x3f\0" + b"\0" * 12
    return file[:-2] + scan * count + file[-2:] if first else b""


def gif(width: int, height: int, *frames: bytes) -> bytes:
    return b"GIF89a" + struct.pack("<HHBBB", width, height, 0x80, 0, 0) + bytes(6) + b"".join(frames) + b";"


def gif_frame(width: int, height: int, data: bytes) -> bytes:
    blocks = b"".join(bytes([len(data[k : k + 255])]) + data[k : k + 255] for k in range(0, len(data), 255))
    return b"," + struct.pack("<HHHHB", 0, 0, width, height, 0) + b"\x02" + blocks + b"\0"


def codes(width: int, *numbers: int) -> bytes:
    """Eight times these codes, all of so many bits."""
    bits = sum(number << width * k for k, number in enumerate(numbers * 8))
    return bits.to_bytes(width * len(numbers), "little")


def tiff(**tags: int) -> bytes:
    """tag -> number; those with a count of their own as _CODE=count."""
    said = {256: 8, 257: 8, 258: 8, 259: 1, 262: 1, 273: 8, 277: 1, 278: 8, 279: 64}
    counts = {int(name[1:]): n for name, n in tags.items() if name[0] == "n"}
    said |= {int(name[1:]): n for name, n in tags.items() if name[0] == "t"}
    entries = b"".join(
        struct.pack("<HHII", tag, 4 if n > 65535 or tag in (273, 279) else 3, counts.get(tag, 1), n)
        for tag, n in sorted(said.items())
    )
    return b"II*\0" + struct.pack("<I", 80) + bytes(72) + struct.pack("<H", len(said)) + entries + bytes(4)


def jp2(right: int, below: int, tile: int, *before: bytes) -> bytes:
    file = picture(".jp2", size=64)
    at = file.index(b"\xff\x4f\xff\x51") + 8
    sizes = struct.pack(">8I", right, below, 0, 0, tile, tile, 0, 0)
    return b"".join(before) + patched(file, (at, sizes))


GREAT = {"65535": 65535, "30000": 30000, "16383": 16383}
IMAGE = lambda: Image(8)  # noqa: E731
GOOD = picture(".png")
for size, n in GREAT.items():
    le, be = struct.pack("<I", n), struct.pack(">I", n)
    group(
        "images", IMAGE, GOOD,
        **{
            f"gif_{size}": lambda n=n: gif(n, n, gif_frame(n, n, b"\x44\x01")),
            f"gif_frame_{size}": lambda n=n: gif(8, 8, gif_frame(n, n, b"\x44\x01")),
            f"gif_35_bytes_{size}": lambda n=n: gif(n, n, gif_frame(1, 1, b"\x4c\x01")),
            f"png_{size}": lambda n=n: png(n, n),
            f"png_bits_{size}": lambda n=n: png(n, n, depth=1, kind=0, pixels=zlib.compress(bytes(50 << 20))),
            f"bmp_{size}": lambda le=le: patched(picture(".bmp"), (18, le + le)),
            f"bmp_old_{size}": lambda n=n: b"BM" + bytes(12) + struct.pack("<IHHHH", 12, n, n, 1, 24) + bytes(99),
            f"jpeg_{size}": lambda n=n: jpeg(n, n),
            f"jpeg_progressive_{size}": lambda n=n: jpeg(n, n, cv2.IMWRITE_JPEG_PROGRESSIVE, 1),
            f"webp_{size}": lambda n=n: patched(
                picture(".webp", 64, 80), (26, struct.pack("<HH", n & 0x3FFF, n & 0x3FFF))
            ),
            f"webp_lossless_{size}": lambda n=n: patched(
                picture(".webp", 64, 101), (21, struct.pack("<I", (n & 0x3FFF) | (n & 0x3FFF) << 14))
            ),
            f"webp_canvas_{size}": lambda le=le: b"RIFF\x64\0\0\0WEBPVP8X\x0a\0\0\0\x02\0\0\0" + le[:3] * 2 + bytes(80),
            f"tiff_{size}": lambda n=n: tiff(t256=n, t257=n, t278=n, t279=n),
            f"tiff_tile_{size}": lambda n=n: tiff(t322=n - n % 16, t323=n - n % 16, t324=8, t325=64),
            f"tiff_samples_{size}": lambda n=n: tiff(t256=4000, t257=4000, t277=n),
            f"jp2_{size}": lambda n=n: jp2(n, n, n),
            f"jp2_tiles_{size}": lambda n=n: jp2(n, n, 1 + n // 250),
            f"jp2_decoy_{size}": lambda n=n: jp2(
                n, n, n, picture(".jp2", size=64)[:32], struct.pack(">I", 60), b"free" + bytes(52)
            ),
            f"pnm_{size}": lambda n=n: b"P5 %d %d 255\n" % (n, n) + bytes(99),
            f"pnm_bits_{size}": lambda n=n: b"P4\n%d\n%d\n" % (n, n) + bytes(99),
            f"pnm_text_{size}": lambda n=n: b"P2 %d %d 255 0 0" % (n, n),
        },
    )  # fmt: skip
group(
    "images", IMAGE, GOOD,
    empty=lambda: b"",
    jpeg_scans=lambda: scans(5000, 5000, 12_000),
    jpeg_few_scans=lambda: scans(2000, 2000, 60),
    jpeg_parts=lambda: b"\xff\xd8" + b"\xff\xfe\0\x02" * 70_000 + picture(".jpg")[2:],
    jpeg_fill=lambda: b"\xff\xd8" + b"\xff" * 280_000 + picture(".jpg")[3:],
    jpeg_two_sizes=lambda: picture(".jpg").replace(b"\xff\xda", jpeg(65535, 65535)[2:], 1),
    jpeg_cut=lambda: picture(".jpg", size=3000)[:500],
    png_text=lambda: png(8, 8, chunk(b"zTXt", b"a\0\0" + zlib.compress(bytes(250 << 20)))),
    png_profile=lambda: png(8, 8, chunk(b"iCCP", b"a\0\0" + zlib.compress(bytes(250 << 20)))),
    png_chunks=lambda: png(8, 8, *[chunk(b"tEXt", b"a\0b")] * 18_000),
    png_frames=lambda: png(
        4700, 4700, chunk(b"acTL", struct.pack(">II", 1 << 30, 0)), pixels=zlib.compress(bytes(66_274_700))
    ),
    png_16_bit=lambda: png(4700, 4700, depth=16, kind=6, pixels=zlib.compress(bytes(176_724_700))),
    png_pixels=lambda: png(8, 8, pixels=zlib.compress(bytes(250 << 20))),
    png_negative=lambda: png(0xFFFFFFFF, 1),
    gif_clears=lambda: gif(1000, 1000, gif_frame(1000, 1000, b"\x24\x49\x92" * 25_000)),
    gif_more_clears=lambda: gif(1000, 1000, gif_frame(1000, 1000, b"\x24\x49\x92" * 93_000)),
    gif_small_clears=lambda: gif(8, 8, gif_frame(8, 8, b"\x24\x49\x92" * 330_000)),
    gif_clears_between=lambda: gif(1000, 1000, gif_frame(1000, 1000, codes(3, 4, 0) * 46_000)),
    gif_most_clears=lambda: gif(1000, 1000, gif_frame(1000, 1000, codes(3, 4, 0, 0) * 10_000)),
    gif_clears_every_third=lambda: gif(1000, 1000, gif_frame(1000, 1000, codes(3, 4, 0, 0) * 31_000)),
    gif_clears_behind_comments=lambda: gif(
        1000, 1000, b"!\xfe\x01a\0" * 20, gif_frame(1000, 1000, b"\x24\x49\x92" * 90_000)
    ),
    gif_one_byte_blocks=lambda: gif(
        1000, 1000, b"," + struct.pack("<HHHHB", 0, 0, 1000, 1000, 0) + b"\x02" + b"\x01\x24" * 140_000 + b"\0"
    ),
    gif_frames=lambda: gif(2000, 2000, *[gif_frame(2000, 2000, b"\x44\x01")] * 10_000),
    gif_comments=lambda: gif(8, 8, *[b"!\xfe\x01a\0"] * 55_000, gif_frame(8, 8, b"\x44\x01")),
    bmp_rle=lambda: patched(picture(".bmp"), (18, struct.pack("<iiHHI", 5700, 5700, 1, 8, 1))),
    bmp_smallest=lambda: patched(picture(".bmp"), (18, struct.pack("<ii", -(1 << 31), -(1 << 31)))),
    bmp_colors=lambda: patched(picture(".bmp"), (46, b"\xff\xff\xff\x7f")),
    tiff_one_strip=lambda: tiff(t256=100, t257=100, n273=1 << 30, n279=1 << 30),
    tiff_offset=lambda: b"II*\0" + b"\xff" * 4 + bytes(60),
    tiff_entries=lambda: b"MM\0*" + struct.pack(">IH", 8, 65535) + bytes(280_000),
    tiff_bits=lambda: tiff(t258=65535),
    tiff_odd_type=lambda: tiff().replace(struct.pack("<HH", 256, 3), struct.pack("<HH", 256, 16)),
    tiff_large=lambda: b"II+\0\x08\0\0\0" + bytes(60),
    jp2_tiles_of_one=lambda: jp2(255, 257, 1),
    jp2_tile_of_none=lambda: jp2(8, 8, 0),
    jp2_codestream=lambda: jp2(60000, 60000, 60000)[picture(".jp2", size=64).index(b"\xff\x4f\xff\x51") :],
    pnm_comment=lambda: b"P5 # 1 1\r60000 60000 255\n 8 8 255\n" + bytes(64),
    pnm_digits=lambda: b"P5 " + b"9" * 280_000,
    pnm_comments=lambda: b"P5 " + b"#\n" * 140_000,
    avif=lambda: b"\0\0\0\x20ftypavif" + bytes(100),
    pam=lambda: b"P7\nWIDTH 60000\nHEIGHT 60000\nDEPTH 3\nMAXVAL 255\nENDHDR\n",
    pfm=lambda: b"PF\n60000 60000\n-1.0\n",
    hdr=lambda: b"#?RADIANCE\nFORMAT=32-bit_rle_rgbe\n\n-Y 60000 +X 60000\n",
    sun=lambda: b"\x59\xa6\x6a\x95" + struct.pack(">7I", 60000, 60000, 24, 0, 1, 0, 0),
    exr=lambda: b"\x76\x2f\x31\x01" + bytes(99),
)  # fmt: skip
HOSTILE["images"] = dict(sorted(HOSTILE["images"].items(), key=lambda item: "35_bytes_65535" not in item[0]))
group(
    "images of one shape", Image, picture(".jpg"),
    scans=lambda: scans(8, 8, 12_000),
    other=lambda: jpeg(65535, 65535),
    png_other=lambda: png(65535, 65535),
)  # fmt: skip


# -- Python values -----------------------------------------------------------------------------------------------------

M = (1 << 61) - 1


def dumped(value: Any, protocol: int = 4) -> bytes:
    return pickle.dumps(value, protocol)


def of_one_hash(n: int, behind: bytes = b"") -> bytes:
    """The operations that put so many keys on a pickle's stack, and `behind` after each. (To make the dict itself would
    take as long as the pickle does.)"""
    return b"".join(dumped(k * M, 3)[2:-1] + behind for k in range(1, n))


def again(made: bytes, use: bytes, times: int) -> bytes:
    """A list of what `use` makes, again and again, of what stands in the memo."""
    return b"\x80\x04]" + made + b"\x94" + b"0" + b"(" + use * times + b"e."


def calls(name: str, argument: bytes, times: int = 20_000) -> bytes:
    """name(argument), again and again."""
    module, function = name.rsplit(".", 1)
    what = b"c" + f"{module}\n{function}\n".encode()
    return b"\x80\x04]" + what + b"\x940" + argument + b"\x85\x940" + b"(" + b"h\0h\x01R" * times + b"e."


def text(n: int) -> bytes:
    return b"X" + struct.pack("<I", n) + b"1" * n


NESTED = b"\x80\x04K\0\x85\x940" + b"".join(b"(" + bytes([0x68, k]) * 30 + b"t\x940" for k in range(40))
group(
    "pickle", lambda: Pickle(["a"], allow=[]), dumped({"a": 1}),
    one_hash_floats=lambda: dumped({"a": dict.fromkeys(float(k) * 2.0**61 for k in range(2000))}),
    one_hash=lambda: b"\x80\x04}(" + of_one_hash(20_000, b"N") + b"u.",
    one_hash_set=lambda: b"\x80\x04\x8f(" + of_one_hash(20_000) + b"\x90.",
    one_hash_frozenset=lambda: b"\x80\x04(" + of_one_hash(20_000) + b"\x91.",
    one_hash_old_set=lambda: calls("builtins.set", b"(" + of_one_hash(20_000) + b"l", 1),
    one_hash_old_dict=lambda: b"\x80\x02(" + of_one_hash(20_000, b"N") + b"d.",
    one_hash_tuples=lambda: b"\x80\x04}(" + of_one_hash(18_000, b"K\0\x86N") + b"u.",
    one_hash_one_by_one=lambda: b"\x80\x04}" + of_one_hash(20_000, b"Ns") + b".",
    one_hash_ordered=lambda: calls("collections.OrderedDict", b"(" + of_one_hash(18_000, b"N\x86") + b"l", 1),
    long_int_keys=lambda: again(b"\x8b" + struct.pack("<i", 100_000) + b"\x7f" * 100_000, b"}h\0Ns", 30_000),
    deep=lambda: b"\x80\x04" + b"]" * 100_000 + b"a" * 99_999 + b".",
    deep_tuples=lambda: b"\x80\x04)" + b"\x85" * 250_000 + b".",
    shared=lambda: NESTED + b"h\x28.",
    shared_key=lambda: NESTED + b"}h\x28Ns.",
    wide_key=lambda: again(b"(" + b"K\0" * 900 + b"t", b"}h\0Ns", 50_000),
    sets_again=lambda: calls(
        "builtins.set", b"(" + b"".join(b"J" + struct.pack("<i", k) for k in range(20_000)) + b"l"
    ),
    bytearrays_again=lambda: calls("builtins.bytearray", b"B" + struct.pack("<I", 140_000) + bytes(140_000)),
    encoded_again=lambda: calls("_codecs.encode", text(140_000)),
    decimals_again=lambda: calls("decimal.Decimal", text(140_000)),
    decimal_of_int=lambda: calls("decimal.Decimal", b"\x8b" + struct.pack("<i", 250_000) + b"\x7f" * 250_000, 1),
    decimal_exponent=lambda: calls("decimal.Decimal", b"X\x0c\0\0\x001e9999999999", 1),
    set_of_text=lambda: calls("builtins.set", text(140_000)),
    complex_of_text=lambda: calls("builtins.complex", text(140_000)),
    bytearray_of_number=lambda: calls("builtins.bytearray", b"J\xff\xff\xff\x7f", 1),
    bytearray8=lambda: b"\x80\x05\x96" + b"\xff\xff\xff\xff\0\0\0\0" + b"x.",
    bytes8=lambda: b"\x80\x04\x8e" + b"\xff\xff\xff\xff\0\0\0\0" + b"x.",
    text8=lambda: b"\x80\x04\x8d" + b"\xff\xff\xff\x7f\0\0\0\0" + b"x.",
    frame=lambda: b"\x80\x04\x95" + b"\xff\xff\xff\xff\0\0\0\0" + b"N.",
    long_memo=lambda: b"\x80\x02Nr\xff\xff\xff\xff.",
    long4=lambda: b"\x80\x02\x8b\xff\xff\xff\x7f.",
    digits=lambda: b"L" + b"9" * 280_000 + b"L\n.",
    builds=lambda: (
        b"\x80\x04]cnumpy.core.multiarray\n_reconstruct\n\x940" + b"N\x940" * 60_000
        + b"(" + b"h\0NNN\x87R(K\1)cnumpy\ndtype\nX\2\0\0\0f4\x85R\x89C\4abcdtb" * 2_000 + b"e."
    ),
    two=lambda: dumped({"a": 1}) * 2,
    behind=lambda: dumped({"a": 1}) + b"x",
    itself=lambda: b"\x80\x04]\x94h\0a.",
    code=lambda: b"cos\nsystem\n(S'true'\ntR.",
    array_of_gigabytes=lambda: dumped({"a": np.zeros(3)}).replace(b"K\x03\x85", b"J\xff\xff\xff\x7f\x85"),
    many_axes=lambda: dumped(np.zeros((1,) * 30)),
    marks=lambda: b"\x80\x04" + b"(" * 280_000 + b".",
    empty=lambda: b"",
)  # fmt: skip
group(
    "trusted pickle", lambda: Pickle(["a"], allow_pickle=True), dumped({"a": 1}),
    two=lambda: dumped({"a": 1}) * 2,
    two_of_an_old_protocol=lambda: dumped({"a": 1}, 0) + dumped({"a": 2}, 0),
    behind=lambda: dumped({"a": 1}, 2) + b"\0x",
)  # fmt: skip


def nd(**said: Any) -> bytes:
    return msgpack.packb({"a": {"nd": True, "type": "<f4", "kind": "", "shape": [1], "data": bytes(4)} | said})


group(
    "msgpack", lambda: MsgPack(["a"]), msgpack.packb({"a": 1}),
    claims=lambda: b"\xdd\0\0\x03\xe8" * 1000,
    claims_of_all=lambda: b"\xdd\0\4\0\0" * 55_000,
    claims_within=lambda: b"\xdd\0\x04\0\0" * 500 + bytes(262_144),
    gigabytes=lambda: b"\xdd\xff\xff\xff\xff",
    map_of_gigabytes=lambda: b"\xdf\xff\xff\xff\xff",
    bytes_of_gigabytes=lambda: b"\xc6\xff\xff\xff\xff",
    text_of_gigabytes=lambda: b"\xdb\xff\xff\xff\xff",
    ext_of_gigabytes=lambda: b"\xc9\xff\xff\xff\xff\x01",
    deep=lambda: b"\x91" * 280_000 + b"\xc0",
    deep_maps=lambda: b"\x81\xa1a" * 90_000 + b"\xc0",
    two=lambda: msgpack.packb({"a": 1}) * 2,
    behind=lambda: msgpack.packb({"a": 1}) + b"\0",
    one_hash=lambda: b"\x81\xa1a\xde\x69\x78" + b"".join(
        b"\xcb" + struct.pack(">d", k * 2.0**61) + b"\xc0" for k in range(27_000)
    ),
    timestamps=lambda: b"\x81\xa1a\xdc\x40\0" + (b"\xc7\x0c\xff" + b"\x3b" * 12) * 0x4000,
    array_shape=lambda: nd(shape=[1 << 62, 1 << 62]),
    array_axes=lambda: nd(shape=[1 << 62] * 25_000),
    array_zeros=lambda: nd(shape=[1 << 40, 0], data=b""),
    array_dtype=lambda: nd(type="S2000000000"),
    array_fields=lambda: nd(kind="V", type=[[f"f{k}", "<f4"] for k in range(15_000)]),
    array_nested_dtype=lambda: nd(kind="V", type=[["a", "<f4", [1 << 30, 1 << 30]]]),
    complex_text=lambda: msgpack.packb({"a": {"complex": True, "data": "1" * 280_000}}),
    empty=lambda: b"",
)  # fmt: skip
group(
    "json", lambda: Json(["a"], arrays="ase"), b'{"a": 1}',
    deep=lambda: b"[" * 280_000,
    deep_objects=lambda: b'{"a":' * 56_000,
    deep_and_whole=lambda: b'{"a": ' + b"[" * 900 + b"]" * 900 + b"}",
    digits=lambda: b'{"a": ' + b"9" * 280_000 + b"}",
    exponent=lambda: b'{"a": 1e' + b"9" * 280_000 + b"}",
    two=lambda: b'{"a": 1}{"a": 2}',
    lines=lambda: b'{"a": 1}\n{"a": 2}\n',
    utf32=lambda: b'\xff\xfe\0\0{\0\0',
    escapes=lambda: b'{"a": "' + b"\\ud800" * 45_000 + b'"}',
    keys=lambda: b'{"a": {' + b",".join(b'"%d": 0' % k for k in range(25_000)) + b"}}",
    numbers=lambda: b'{"a": [' + b"0," * 140_000 + b"0]}",
    array_shape=lambda: b'{"a": {"__ndarray__": [[9999999999999999999, 0], "float64", []]}}',
    array_of_texts=lambda: b'{"a": {"__ndarray__": [[' + b'"a",' * 50_000 + b'"a"], "float64", []]}}',
    array_axes=lambda: (
        b'{"a": {"__ndarray__": [[' + b"9" * 4000 + (b"," + b"9" * 4000) * 68 + b'], "float64", []]}}'
    ),
    array_infinite=lambda: b'{"a": {"__ndarray__": [[Infinity], "int64", [1e400]]}}',
    complex=lambda: b'{"a": {"__complex__": [1, 2, 3]}}',
    time=lambda: b'{"a": {"__datetime__": 1e400}}',
    empty=lambda: b"",
)  # fmt: skip


def npy(header: bytes, data: bytes = b"", version: int = 1) -> bytes:
    size = struct.pack("<H" if version == 1 else "<I", len(header))
    return b"\x93NUMPY" + bytes([version, 0]) + size + header + data


def saved(array: np.ndarray) -> bytes:
    file = io.BytesIO()
    np.save(file, array)
    return file.getvalue()


def npz(*members: tuple[str, bytes], kind: int = zipfile.ZIP_DEFLATED) -> bytes:
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", kind) as archive:
        for name, data in members:
            archive.writestr(name, data)
    return file.getvalue()


def shape(text: str, descr: str = "<f4") -> bytes:
    return f"{{'descr': '{descr}', 'fortran_order': False, 'shape': {text}, }}\n".encode()


group(
    "npy", Npy, saved(np.zeros(3, "f4")),
    gigabytes=lambda: npy(shape("(1073741824,)")),
    overflow=lambda: npy(shape("(4611686018427387904, 4)")),
    nothing=lambda: npy(shape("(4611686018427387904, 0)")),
    negative=lambda: npy(shape("(-1,)")),
    infinite=lambda: npy(shape("(1e400,)")),
    power=lambda: npy(shape("(9**9**9,)")),
    deep=lambda: npy(shape("(" * 60_000)),
    deep_minus=lambda: npy(shape("-" * 60_000)),
    many=lambda: npy(shape("(" + "1," * 30_000 + ")")),
    long_header=lambda: npy(shape("(" + "1," * 130_000 + ")"), version=2),
    header_of_gigabytes=lambda: b"\x93NUMPY\x02\0\xff\xff\xff\xff",
    texts=lambda: npy(shape("(1,)", "S2000000000")),
    objects=lambda: npy(shape("(1,)", "|O"), b"cos\nsystem\n(S'true'\ntR."),
    behind=lambda: saved(np.zeros(3, "f4")) + b"x",
    two=lambda: saved(np.zeros(3, "f4")) * 2,
    empty=lambda: b"",
)  # fmt: skip
group(
    "npz", Npz, npz(("a.npy", saved(np.zeros(3, "f4")))),
    zeros=lambda: npz(("a.npy", npy(shape("(250000000,)", "|u1"), bytes(250_000_000)))),
    small_zeros=lambda: npz(("a.npy", npy(shape("(60000000,)", "|u1"), bytes(60_000_000)))),
    size=lambda: npz(("a.npy", b"a" * 10)).replace(struct.pack("<I", 10), b"\xff\xff\xff\x7f"),
    members=lambda: npz(*[(f"{k}.npy", saved(np.zeros(1, "u1"))) for k in range(1200)]),
    bzip=lambda: npz(("a.npy", bytes(1 << 20)), kind=zipfile.ZIP_BZIP2),
    header=lambda: npz(("a.npy", npy(shape("(1073741824,)")))),
    empty=lambda: b"",
)  # fmt: skip


# -- protocol buffers, fixed layouts -----------------------------------------------------------------------------------


def varint(n: int) -> bytes:
    out = bytearray()
    while n > 127:
        out.append(n & 127 | 128)
        n >>= 7
    return bytes([*out, n])


def sized(field: int, content: bytes, said: int | None = None) -> bytes:
    return varint(field << 3 | 2) + varint(len(content) if said is None else said) + content


def datum(c: int, h: int, w: int, data: bytes = b"", *more: bytes) -> bytes:
    return b"\x08" + varint(c) + b"\x10" + varint(h) + b"\x18" + varint(w) + sized(4, data) + b"".join(more)


def tensors(*bodies: bytes) -> bytes:
    return b"".join(sized(1, body) for body in bodies)


group(
    "datum", Datum, datum(1, 2, 2, b"abcd", b"\x28\x07"),
    gigabytes=lambda: datum(3, 1 << 15, 1 << 15),
    overflow=lambda: datum(1 << 31, 1 << 31, 4, b"abcd"),
    negative=lambda: datum((1 << 64) - 1, 2, 2, b"abcd"),
    said=lambda: datum(1, 2, 2)[:-2] + sized(4, b"abcd", 1 << 31),
    endless=lambda: b"\xff" * 280_000,
    groups=lambda: b"\x0b" * 280_000,
    fields=lambda: b"\x28\x07" * 140_000,
    datas=lambda: datum(1, 2, 2, b"abcd") + sized(4, b"") * 90_000,
    encoded=lambda: datum(3, 8, 8, gif(65535, 65535, gif_frame(1, 1, b"\x4c\x01")), b"\x38\x01"),
    floats=lambda: datum(1, 2, 2) + sized(6, b"", (1 << 62) + 8),
    empty=lambda: b"",
)  # fmt: skip
group(
    "tensors", TensorProtos, tensors(b"\x08\x02\x10\x02" + sized(4, b"\1\2"), b"\x08\x01\x10\x02" + sized(4, b"\1")),
    many=lambda: tensors(b"") * 140_000,
    dims=lambda: tensors(b"\x08" + varint(1 << 62) + b"\x08" + varint(1 << 62) + b"\x10\x02"),
    many_dims=lambda: tensors((b"\x08" + varint((1 << 62) - 1)) * 28_000 + b"\x10\x02"),
    strings=lambda: tensors(b"\x10\x04" + sized(5, b"") * 90_000),
    picture=lambda: tensors(b"\x08\x01\x10\x04" + sized(5, gif(65535, 65535, gif_frame(1, 1, b"\x4c\x01")))),
    gigabytes=lambda: tensors(b"\x08" + varint(1 << 31) + b"\x10\x01"),
    said=lambda: sized(1, b"", 1 << 40),
    empty=lambda: b"",
)  # fmt: skip
group("raw", lambda: Raw("f4"), bytes(8), other=lambda: bytes(7), two=lambda: bytes(16), empty=lambda: b"")
group("struct", lambda: Struct({"a": "f4", "b": "u1"}), bytes(5), two=lambda: bytes(10), empty=lambda: b"")
group("text", Text, b"abc", wrong=lambda: b"\xff" * 280_000)
group("tokens", lambda: Text(dtype="u4"), bytes(8), part=lambda: bytes(7))


# -- packed values: (codec, header and payload) ------------------------------------------------------------------------


def sum_of(value: bytes) -> bytes:
    out, zero = np.zeros(1, np.uint64), np.zeros(1, np.int64)
    sum_values(np.frombuffer(value, np.uint8), zero, np.array([len(value)]), out)
    return struct.pack("<I", int(out[0]) & 0xFFFFFFFF)


class Unpacked:
    """A codec's packed values as a decoder has them. What it says of sizes costs memory in `Packed`."""

    def __init__(self, name: str) -> None:
        self.packing = Packing([make(name)])

    def __call__(self, value: bytes) -> bytes:
        return self.packing.unpack_one(value)


def packed(size: int, payload: bytes, value: bytes = b"") -> bytes:
    return b"\x01" + sum_of(value) + varint(size) + payload


for name in CODECS:
    codec = make(name)
    group(
        f"packed {name}", lambda name=name: Unpacked(name), packed(4, codec.encode(b"abcd"), b"abcd"),
        gigabytes=lambda codec=codec: packed(0xFFFFFFFF, codec.encode(b"abcd")),
        zeros=lambda codec=codec: packed(200 << 20, codec.encode(bytes(200 << 20)), bytes(200 << 20)),
        two=lambda codec=codec: packed(8, codec.encode(b"abcd") * 2, b"abcdefgh"),
        more=lambda codec=codec: packed(3, codec.encode(b"abcd"), b"abc"),
        less=lambda codec=codec: packed(5, codec.encode(b"abcd"), b"abcde"),
        cut=lambda codec=codec: packed(4, codec.encode(b"abcd")[:-1], b"abcd"),
        endless_size=lambda: b"\x01sum." + b"\xff" * 300,
        empty=lambda: b"",
    )  # fmt: skip


# -- descriptions in JSON ----------------------------------------------------------------------------------------------


def reserved(text: bytes, parts: bytes = b"") -> bytes:
    whole = MAGIC + struct.pack("<I", len(text)) + text + parts
    return whole + struct.pack("<Q", _sum(whole))


def entry_of(**said: Any) -> bytes:
    table = zlib.compress(bytes(8))
    plain = {"version": 1, "codecs": [], "records": 2, "sizes": [0, len(table), "deflate", "<u4"]}
    return reserved(json.dumps(plain | said).encode(), table)


def sizes_of(value: bytes) -> Any:
    return Packing.from_entry(value).sizes


ODD = {
    "deep": b"[" * 100_000, "infinite": b'{"version": 1e400}', "digits": b"9" * 100_000, "list": b"[]", "null": b"null",
}  # fmt: skip
group(
    "reserved entry", lambda: sizes_of, entry_of(),
    **{name: lambda text=text: reserved(text) for name, text in ODD.items()},
    records_infinite=lambda: entry_of(records=1e999),
    records=lambda: entry_of(records=10**30),
    more_records=lambda: entry_of(records=10**8),
    parts=lambda: entry_of(parts={"a": [1e300, 5]}),
    codecs_deep=lambda: entry_of(codecs=[{"name": "zstd", "dictionary": [0, 10**40]}]),
    level=lambda: entry_of(codecs=[{"name": "zstd", "dictionary": None, "level": 1e999}]),
    options=lambda: entry_of(codecs=[{"name": "blosc2", "dictionary": None, "options": {"typesize": 10**40}}]),
)  # fmt: skip


def described(text: bytes) -> bytes:
    from pario.checkpoint.store import sum_of as whole_sum

    rest = b' "body": ' + text + b"}\n"
    return b'{"xxh3": "%016x",\n' % whole_sum(rest) + rest


for name, read in (
    ("manifest", lambda value: read_manifest(value, "file")), ("part", lambda value: read_part(value, "file"))
):  # fmt: skip
    group(
        name, lambda read=read: read, b"",
        **{case: lambda text=text: described(text) for case, text in ODD.items()},
        numbers=lambda: described(b'{"format": "pario checkpoint", "layout": 1, "nodes": 1e999, "step": 1e999}'),
    )  # fmt: skip
group("servers", lambda: read_servers, b"", **{name: lambda text=text: text for name, text in ODD.items()})
group(
    "message", lambda: unpacked, b"",
    **{name: lambda text=text: struct.pack("<I", len(text)) + text for name, text in ODD.items()},
)  # fmt: skip


# -- the process -------------------------------------------------------------------------------------------------------


def status(what: str) -> int:
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) << 10 for line in file if line.startswith(what))


def outcome(decoder: Any, good: bytes, value: bytes) -> tuple[str, int, float]:
    """(what became of the value, bytes of the batch, seconds at most of learning or decoding). Raises what no decoder
    may raise."""
    begin = time.thread_time()
    if not hasattr(decoder, "learn"):
        try:
            return "decoded", len(decoder(value)), time.thread_time() - begin
        except (ParioError, ValueError) as error:
            return f"refused: {error}", 0, time.thread_time() - begin
    with contextlib.suppress(DecodeError):
        type(decoder).learn_at(decoder, np.frombuffer(value, np.uint8), 0, Draw())
    learning = time.thread_time() - begin
    decoder.spec = None
    records = made([good, value, good])
    decoder.learn_at(records[0], 0, Draw())
    out = arrays(decoder, records)
    begin = time.thread_time()
    failures = decoder.decode(records, out, Draw())
    seconds = max(learning, time.thread_time() - begin)
    got = sum(array.nbytes for array in out.values())
    if [row for row, _ in failures] not in ([], [1]):
        raise AssertionError(f"other rows fail: {failures}")
    for array in out.values():
        if len(array) == 3 and str(array[0]) != str(array[2]):
            raise AssertionError("its neighbours are not alike")
    return (f"refused: {failures[0][1]}" if failures else "decoded"), got, seconds


def main() -> None:
    cv2.setNumThreads(0)
    wanted = [tuple(word.replace("%", " ").split("/")) for word in sys.argv[1:]]
    with contextlib.suppress(BadImage):
        check(np.frombuffer(gif(4, 4), np.uint8))
    for kind in dict.fromkeys(kind for kind, _ in wanted):  # libraries are loaded, kernels compiled
        make_decoder, good, _ = next(iter(HOSTILE[kind].values()))
        if good:
            outcome(make_decoder(), good, good)
    for kind, name in wanted:
        make_decoder, good, make_value = HOSTILE[kind][name]
        value, decoder = make_value(), make_decoder()
        most = status("VmSize") + (640 << 20)
        resource.setrlimit(resource.RLIMIT_AS, (most, resource.getrlimit(resource.RLIMIT_AS)[1]))
        gc.collect()
        ctypes.CDLL(None).malloc_trim(0)
        with open("/proc/self/clear_refs", "w") as file:
            file.write("5")
        before = status("VmRSS")
        try:
            said, batch, seconds = outcome(decoder, good, value)
        except BaseException as error:  # the fault that is looked for
            said, batch, seconds = f"{type(error).__name__}: {str(error)[:200]}", 0, 0.0
        peak = status("VmHWM") - before - batch
        resource.setrlimit(resource.RLIMIT_AS, (-1, resource.getrlimit(resource.RLIMIT_AS)[1]))
        line = {"case": f"{kind}/{name}", "nbytes": len(value), "seconds": seconds, "peak": peak, "said": said[:300]}
        print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main()
