"""A cold file that the first rank of a node reads from beginning to end while all ranks of the node take its records.
The oracle is what was written. Each node has a file and a loader of its own: the nodes of these tests have one page
cache."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from typing import Any

import lmdb
import numpy as np
import pytest
from cold_file import why_not_cold

import pario
from pario.decode import Raw
from pario.supply import sweep as module
from pario.supply.sweep import KNOB, Sweep

pytestmark = pytest.mark.mpi

N, BYTES = 3000, 3072
#: of the ring, so that it does not bring the whole file before the loop is seen to wait
SMALL: dict[str, Any] = {"tiers": (), "slot_bytes": 64 << 10, "slots": 3, "next_epoch": False}


@pytest.fixture(scope="module")
def node() -> Iterator[Any]:
    """The communicator of this rank's node."""
    from mpi4py import MPI

    comm = MPI.COMM_WORLD.Split_type(MPI.COMM_TYPE_SHARED)
    yield comm
    comm.Free()


@pytest.fixture(scope="module")
def values() -> list[bytes]:
    rng = np.random.default_rng(1)
    return [rng.bytes(BYTES) for _ in range(N)]


@pytest.fixture(scope="module")
def path(node: Any, values: list[bytes], tmp_path_factory: pytest.TempPathFactory) -> Any:
    made = None
    if node.rank == 0:
        made = str(tmp_path_factory.mktemp("sweep") / "x.lmdb")
        with lmdb.open(made, subdir=False, map_size=1 << 26) as env, env.begin(write=True) as txn:
            for i, value in enumerate(values):
                txn.put(b"%06d" % i, value)
    return node.bcast(made)


def loader(path: str, node: Any, **options: Any) -> pario.Loader:
    chosen = pario.Options(**SMALL, **options)
    decoder = Raw(dtype="uint8", shape=(BYTES,))
    return pario.Loader(path, 16, decoder, shuffle="global", seed=3, comm=node, options=chosen)


@pytest.mark.parametrize("own_rows", ["never", "always"])
def test_every_record_once_and_right_while_the_file_is_swept(
    node: Any, path: str, values: list[bytes], monkeypatch: pytest.MonkeyPatch, own_rows: str
) -> None:
    why = node.bcast(why_not_cold(path) if node.rank == 0 else None)
    if why:
        pytest.skip(why)
    monkeypatch.setattr(module, "_WAITS", 0.0)
    monkeypatch.setattr(Sweep, "_measure", lambda self, places: (1.0, 1e-9))
    further, held = threading.Event(), []
    real = Sweep._read

    def read(self: Sweep) -> None:
        """Ends only after the loop has gone on beside it."""
        real(self)
        held.append(further.wait(30))

    monkeypatch.setattr(Sweep, "_read", read)
    with loader(path, node, own_rows=own_rows) as one:
        for epoch in range(2):
            seen: list[int] = []
            for number, batch in enumerate(one):
                for row, i in zip(batch["data"], batch.ids.tolist(), strict=True):
                    assert row.tobytes() == values[i]
                    seen.append(i)
                if number == 20:
                    further.set()
            assert sorted(chain.from_iterable(node.allgather(seen))) == list(range(N)), epoch
        sweep = one._supply._sweep
        if node.rank == 0:
            assert one.stats()["knobs"][KNOB]["value"] == Path(path).stat().st_size
    assert (sweep is None) == (node.rank > 0)
    if sweep is not None:
        assert not sweep._thread.is_alive()
        assert held == [True]


def test_a_file_in_the_page_cache_is_left_alone(node: Any, path: str, values: list[bytes]) -> None:
    if node.rank == 0:
        Path(path).read_bytes()
    node.Barrier()
    with loader(path, node) as one:
        for batch in one:
            assert [row.tobytes() for row in batch["data"]] == [values[i] for i in batch.ids.tolist()]
        assert KNOB not in one.stats()["knobs"]
