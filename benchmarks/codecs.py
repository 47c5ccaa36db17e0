"""The codecs of packed databases: ratio and speed by kind of record, ways to call their libraries, and choices tried.

    python -m benchmarks.codecs table     ratio, unpacking, packing
    python -m benchmarks.codecs floats    ratios of floating-point numbers with the filters of blosc2
    python -m benchmarks.codecs foretold  what `data choose` foretells beside what a Loader does
    python -m benchmarks.codecs bars      ratios with dictionaries
    python -m benchmarks.codecs all [--rounds 3] [--out FILE.json] [--into measurements/packing.md]

Exit status 1 if a bar is not met.

All data are synthetic and in memory. Ratios are raw bytes / stored bytes, headers and checksums included. Times are the
processor time of one thread, but in `foretold`; rounds are interleaved, and the best of them is printed.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median

import lmdb
import numpy as np

from benchmarks.marked import fill_marked
from benchmarks.study.sets import varint
from pario.codec.packing import Packing
from pario.codec.registry import parse
from pario.codec.zstd import train
from pario.commands.choose import ORDERS
from pario.errors import OptionError
from pario.loader.loader import Loader
from pario.records import Records

SPECS = (
    "lz4", "lz4hc:9", "zstd:-3", "zstd:1", "zstd:3", "zstd:9", "zstd:19", "deflate:6", "brotli:9", "lzma:6",
    "blosc2 lz4", "blosc2 zstd", "lz4hc:9 + dictionary", "zstd:3 + dictionary", "zstd:19 + dictionary",
)  # fmt: skip
#: bytes of the numbers that blosc2 regroups
NUMBERS = {"int16 1.2 KB": 2, "float32 2.4 KB": 4}
SMALL = 16 << 10
#: of a measurement, at most
SECONDS = 0.15
BARS: dict[str, float | None] = {"JSON 419 B": 3.3, "int16 1.2 KB": 1.9}


# -- records -----------------------------------------------------------------------------------------------------------


def _json(rng: np.random.Generator, n: int) -> list[bytes]:
    """Records of 419 bytes or so, as a web service or a labelling tool writes them."""
    names = ["horse", "truck", "frog", "airplane", "deer", "ship"]
    out = []
    for i in range(n):
        boxes = [[round(float(x), 1) for x in rng.uniform(0, 640, 4)] for _ in range(3)]
        record = {
            "id": int(rng.integers(1 << 40)), "file_name": f"images/train/{int(rng.integers(1e7)):012d}.jpg",
            "width": 640, "height": 480, "license": int(rng.integers(9)), "category": names[int(rng.integers(6))],
            "captured": f"2013-11-{1 + i % 28:02d} {i % 24:02d}:{i % 60:02d}:00", "boxes": boxes, "iscrowd": 0,
            "source": "https://example.org/datasets/objects/v2", "reviewed_by": ["first", "second"], "split": "train",
        }  # fmt: skip
        out.append(json.dumps(record).encode())
    return out


def _signals(rng: np.random.Generator, n: int, count: int, which: str) -> list[bytes]:
    """Sensors. pulses : a pulse on noise, int16; drift : a random walk with noise in its last bits, int16; waves :
    smooth, float32"""
    t = np.linspace(0, 1, count)[None]
    if which == "pulses":
        rows = 200 * np.exp(-(((t - rng.uniform(0.2, 0.8, (n, 1))) / 0.1) ** 2)) + rng.normal(0, 4, (n, count))
    elif which == "drift":
        rows = np.cumsum(rng.normal(0, 6, (n, count)), 1) + rng.normal(0, 2, (n, count))
    else:
        rows = np.sin(20 * t * rng.uniform(0.5, 2, (n, 1))) + rng.normal(0, 1e-3, (n, count))
    return [row.astype(np.float32 if which == "waves" else np.int16).tobytes() for row in rows]


def _images(rng: np.random.Generator, n: int, side: int) -> list[bytes]:
    """Datums of smooth pictures, uint8[3, side, side]."""
    fy, fx = np.fft.fftfreq(side)[:, None], np.fft.rfftfreq(side)[None]
    shape = 1 / (2.0 / side + np.hypot(fx, fy)) ** 2.6
    out = []
    for i in range(n):
        picture = np.fft.irfft2(np.fft.rfft2(rng.normal(size=(side, side))) * shape, s=(side, side))
        picture = (picture - picture.min()) / np.ptp(picture)
        tint = rng.uniform(0.4, 1.0, 3)[:, None, None]
        data = (picture[None] * tint * 255).astype(np.uint8).tobytes()
        size = len(data)
        head = b"\x08\x03\x10" + varint(side) + b"\x18" + varint(side) + b"\x22" + varint(size)
        out.append(head + data + b"\x28" + varint(i % 10))
    return out


def _text(rng: np.random.Generator, n: int, nbytes: int) -> list[bytes]:
    """Words by Zipf's law."""
    letters = np.frombuffer(b"etaoinshrdlucmfwypvbgkjqxz", np.uint8)
    words = [bytes(letters[np.minimum(rng.geometric(0.12, int(rng.integers(2, 9))) - 1, 25)]) for _ in range(6000)]
    ranks = np.minimum(rng.zipf(1.35, (n, nbytes // 5)) - 1, 5999)
    return [b" ".join(words[k] for k in row)[:nbytes] for row in ranks]


def kinds() -> dict[str, list[bytes]]:
    rng = np.random.default_rng(14)
    return {
        "JSON 419 B": _json(rng, 6000),
        "int16 1.2 KB": _signals(rng, 3000, 600, "pulses"),
        "float32 2.4 KB": _signals(rng, 1500, 600, "waves"),
        "Datum 3 KB": _images(rng, 1200, 32),
        "Datum 197 KB": _images(rng, 24, 256),
        "text 400 KB": _text(rng, 12, 400_000),
        "random 3 KB": [rng.bytes(3072) for _ in range(1200)],
    }


def _as_records(values: list[bytes]) -> Records:
    nbytes = np.array([len(value) for value in values], np.int64)
    data = np.frombuffer(b"".join(values), np.uint8)
    return Records(np.arange(len(values)), data, np.cumsum(nbytes) - nbytes, nbytes)


# -- the table ---------------------------------------------------------------------------------------------------------


def _spec(name: str, kind: str) -> tuple[str, bool] | None:
    """(what `parse` reads, whether with a dictionary); None: not for this kind."""
    base, dictionary = name.removesuffix(" + dictionary"), name.endswith("dictionary")
    if base.startswith("blosc2"):
        size = NUMBERS.get(kind)
        return (f"blosc2:5,typesize={size},filter=shuffle,codec={base.split()[1]}", False) if size else None
    if dictionary and kind.endswith(" KB") and float(kind.split()[-2]) * 1000 > SMALL:
        return None
    return base, dictionary


def measured(rounds: int) -> dict[tuple[str, str], dict[str, float]]:
    """By (codec, kind): ratio; us, of processor time to unpack a record; pack, bytes per second of processor time."""
    out: dict[tuple[str, str], dict[str, float]] = {}
    for kind, values in kinds().items():
        learnt, held = values[::2], values[1::2]
        dictionary = train(learnt, 32 << 10)
        for _ in range(rounds):
            for name in ("raw", *SPECS):
                spec = _spec(name, kind)
                if spec is None or (spec[1] and not dictionary):
                    continue
                try:
                    packing = Packing([parse(spec[0], dictionary if spec[1] else b"")])
                except OptionError as error:
                    print(error, file=sys.stderr)
                    continue
                ratio, spent, rate = _figures(packing, held, SECONDS)
                row = out.setdefault((name, kind), {"ratio": ratio, "us": spent * 1e6, "pack": rate})
                row["us"], row["pack"] = min(row["us"], spent * 1e6), max(row["pack"], rate)
    return out


def _figures(packing: Packing, values: list[bytes], seconds: float) -> tuple[float, float, float]:
    """(ratio, seconds to unpack a record, bytes packed per second) of as many values as are packed in this time."""
    packing.pack(values[0])
    few, packed, begin, n = max(1, len(values) // 16), list[bytes](), time.thread_time(), 0
    while n < len(values) and time.thread_time() - begin < seconds:
        data, starts, nbytes = packing.pack_many(_as_records(values[n : n + few]))
        packed += [data[a : a + k].tobytes() for a, k in zip(starts.tolist(), nbytes.tolist(), strict=True)]
        n += few
    values = values[: len(packed)]
    raw = sum(map(len, values))
    rate = raw / (time.thread_time() - begin)
    records, sizes = _as_records(packed), np.array([len(value) for value in values], np.int64)
    starts, out, best, begin = np.cumsum(sizes) - sizes, np.zeros(raw, np.uint8), 1e9, time.thread_time()
    for k in range(1000):
        start = time.thread_time()
        failures = packing.unpack(records, out, starts, sizes)
        best = min(best, time.thread_time() - start)
        assert not failures, failures[0]
        if k >= 2 and time.thread_time() - begin > seconds:
            break
    assert out.tobytes() == b"".join(values)
    return raw / int(records.nbytes.sum()), best / len(values), rate


def tables(found: dict[tuple[str, str], dict[str, float]]) -> str:
    columns = list(dict.fromkeys(kind for _, kind in found))
    rows = list(dict.fromkeys(name for name, _ in found))

    def one(title: str, cell: Callable[[dict[str, float]], str]) -> list[str]:
        lines = [f"**{title}**", "", "| | " + " | ".join(columns) + " |", "|---" * (len(columns) + 1) + "|"]
        for name in rows:
            cells = [cell(found[name, kind]) if (name, kind) in found else "" for kind in columns]
            lines.append(f"| {name} | " + " | ".join(cells) + " |")
        return [*lines, ""]

    return "\n".join(
        one("Raw bytes ÷ stored bytes", lambda row: f"{row['ratio']:.2f}")
        + one("Unpacking a record: microseconds of processor time", lambda row: _short(row["us"]))
        + one("Packing: MB per second of processor time", lambda row: _short(row["pack"] / 1e6))
    ).rstrip()


def _short(number: float) -> str:
    return f"{number:,.0f}" if number >= 99.5 else f"{number:.3g}"


# -- floating-point numbers --------------------------------------------------------------------------------------------


def _fields(rng: np.random.Generator, power: float, noise: float = 0.0) -> list[bytes]:
    """Maps of 128 x 128 float32, 64 KB each, of mean 0 and deviation 1, whose amplitudes fall as 1 / f^power."""
    fy, fx = np.fft.fftfreq(128)[:, None], np.fft.rfftfreq(128)[None]
    waves = np.fft.rfft2(rng.normal(size=(8, 128, 128))) / (2 / 128 + np.hypot(fx, fy)) ** power
    maps = np.fft.irfft2(waves, s=(128, 128))
    maps = maps / maps.std(axis=(1, 2), keepdims=True) + noise * rng.normal(size=maps.shape)
    return [one.astype(np.float32).tobytes() for one in maps]


def floats(rounds: int) -> tuple[str, bool]:
    """Ratios of 64 KB of float32 with the filters of blosc2 and of zstd alone. Bar: 1.5 of the smoothest map."""
    rng = np.random.default_rng(16)
    line = np.linspace(0, 1, 1 << 14)
    every = {f"map, 1/f^{power}": _fields(rng, power) for power in (2, 3, 4, 5)}
    every["map, 1/f^5, noise of 1e-4"] = _fields(rng, 5, 1e-4)
    every["map, 1/f^4, 285 ± 10"] = [
        (np.frombuffer(one, np.float32) * 10 + 285).astype(np.float32).tobytes() for one in _fields(rng, 4)
    ]
    every["random walk"] = [row.astype(np.float32).tobytes() for row in np.cumsum(rng.normal(size=(8, 1 << 14)), 1)]
    every["sines"] = [
        np.sin(20 * line * speed + 6 * speed).astype(np.float32).tobytes() for speed in rng.uniform(0.5, 2, 8)
    ]
    ways = [("shuffle", "zstd", 5), ("bitshuffle", "zstd", 5)]
    ways += [("bytedelta", codec, level) for codec in ("lz4", "zstd") for level in (1, 5, 9)]
    specs = ["zstd:3", *(f"blosc2:{level},typesize=4,filter={how},codec={codec}" for how, codec, level in ways)]
    names = ["zstd:3", *(f"{how}, {codec}, level {level}" for how, codec, level in ways)]
    lines, best = ["| 64 KB of float32 | " + " | ".join(names) + " |", "|---" * (len(names) + 1) + "|"], 0.0
    for kind, values in every.items():
        ratios = [_figures(Packing([parse(spec)]), values, SECONDS)[0] for spec in specs]
        best = ratios[7] if kind == "map, 1/f^5" else best
        lines.append(f"| {kind} | " + " | ".join(f"{ratio:.2f}" for ratio in ratios) + " |")
    return "\n".join(lines), best >= 1.5


# -- what is foretold, tried -------------------------------------------------------------------------------------------

#: Bytes of a set's values, which the memory tier holds; a set of fewer repeats them.
_SET_BYTES = 48e6
#: The training that a codec is chosen for: bytes of values per second
_TRAINED = 100e6


def foretold(rounds: int) -> tuple[str, bool]:
    """`data choose` of ten sets, then the codec that it chose: records/s of a Loader in three orders, from memory, each
    epoch after the first, and the bytes of the file, foretold ÷ measured."""
    every = kinds()
    rng = np.random.default_rng(15)
    every["int16 1.2 KB, drift"] = _signals(rng, 3000, 600, "drift")
    every["map 64 KB"] = _fields(rng, 5)
    every["Datum 12 KB"] = _images(rng, 400, 64)
    lines = ["| records | codec | " + " | ".join((*ORDERS, "file")) + " |", "|---" * (len(ORDERS) + 3) + "|"]
    good = whole = 0
    for kind, values in every.items():
        ratios, codec = _foretold_of(values, rounds)
        good, whole = good + sum(0.8 <= each <= 1.2 for each in ratios[:-1]), whole + len(ratios) - 1
        lines.append(f"| {kind} | {codec} | " + " | ".join(f"{each:.2f}" for each in ratios) + " |")
        print(lines[-1], file=sys.stderr, flush=True)
    return "\n".join([*lines, "", f"{good} of {whole} rates lie within 0.8 to 1.2."]), good >= 0.9 * whole


def _foretold_of(values: list[bytes], rounds: int) -> tuple[list[float], str]:
    """(foretold ÷ measured: records/s in each order, bytes of the file; the codec)"""
    with tempfile.TemporaryDirectory(prefix="pario-foretold-") as folder:
        raw, packed = f"{folder}/raw", f"{folder}/packed"
        many = (values * int(np.ceil(_SET_BYTES / sum(map(len, values)))))[:100_000]
        with lmdb.open(raw, map_size=1 << 30, subdir=False) as env, env.begin(write=True) as txn:
            txn.cursor().putmulti(((b"%09d" % n, value) for n, value in enumerate(many)), append=True)
        batch = max(4, min(512, int(4e6 * len(values) / sum(map(len, values)))))
        step_ms = 1e3 * batch * sum(map(len, values)) / len(values) / _TRAINED
        words = ["data", "choose", raw, "--step-ms", f"{step_ms}", "--batch-size", f"{batch}", "--seconds", "0.3"]
        run = [sys.executable, "-m", "pario", *words, "--json"]
        said = json.loads(subprocess.run(run, check=True, capture_output=True, text=True).stdout)
        one = said["chosen"]["candidate"]
        if one["name"] == "raw":  # nobody packs it then
            packed = raw
        else:
            how = ["--codec", one["name"], "--dictionary", "auto" if one["dictionary"] else "no", "--no-verify", "-q"]
            subprocess.run([sys.executable, "-m", "pario", "data", "pack", raw, packed, *how], check=True)
        ratios = []
        for name, shuffle in ORDERS.items():
            with Loader(packed, batch, comm="self", shuffle=shuffle, drop_last=True) as loader:
                rates, reads = list[float](), -1
                while len(rates) <= rounds:
                    if reads < (now := loader.stats()["store_reads"]):  # memory was not full yet
                        rates, reads = [], now
                    begin = time.perf_counter()
                    rates.append(sum(len(records.ids) for records in loader) / (time.perf_counter() - begin))
            ratios.append(said["foretold"]["records_per_second"][name] / median(rates[1:]))
        ratios.append(said["foretold"]["file_bytes"] / os.path.getsize(packed))
        return ratios, one["name"] + (" + dictionary" if one["dictionary"] else "")


# -- bars --------------------------------------------------------------------------------------------------------------


def bars() -> tuple[str, bool]:
    """Ratios of held-out records with a dictionary of 32 KiB, the dictionary itself not counted."""
    lines, fine = ["| records | codec | ratio | bar | |", "|---|---|---|---|---|"], True
    every = kinds()
    every["int16 1.2 KB, drift"] = _signals(np.random.default_rng(15), len(every["int16 1.2 KB"]), 600, "drift")
    bars_of = BARS | {"int16 1.2 KB, drift": None}
    for kind, bar in bars_of.items():
        values = every[kind]
        trained = train(values[::2], 32 << 10)
        for spec in ("zstd:3", "zstd:19", "blosc2:9,typesize=2,filter=bitshuffle"):
            if kind.startswith("JSON") and spec.startswith("blosc2"):
                continue
            dictionary = b"" if spec.startswith("blosc2") else trained
            packing = Packing([parse(spec, dictionary)])
            stored = sum(len(packing.pack(value)) for value in values[1::2])
            ratio = sum(map(len, values[1::2])) / stored
            name = f"{spec} + dictionary" if dictionary else spec
            if bar is None or not dictionary:
                lines.append(f"| {kind} | {name} | {ratio:.2f} | | |")
                continue
            fine &= ratio >= bar
            lines.append(f"| {kind} | {name} | {ratio:.2f} | ≥ {bar} | {'met' if ratio >= bar else '**not met**'} |")
    return "\n".join(lines), fine


PARTS: dict[str, Callable[[int], tuple[str, bool]]] = {
    "bars": lambda rounds: bars(),
    "floats": floats,
    "table": lambda rounds: (tables(measured(rounds)), True),
    "foretold": foretold,
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=[*PARTS, "all", "none"])
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--out", type=Path, help="keep the parts' tables in this JSON file, beside those it has")
    parser.add_argument("--into", type=Path, help="a page with marks <!-- codecs: PART -->")
    given = parser.parse_args()
    texts: dict[str, str] = json.loads(given.out.read_text()) if given.out and given.out.exists() else {}
    fine = True
    for part in [one for one in PARTS if given.what in (one, "all")]:
        texts[part], good = PARTS[part](given.rounds)
        fine &= good
        print(texts[part], end="\n\n", flush=True)
        if given.out:
            given.out.write_text(json.dumps(texts, indent=1))
    if given.into:
        given.into.write_text(fill_marked(given.into.read_text(), "codecs", texts))
    return 0 if fine else 1


if __name__ == "__main__":
    sys.exit(main())
