"""`doctor`: what a support engineer asks first, with a sentence of advice for every problem.

Every rank collects facts, and rank 0 judges them. `advice` is a function of the facts alone, so each of its sentences
can be tested without the machine that has the problem.
"""

from __future__ import annotations

import os
import platform
from collections.abc import Iterator
from contextlib import closing
from importlib.metadata import PackageNotFoundError, version
from itertools import groupby
from pathlib import Path
from typing import Any

import pario
from pario import machine
from pario.comm.base import AnyWorld, together
from pario.comm.launcher import Launcher, announced, launcher, library, node_name, own_addresses
from pario.comm.solo import Solo
from pario.comm.world import get_world
from pario.commands.mpiexec import mpiexec_family, mpiexec_place
from pario.commands.screen import counted, decimal_bytes, screen
from pario.dataset.served import look_at_service
from pario.dataset.tiers import existing, look_at_tiers
from pario.errors import LauncherError, ParioError
from pario.fetch.posix import PosixFetcher
from pario.fetch.resolve import resolve
from pario.fetch.snapshot import read_snapshot
from pario.format.tree import Tree, named_database
from pario.kernels.jit import cache_directory, cache_problem
from pario.locate.sidecar import saved_index, sidecar_places
from pario.machine import allowed_cores, fair_threads
from pario.options import BLOCK_SLOTS, READ_BYTES, Options

_PACKAGES = ("numpy", "numba", "mpi4py", "h5py", "lmdb", "xxhash")

#: Bytes of shared memory per record that the index takes: offset, size, and the record's number in file order.
_INDEX_BYTES = 24


def doctor(path: str | None, db: str | None) -> int:
    """Collective over all ranks. Exit status 1 if there is any advice."""
    refused: LauncherError | None = None
    try:
        world: AnyWorld = get_world()
    except LauncherError as e:
        world, refused = Solo(), e
    with together(world, "looking at this node"):
        facts = _rank_facts(world, path, db)
    everyones = world.allgather(facts)
    report = _report(world, everyones, refused)
    screen.tell(report)
    screen.say(_words(report, path))
    status = world.bcast(1 if report["advice"] else 0)
    world.close()
    return int(status)


# -- facts ---------------------------------------------------------------------------------------------------------


def _rank_facts(world: AnyWorld, path: str | None, db: str | None) -> dict[str, Any]:
    """The facts of this rank; on the leader of a node also those of the node."""
    facts: dict[str, Any] = {
        "rank": world.rank,
        "node": world.node,
        "name": node_name(),
        "cores": allowed_cores(),
        "machine_cores": os.cpu_count() or 1,
        "core_quota": machine.core_quota(),
        "versions": _versions(),
        "mpi": _mpi_facts(world.mpi) if hasattr(world.mpi, "get_vendor") else None,
    }
    if world.is_leader:
        facts["memory"] = machine.memory()
        facts["kernels"] = _kernel_facts()
        facts["tiers"] = look_at_tiers(path) + look_at_service()
        facts["address"] = next(iter(own_addresses()), None)
        facts["dataset"] = None if path is None else _dataset_facts(path, db)
    return facts


def _versions() -> dict[str, str]:
    found = {"pario": pario.__version__, "python": platform.python_version()}
    for package in _PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = "missing"
    return found


def _mpi_facts(MPI: Any) -> dict[str, str]:
    name, numbers = MPI.get_vendor()
    levels = {getattr(MPI, f"THREAD_{level}"): level for level in ("SINGLE", "FUNNELED", "SERIALIZED", "MULTIPLE")}
    return {
        "library": f"{name} {'.'.join(map(str, numbers))}",
        "thread_level": levels.get(MPI.Query_thread(), "unknown"),
        "about": MPI.Get_library_version().strip("\0 \n").splitlines()[0],
    }


def _kernel_facts() -> dict[str, Any]:
    folder = cache_directory()
    where = machine.file_system(folder)
    return {
        "place": folder,
        "problem": cache_problem(),
        "file_system": where.type,
        "shared": where.shared,
        "compiled": sum(1 for _ in Path(folder).rglob("*.nbc")) if os.path.isdir(folder) else 0,
    }


