"""Packed data on 1, 2 and 4 nodes: records per second of each node with n nodes ÷ with one.

    python -m benchmarks.scale --data DIR [--hosts] [--rounds 3] [--seconds 240] [--only PART] [--out FILE]

`loader`: a `pario.Loader` in "global" order. `view`: a program that opens the records as files below `pario files
view`, each node another part of them in each epoch, with `pario tiers serve` on every node. Records of 197 KB, packed
with zstd:3 to half of that; a quota in memory that holds a node's part and a third more; one process per node that
trains: it sleeps for 5 ms per record, so that two cores serve four nodes. Weak: 400 records per node; strong: 800 in
all. Four epochs: the first brings everything from the file (in the page cache), the second still waits for nodes that
ended the first one late, the third and fourth are the figure.

`--only capacity`: four nodes with quotas that together hold the packed file and not the raw one.

Nodes are processes with a PARIO_NODE each; with --hosts, as root, network namespaces whose links carry 200 Mbit/s.
Every run checks that each epoch had each record once, with its bytes. A view holds 16 MiB of opened files, so that each
open is a read. Runs are kept in FILE; the same command goes on where --seconds had ended it. Exit status 1 if a bar is
not met, 3 if there is more to run.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from functools import partial
from itertools import islice
from pathlib import Path
from statistics import median
from typing import Any

import lmdb
import numpy as np
import xxhash

import pario
from benchmarks.measure import ROOT, Pieces, Row, Section, kill_tree, missed, parser_of
from benchmarks.packed import made, pack

NODES, WEAK, STRONG = (1, 2, 4), 400, 800
STEP_S, EPOCHS, LINK, BAR = 0.005, 4, "200mbit", 0.9
_CODEC, _TIMEOUT_S = "zstd:3", 120
#: epochs and their bar
_PARTS = (("first", slice(0, 1), None), ("second", slice(1, 2), None), ("later epochs", slice(2, None), BAR))
#: the words before a command that start it on each node, and the address of the first one
Hosts = tuple[list[list[str]], str]


@contextmanager
def namespaces(count: int) -> Iterator[Hosts]:
    """Hosts with a network of their own, on one switch."""
    names = [f"pario-scale-{os.getpid()}-{k}" for k in range(count + 1)]
    tbf = ("root", "tbf", "rate", LINK, "burst", "256kb", "latency", "50ms")

    def do(*words: str) -> None:
        subprocess.run(words, check=True, capture_output=True, timeout=20)

    try:
        for name in names:
            do("ip", "netns", "add", name)
            do("ip", "-n", name, "link", "set", "lo", "up")
        do("ip", "-n", names[0], "link", "add", "switch", "type", "bridge")
        do("ip", "-n", names[0], "link", "set", "switch", "up")
        for k, name in enumerate(names[1:], 1):
            port = f"port{k}"
            do("ip", "-n", names[0], "link", "add", port, "type", "veth", "peer", "name", "eth0", "netns", name)
            do("ip", "-n", names[0], "link", "set", port, "master", "switch", "up")
            do("ip", "-n", name, "address", "add", f"10.77.1.{k}/24", "dev", "eth0")
            do("ip", "-n", name, "link", "set", "eth0", "up")
            do("ip", "-n", name, "route", "add", "default", "via", "10.77.1.254")
            do("tc", "-n", names[0], "qdisc", "add", "dev", port, *tbf)
            do("tc", "-n", name, "qdisc", "add", "dev", "eth0", *tbf)
        yield [["ip", "netns", "exec", name] for name in names[1:]], "10.77.1.1"
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "delete", name], capture_output=True, timeout=20, check=False)


@contextmanager
def started(
    hosts: Hosts, count: int, port: int, words: Sequence[str], more: dict[str, str]
) -> Iterator[list[subprocess.Popen[str]]]:
    """`python` with these words on each of so many nodes, as ranks that find each other without MPI."""
    team = {"WORLD_SIZE": f"{count}", "MASTER_ADDR": hosts[1], "MASTER_PORT": f"{port}"} | more
    ranks = [
        subprocess.Popen(
            [*hosts[0][k], sys.executable, *words], cwd=ROOT, text=True, stdout=subprocess.PIPE,
            env=os.environ | team | {"RANK": f"{k}", "PARIO_NODE": f"{k}"},
        )
        for k in range(count)
    ]  # fmt: skip
    try:
        yield ranks
    finally:
        for rank in ranks:
            if rank.poll() is None:
                kill_tree(rank.pid)
            rank.wait()


def job(way: str, path: Path, quota: int, count: int, hosts: Hosts) -> dict[str, Any]:
    """{"seconds": of each epoch, on the slowest node; "store_bytes": of the last one}; checks what was delivered."""
    with tempfile.TemporaryDirectory(prefix="pario-scale-") as folder, ExitStack() as stack:
        words, more = ["-m", "benchmarks.scale", "--data", folder, "--rank", way, os.fspath(path), str(quota)], {}
        if way == "view":
            more["PARIO_SERVICE"] = f"{folder}/$PARIO_NODE"
            serve = ["-m", "pario", "tiers", "serve", "--tiers", f"memory:{quota}"]
            for service in stack.enter_context(started(hosts, count, 29_511, serve, more)):
                said = service.stdout.readline() if service.stdout is not None else ""
                if "jobs find it" not in said:
                    raise RuntimeError(f"the service said: {said}")
            shown = ["--held", "16MiB", f"{path}={folder}/view", "--", sys.executable]
            words = ["-m", "pario", "files", "view", *shown, *words]
        for one in stack.enter_context(started(hosts, count, 29_517, words, more)):
            said, _ = one.communicate(timeout=_TIMEOUT_S)
            if one.returncode:
                raise RuntimeError(f"{one.args!r} ended with {one.returncode}: {said}")
        found = [np.load(f"{folder}/rank-{k}.npz") for k in range(count)]
    truth = np.load(path / "digests.npy")
    for epoch in range(EPOCHS):
        seen = np.concatenate([one[f"seen{epoch}"] for one in found])
        seen = seen[np.argsort(seen[:, 0])]
        assert (seen[:, 0] == np.arange(len(truth))).all(), "a record was not delivered once"
        assert (seen[:, 1] == truth).all(), "wrong bytes were delivered"
    seconds = np.max([one["seconds"] for one in found], axis=0).tolist()
    return {"seconds": seconds, "store_bytes": sum(int(one["store"]) for one in found)}


def rank(folder: str, way: str, path: str, quota: str) -> None:
    """One node: its epochs, and what it saw in them."""
    number, count = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    seconds, seen, store = [], [list[tuple[int, int]]() for _ in range(EPOCHS)], 0
    if way == "loader":
        options = pario.Options(tiers=(pario.Tier("memory", int(quota)),))
        with pario.Loader(path, 8, shuffle="global", options=options) as loader:
            for epoch in range(EPOCHS):
                begin, store = time.perf_counter(), loader.stats()["store_bytes"]
                for batch in loader:
                    values = np.split(batch["data"], batch["offsets"][1:-1])
                    seen[epoch] += zip(batch.ids.tolist(), map(_digest, values), strict=True)
                    time.sleep(STEP_S * len(values))
                seconds.append(time.perf_counter() - begin)
            store = loader.stats()["store_bytes"] - store
    else:
        names = sorted(os.listdir(f"{folder}/view"))
        for epoch in range(EPOCHS):
            order = np.random.default_rng(epoch).permutation(len(names))[number::count]
            Path(folder, f"ready-{epoch}-{number}").touch()
            while len(list(Path(folder).glob(f"ready-{epoch}-*"))) < count:
                time.sleep(0.002)
            begin = time.perf_counter()
            for batch in np.array_split(order, len(order) // 8):
                seen[epoch] += [(i, _digest(Path(folder, "view", names[i]).read_bytes())) for i in batch.tolist()]
                time.sleep(STEP_S * len(batch))
            seconds.append(time.perf_counter() - begin)
    arrays = {f"seen{epoch}": np.array(pairs, np.uint64) for epoch, pairs in enumerate(seen)}
    np.savez(Path(folder, f"rank-{number}.npz"), seconds=seconds, store=store, **arrays)


def _digest(data: Any) -> int:
    return xxhash.xxh3_64_intdigest(data)


def _set(data: Path, records: int) -> Path:
    """The first records of the packed set."""
    path = data / f"197k-{records}-{_CODEC.replace(':', '-')}"
    if not path.is_dir():
        with pario.Reader(os.fspath(made(data, "197k", _CODEC)[1]), comm="self") as reader:
            values = [value.tobytes() for value in reader.read(range(records))]
        pack(path, [(b"%08d" % i, value) for i, value in enumerate(values)], _CODEC)
    return _with_digests(path, data, records)


def _with_digests(path: Path, data: Path, records: int) -> Path:
    """Beside the set, digests of what it was made of."""
    with lmdb.open(os.fspath(made(data, "197k", _CODEC)[0]), readonly=True, lock=False) as env, env.begin() as txn:
        digests = [_digest(value) for value in islice(txn.cursor().iternext(keys=False), records)]
    np.save(path / "digests.npy", np.array(digests, np.uint64))
    return path


def capacity(data: Path, hosts: Hosts) -> list[Section]:
    """Four nodes whose quotas together hold the packed file and not the raw one: who still asks the store?"""
    pair = [_with_digests(path, data, 2000) for path in made(data, "197k", _CODEC)]
    raw, packed = (os.path.getsize(path / "data.mdb") for path in pair)
    quota = int(1.08 * packed / 4 / (1 << 20) + 2) << 20
    section = Section("scale capacity", f"bytes of the store in the last epoch, four quotas of {quota:,}", "page cache")
    for path, size, bar in zip(pair, (raw, packed), (None, 0.0), strict=True):
        nbytes = job("loader", path, quota, 4, hosts)["store_bytes"]
        section.add(Row.of(f"{path.name}, {size:,} bytes", [nbytes], "<=", bar, unit="bytes"))
    return [section]


def main() -> int:
    parser = parser_of("scale", __doc__, 3)
    parser.add_argument("--hosts", action="store_true", help="network namespaces; root")
    parser.add_argument("--seconds", type=float, default=240, help="begin nothing after this time")
    parser.add_argument("--only", choices=["loader", "view", "capacity"])
    parser.add_argument("--rank", nargs=3, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank:
        rank(options.data, *options.rank)
        return 0
    data, sections = Path(options.data), []
    data.mkdir(parents=True, exist_ok=True)
    pieces = Pieces(Path(options.out or data / "scale.json"), options.seconds)
    emulated: Hosts = ([[]] * max(NODES), "127.0.0.1")
    with namespaces(max(NODES)) if options.hosts else nullcontext(emulated) as hosts:
        kind = f"hosts, {LINK}" if options.hosts else "emulated"

        def named(way: str, count: int, records: int, number: int) -> str:
            return f"{way}, {kind}, {count} nodes, {records} records, round {number}"

        if options.only == "capacity":
            return int(missed(capacity(data, hosts)))
        ways = [options.only] if options.only else ["loader", "view"]
        cases = dict.fromkeys([(n, WEAK * n) for n in NODES] + [(n, STRONG) for n in NODES])
        try:
            for number in range(options.rounds):
                for way in ways:
                    for count, records in cases:
                        path = _set(data, records)
                        size = os.path.getsize(path / "data.mdb")
                        quota = (int(1.33 * size / count) // (1 << 20) + 4) << 20
                        name = named(way, count, records, number)
                        pieces.get(name, partial(job, way, path, quota, count, hosts))
        except TimeoutError:
            return 3
    for way in ways:
        section = Section(f"scale {way}", f"{way}, {kind}: records/s per node with n nodes ÷ with one", "page cache")
        for name, sizes in (("weak", {n: WEAK * n for n in NODES}), ("strong", dict.fromkeys(NODES, STRONG))):
            rates = {}
            for n, records in sizes.items():
                runs = [pieces.runs[named(way, n, records, number)]["seconds"] for number in range(options.rounds)]
                rates[n] = records / n / np.array(runs)
            for n in NODES[1:]:
                for which, part, bar in _PARTS:
                    many, alone = (np.median(rates[k][:, part], axis=1) for k in (n, 1))
                    told = f"{median(many):.1f} records/s per node, alone {median(alone):.1f}"
                    section.add(Row.of(f"{name}, {n} nodes, {which}", (many / alone).tolist(), ">=", bar, ours=told))
        sections.append(section)
    return int(missed(sections))


if __name__ == "__main__":
    sys.exit(main())
