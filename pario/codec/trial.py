"""Candidates measured on samples: ratio with headers, and the time of decoding with all threads at once."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from pario import machine
from pario.codec.packing import Packing
from pario.codec.registry import parse
from pario.codec.select import Application, Candidate, Selection, Store, select
from pario.codec.zstd import train
from pario.errors import OptionError
from pario.records import Records

#: What is tried: from fast to small.
CANDIDATES = (
    "raw", "lz4", "lz4hc:9", "zstd:1", "zstd:3", "zstd:9", "zstd:19", "deflate:6", "brotli:9", "lzma:6",
)  # fmt: skip
#: Tried with a trained dictionary, too, if records are small.
DICTIONARIES = ("lz4hc:9", "zstd:3", "zstd:19")
_SMALL, _DICTIONARY = 16 << 10, 32 << 10
#: Seconds of packing and of decoding per candidate.
_SECONDS = 0.25


def measure(
    spec: str, samples: Sequence[bytes], *, threads: int = 1, seconds: float = _SECONDS, dictionary: bytes = b""
) -> Candidate:
    """Ratio and decoding time of a codec, from as many samples as can be packed in `seconds` seconds.

    threads : which decode at once, each the same records into memory of its own
    """
    packing = Packing([parse(spec, dictionary)])
    packing.pack(b"".join(samples[:1]))  # kernels are loaded, contexts made
    packed, end = list[bytes](), time.perf_counter() + seconds
    for sample in samples:
        packed.append(packing.pack(sample))
        if time.perf_counter() > end:
            break
    records = Records.of(np.arange(len(packed)), packed)
    sizes = np.array([len(value) for value in samples[: len(packed)]], np.int64)
    starts = np.cumsum(sizes) - sizes

    def decode(out: np.ndarray) -> None:
        failures = packing.unpack(records, out, starts, sizes)
        if failures:  # `unpack` has compared all checksums
            raise OptionError(f"codec {spec} does not give back what it packed: {failures[:1]}")

    each = _seconds_each(decode, int(sizes.sum()), threads, seconds) / len(packed)
    stored, plain = sum(map(len, packed)), int(sizes.sum())
    return Candidate(spec, plain / stored if stored else 1.0, each, dictionary=bool(dictionary))


def _seconds_each(decode: Callable[[np.ndarray], None], nbytes: int, threads: int, seconds: float) -> float:
    """Seconds of one call in each of the threads, which call at once; the fastest round of several."""
    outs = [np.zeros(nbytes, np.uint8) for _ in range(threads)]
    decode(outs[0])  # kernels are loaded, contexts made, pages touched
    begin = time.perf_counter()
    decode(outs[0])
    calls = max(1, int(seconds / 5 / max(time.perf_counter() - begin, 1e-6)))

    def work(out: np.ndarray) -> None:
        for _ in range(calls):
            decode(out)

    best, end = float("inf"), time.perf_counter() + seconds
    with ThreadPoolExecutor(threads) as pool:
        while best == float("inf") or time.perf_counter() < end:
            begin = time.perf_counter()
            list(pool.map(work, outs))
            best = min(best, time.perf_counter() - begin)
    return best / calls


def measure_all(
    samples: Sequence[bytes],
    *,
    threads: int = 1,
    seconds: float = _SECONDS,
    dictionaries: bool = True,
    progress: Callable[[str], None] = lambda spec: None,
    missing: Callable[[str, OptionError], object] = lambda codec, why: None,
) -> list[Candidate]:
    """All candidates whose packages are installed, with a dictionary where records are small, and blosc2 where their
    bytes look like numbers. Dictionaries are trained on every second sample and measured on the others.

    dictionaries : False: none is tried
    missing : told of the codecs that are not measured, since their package is not installed
    """
    found, held = list[Candidate](), list(samples[1::2]) or list(samples)
    specs = [(spec, b"") for spec in CANDIDATES]
    specs += [(f"blosc2:5,typesize={size},filter={how}", b"") for size in number_sizes(held) for how in _FILTERS]
    mean = sum(map(len, samples)) / max(len(samples), 1)
    if dictionaries and mean <= _SMALL:
        try:
            trained = train(samples[::2], _DICTIONARY)
        except OptionError:
            trained = b""
        specs += [(spec, trained) for spec in DICTIONARIES if trained]
    for spec, dictionary in specs:
        progress(spec)
        try:
            found.append(measure(spec, held, threads=threads, seconds=seconds, dictionary=dictionary))
        except OptionError as e:
            missing(spec.partition(":")[0], e)
    return found


_FILTERS = ("shuffle", "bitshuffle", "bytedelta")


def number_sizes(samples: Sequence[bytes]) -> list[int]:
    """Bytes per number that the samples may consist of: [2], [4] or [8], [] if their bytes look like text or noise.

    Bytes at a distance of a number's size are alike in numbers, above all the high ones.
    """
    data = np.frombuffer(b"".join(sample[: len(sample) // 8 * 8] for sample in samples[:64])[: 1 << 20], np.uint8)
    if len(data) < 256:
        return []

    def alike(step: int) -> float:
        return float((data[step:] == data[:-step]).mean())

    near = alike(1)
    scores = {step: alike(step) for step in (2, 4, 8)}
    best = max(scores, key=lambda step: scores[step])
    return [best] if scores[best] > near + 0.05 else []


def selection_for(
    samples: Sequence[bytes],
    *,
    batch: int,
    store: float,
    seconds: float,
    dictionaries: bool = True,
    speed: bool = False,
) -> Selection:
    """The codec for these values, and everything that was measured, with all cores, where nothing is known of the
    application: one that loads no slower from a store of `store` bytes per second than uncompressed data does,
    equation (1).

    dictionaries : as for `measure_all`; speed : as for `select`
    """
    cores = len(machine.allowed_cores()) or 1
    kept = [bytes(sample) for sample in samples if len(sample)]
    found = [Candidate("raw", 1.0, 0.0)]
    if kept:
        found = measure_all(kept, threads=cores, seconds=seconds, dictionaries=dictionaries)
    mean = sum(map(len, kept)) / max(len(kept), 1)
    application = Application(batch, batch * mean, 0.0, cores, sync=True)
    return select(application, found, Store(float("inf"), store), speed=speed)