def _dataset_facts(path: str, db: str | None) -> dict[str, Any]:
    """Facts about the dataset; with "error" if it cannot be opened."""
    facts: dict[str, Any] = {}
    try:
        file = resolve(path)
        where = machine.file_system(file)
        facts |= {"path": file, "file_system": where.type, "kind": where.kind, "mounted_at": where.mounted_at}
        facts |= {"source": where.source, "readonly": where.readonly}
        with closing(PosixFetcher(file)) as fetcher:
            snapshot = read_snapshot(fetcher)
            tree = Tree(lambda n: fetcher.pread(n * snapshot.page_size, snapshot.page_size), snapshot, snapshot.main)
            records = (snapshot.main if db is None else named_database(tree, db.encode())).md_entries
            status = fetcher.status()
        lock = os.path.join(os.path.dirname(file), "lock.mdb")
        if not os.path.exists(lock):
            lock = file + "-lock"
        saved, unfit = saved_index(file, status, snapshot, db)
        facts |= {
            "bytes": status.st_size,
            "transaction": snapshot.txnid,
            "records": records,
            "lock_file": lock if os.path.exists(lock) else None,
            "open_by": machine.lock_holders(lock),
            "index": saved,
            "unfit_indexes": unfit,
            "index_places": [p for p in sidecar_places(file, db) if os.access(existing(os.path.dirname(p)), os.W_OK)],
        }
    except ParioError as e:
        facts["error"] = str(e)
    except OSError as e:
        facts["error"] = f"{e.strerror}: {e.filename}"
    return facts


def _report(world: AnyWorld, everyones: list[dict[str, Any]], refused: LauncherError | None) -> dict[str, Any]:
    """All facts and the advice, as --json shows them, on rank 0; the other ranks get a report without advice."""
    found, job = launcher(), announced()
    if job is not None and not found.where:
        found = Launcher("torchrun or its like" if "RANK" in job.names else "PARIO_RENDEZVOUS", job.size, job.where)
    nodes = []
    for _, group in groupby(sorted(everyones, key=lambda f: (f["node"], f["rank"])), key=lambda f: f["node"]):
        ranks = list(group)
        whole = ("core_quota", "versions", "kernels", "dataset", "tiers", "address")
        own = {name: ranks[0][name] for name in ("node", "name", "machine_cores", "memory", *whole)}
        own["ranks"] = [{"rank": f["rank"], "name": f["name"], "cores": f["cores"]} for f in ranks]
        nodes.append(own)
    mpi = everyones[0]["mpi"]
    report: dict[str, Any] = {
        "versions": everyones[0]["versions"],
        "launcher": found._asdict() if found.where else None,
        "refused": None if refused is None else str(refused),
        "mpi": mpi,
        "mpi_library": mpi["library"] if mpi else None,
        "mpiexec": None,
        "ranks": world.size,
        "nodes": nodes,
        "wants": _wants(nodes),
        "advice": [],
    }
    if world.rank == 0:
        if mpi is None:
            report["mpi_library"], report["mpi_missing"] = library()
        mpiexec = mpiexec_place()
        if mpiexec and not found.where:
            report["mpiexec"] = {"place": mpiexec, "family": mpiexec_family(mpiexec)}
        report["advice"] = list(advice(report))
    return report


def _wants(nodes: list[dict[str, Any]]) -> dict[str, int]:
    """Bytes that a Loader with default options needs on each node, for batches of up to one slot."""
    options = Options()
    records = max(((node["dataset"] or {}).get("records", 0) for node in nodes), default=0)
    pool = options.block_bytes * options.mix_blocks
    return {
        "ring": options.slots * options.slot_bytes,
        "block_ring": BLOCK_SLOTS * max(options.slot_bytes, pool // len(nodes)),
        "index": records * _INDEX_BYTES,
    }


# -- judgement -----------------------------------------------------------------------------------------------------


def advice(report: dict[str, Any]) -> Iterator[str]:
    """A sentence or two for every problem."""
    yield from _about_mpi(report)
    names: dict[str, set[int]] = {}
    for node in report["nodes"]:
        for rank in node["ranks"]:
            names.setdefault(rank["name"], set()).add(node["node"])
    for name, numbers in names.items():
        if len(numbers) > 1:
            yield (
                f"MPI shows the ranks of {name} as {len(numbers)} nodes, so that each part reads the data for itself. "
                "Ranks in separate containers, or an MPI without shared memory, do that: start one container per node."
            )
    for node in report["nodes"]:
        where = f"node {node['node']} ({node['name']}): " if len(report["nodes"]) > 1 else ""
        for text in (
            *_about_cores(node),
            *_about_memory(node, report["wants"]),
            *_about_kernels(node["kernels"]),
            *_about_tiers(node, len(report["nodes"])),
            *_about_dataset(node["dataset"]),
        ):
            yield where + text
    yield from _about_differences(report["nodes"])


def _about_mpi(report: dict[str, Any]) -> Iterator[str]:
    if report["refused"]:
        yield report["refused"]
    mpi, mpiexec = report["mpi"], report["mpiexec"]
    if mpi and mpi["thread_level"] == "SINGLE":
        yield (
            "MPI was started for processes without threads, but pario has threads (they call no MPI): leave "
            'mpi4py.rc.threads at True, with thread_level "funneled" or above.'
        )
    if mpiexec and report["mpi_library"] and mpiexec["family"]:
        family = "Open MPI" if report["mpi_library"].startswith("Open MPI") else "MPICH"
        if family != mpiexec["family"]:
            yield (
                f"{mpiexec['place']} belongs to {mpiexec['family']}, but mpi4py loads {report['mpi_library']}: its "
                "ranks would not find each other. Use that library's mpiexec, or the other library (docs/clusters.md)."
            )


def _about_cores(node: dict[str, Any]) -> Iterator[str]:
    ranks = node["ranks"]
    cores = {core for rank in ranks for core in rank["cores"]}
    single = [rank["rank"] for rank in ranks if len(rank["cores"]) == 1]
    if len(cores) < len(ranks):
        yield (
            f"{counted(len(ranks), 'rank')} share {counted(len(cores), 'core')}: they take turns. Start fewer ranks "
            "per node, or ask the scheduler for a core per rank (srun --cpus-per-task, mpiexec --bind-to none)."
        )
    elif single and node["machine_cores"] > len(ranks):
        yield (
            f"rank {single[0]} may use one core only, which pario's threads share with your training. Let it use more: "
            "srun --cpus-per-task, or mpiexec --bind-to none."
        )
    quota = node["core_quota"]
    if quota is not None and quota < len(ranks):
        yield (
            f"the control group grants {quota:g} cores of processor time to {counted(len(ranks), 'rank')}: they are "
            "stopped for parts of each second. Raise the container's limit (--cpus)."
        )


def _about_memory(node: dict[str, Any], wants: dict[str, int]) -> Iterator[str]:
    block, (_, available) = wants["block_ring"] + wants["index"], node["memory"]
    if available < block:
        yield (
            f"{decimal_bytes(available)} of memory are left here, and pario's ring and index want up to "
            f"{decimal_bytes(block)}: ask for more memory (--mem), or use smaller Options."
        )


def _about_kernels(kernels: dict[str, Any]) -> Iterator[str]:
    if kernels["problem"]:
        yield (
            f"compiled kernels cannot be kept in {kernels['place']} ({kernels['problem']}): every process compiles "
            "them again. Set PARIO_NUMBA_CACHE to a directory on a local disk into which nobody but you can write."
        )
    elif kernels["shared"]:
        yield (
            f"compiled kernels are kept in {kernels['place']} on {kernels['file_system']}, which all nodes write at "
            "once. Set PARIO_NUMBA_CACHE to a directory on a local disk, such as /tmp."
        )


def _about_tiers(node: dict[str, Any], nodes: int) -> Iterator[str]:
    for tier in node["tiers"]:
        if tier["problem"]:
            yield f"tier {tier['where']}: {tier['problem']} (docs/tiers.md)"
    if node["tiers"] and nodes > 1 and node["address"] is None:
        yield (
            "no network interface leads to the other nodes, so that they cannot read this node's copies: name one in "
            "PARIO_INTERFACE (ib0, hsn0)."
        )


def _about_dataset(dataset: dict[str, Any] | None) -> Iterator[str]:
    if dataset is None:
        return
    if "error" in dataset:
        yield f"the dataset cannot be used: {dataset['error']}"
        return
    if dataset["open_by"] and dataset["kind"] == "network":
        pids = ", ".join(map(str, dataset["open_by"][:3]))
        yield (
            f"the dataset lies on {dataset['file_system']} and is open through LMDB here (process {pids}): reads of "
            "other nodes may miss what a writer changes meanwhile. Write first, read afterwards."
        )
    if dataset["index"] is None and not dataset["index_places"]:
        yield (
            "no index is saved, and none can be: neither the dataset's directory nor the cache directory is writable: "
            "each start makes it again. Let the owner run `python -m pario data index` once, or set XDG_CACHE_HOME."
        )


def _about_differences(nodes: list[dict[str, Any]]) -> Iterator[str]:
    first = nodes[0]
    for node in nodes[1:]:
        where = f"node {node['node']} ({node['name']})"
        other = [
            f"{k} {v} against {first['versions'][k]}" for k, v in node["versions"].items() if v != first["versions"][k]
        ]
        if other:
            yield f"{where} has other versions than node 0: {', '.join(other)}. Use one environment on all nodes."
        mine, theirs = node["dataset"] or {}, first["dataset"] or {}
        if any(mine.get(k) != theirs.get(k) for k in ("bytes", "transaction")) and not {"error"} & {*mine, *theirs}:
            yield f"{where} sees another file than node 0: bring the copies up to date."


# -- words ---------------------------------------------------------------------------------------------------------


def _words(report: dict[str, Any], path: str | None) -> str:
    nodes = report["nodes"]
    first = nodes[0]
    rows = [("versions", ", ".join(f"{k} {v}" for k, v in report["versions"].items()))]
    found = report["launcher"]
    rows.append(("launcher", f"{found['name']} ({found['where']})" if found else "none: one process"))
    mpi = report["mpi"]
    if mpi:
        level = f"thread level {mpi['thread_level']} (pario needs FUNNELED)"
        rows.append(("MPI", f"{report['mpi_library']}; {level}"))
    else:
        missing = f"mpi4py finds no library ({report.get('mpi_missing', '').partition(chr(10))[0]})"
        rows.append(("MPI", f"not started; {report['mpi_library'] or missing}"))
        if report["mpiexec"]:
            rows.append(("mpiexec", f"{report['mpiexec']['place']} ({report['mpiexec']['family'] or 'unknown'})"))
    if mpi or report["ranks"] > 1:
        rows.append(("ranks", f"{counted(report['ranks'], 'rank')} on {counted(len(nodes), 'node')}"))
    rows += _node_rows(first, report["wants"])
    rows += _dataset_rows(first["dataset"])
    lines = [f"  {name:<14}  {text}" for name, text in rows]
    lines += [_difference(node, first, report["wants"]) for node in nodes[1:]]
    lines.append("")
    if report["advice"]:
        lines += [f"! {text}" for text in report["advice"]]
    else:
        lines.append("Nothing is off." if path else "Nothing is off. With a PATH it looks at a dataset, too.")
    return "\n".join(lines)


def _node_rows(node: dict[str, Any], wants: dict[str, int]) -> list[tuple[str, str]]:
    """Describe a node; equal nodes have equal rows."""
    options = Options()
    counts = sorted({len(rank["cores"]) for rank in node["ranks"]})
    allowed = str(counts[0]) if len(counts) == 1 else f"{counts[0]} to {counts[-1]}"
    together = len({core for rank in node["ranks"] for core in rank["cores"]})
    quota = "" if node["core_quota"] is None else f", {node['core_quota']:g} by quota"
    everyones = [rank["cores"] for rank in node["ranks"]]
    decoding = min(fair_threads(cores, everyones) for cores in everyones)
    total, available = node["memory"]
    kernels = node["kernels"]
    state = (
        f"{kernels['compiled']} compiled"
        if kernels["compiled"]
        else "none compiled yet: the first start takes a minute"
    )
    ring = (
        f'pario\'s ring wants {decimal_bytes(wants["ring"])}, with shuffle="block" {decimal_bytes(wants["block_ring"])}'
    )
    index = f", the index {decimal_bytes(wants['index'])}" if wants["index"] else ""
    return [
        (
            "cores",
            f"{together} of {node['machine_cores']}{quota} for {counted(len(node['ranks']), 'rank')}, {allowed} each",
        ),
        (
            "threads",
            f"as many for reading as keep the storage busy, up to {options.inflight_bounds[1]} on 1 rank per node "
            f"(they wait for it), {decoding} per rank for decoders of images and functions",
        ),
        ("memory", f"{decimal_bytes(total)}, of it {decimal_bytes(available)} available"),
        ("", ring + index),
        ("kernels", f"{kernels['place']} ({kernels['file_system']}), {state}"),
        *(("tier", _tier_words(tier)) for tier in node["tiers"]),
    ]


def _tier_words(tier: dict[str, Any]) -> str:
    where = f"{tier['where']} ({tier['file_system']})" if "file_system" in tier else tier["where"]
    if "service" in tier:
        return f"{where}, {tier['service'] or 'not found'}"
    return f"{where}, quota {tier['quota'] or 'unknown'}, {decimal_bytes(tier['free'])} free"


def _dataset_rows(dataset: dict[str, Any] | None) -> list[tuple[str, str]]:
    if dataset is None:
        return []
    if "path" not in dataset or "bytes" not in dataset:
        return [("dataset", "cannot be used (see below)")]
    mode = ", mounted read-only" if dataset["readonly"] else ""
    kind = {"local": "a local disk", "memory": "in memory"}.get(dataset["kind"], dataset["kind"])
    lock = "no lock file" if dataset["lock_file"] is None else "a lock file is there"
    if dataset["open_by"]:
        lock += f", open through LMDB by process {', '.join(map(str, dataset['open_by']))}"
    if dataset["index"]:
        index = f"saved as {dataset['index']}"
    elif dataset["index_places"]:
        index = f"made at the first start and saved as {dataset['index_places'][0]}"
    else:
        index = "made at every start; it cannot be saved"
    size = f"{decimal_bytes(dataset['bytes'])}, {counted(dataset['records'], 'entry', 'entries')}"
    reading = (
        f"1 rank per node, as many reads of up to {decimal_bytes(READ_BYTES)} in flight as "
        "keep the storage busy, through the page cache; no lock is taken"
    )
    return [
        ("dataset", f"{dataset['path']}, {size}; {lock}"),
        ("file system", f"{dataset['file_system']} ({kind}) at {dataset['mounted_at']}{mode}"),
        ("reading", reading),
        ("index", index),
    ]


def _difference(node: dict[str, Any], first: dict[str, Any], wants: dict[str, int]) -> str:
    """One line for another node: its differences to the first."""
    head = f"  {'node ' + str(node['node']):<14}  {node['name']}, ranks {_ranges([r['rank'] for r in node['ranks']])}"
    there = [*_node_rows(first, wants), *_dataset_rows(first["dataset"])]
    here = [*_node_rows(node, wants), *_dataset_rows(node["dataset"])]
    differing = [f"{name} {text}" for name, text in here if (name, text) not in there and name != "memory"]
    return f"{head}: {'; '.join(differing) or 'as node 0'}"


def _ranges(numbers: list[int]) -> str:
    """[0, 1, 2, 5] -> "0-2, 5"."""
    runs = groupby(enumerate(numbers), lambda pair: pair[1] - pair[0])
    parts = [[n for _, n in run] for _, run in runs]
    return ", ".join(f"{p[0]}-{p[-1]}" if len(p) > 1 else str(p[0]) for p in parts)
