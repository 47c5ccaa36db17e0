"""The published LMDBs on 1, 2 and 3 ranks, in all orders: at most two lines for each after `import pario`, every sample
once, equal to what py-lmdb and pickle, json or OpenCV make of it. Each rank of a job runs `main`."""

from __future__ import annotations

import gzip
import json
import os
import pickle
import shutil
import sys
from itertools import chain
from pathlib import Path

import layouts
import pytest
from launch import run_job
from layouts import Layout, bgr, records, whole
from shared_data import files, need

TESTS = Path(__file__).resolve().parent.parent
PICTURES = (
    'import cv2, numpy as np\nloader = pario.Loader("x", 64, pario.decode.Function(lambda value: '
    'cv2.imdecode(np.frombuffer(value, "u1"), cv2.IMREAD_COLOR), ragged="list"), shuffle="global")'
)
MOLECULES = 'loader = pario.Loader("x", 64, pario.decode.preset("atom3d"), shuffle="global")'
PLAIN = 'loader = pario.Loader("x", 64, pario.decode.Pickle(allow=[]), shuffle="global")'
#: pickles of objects of torch or pymatgen, which are not installed here: their bytes
OTHERS = 'loader = pario.Loader("x", 64, lambda value: {"data": value}, shuffle="global")'
FILES = [path for path in files("wild", "*") if path != Path()]


def layout_of(path: Path) -> Layout:
    if path.suffix == ".mdb" and "atom3d" in path.name:
        lines, truth = MOLECULES, whole(lambda value: json.loads(gzip.decompress(value)), *layouts.ATOM3D_META)
    elif path.suffix == ".mdb":
        lines, truth = PICTURES, records(bgr)
    elif any(name in path.name for name in ("alexandria", "carolina", "nomad", "oqmd")):
        lines, truth = PLAIN, whole(pickle.loads)
    else:
        lines, truth = OTHERS, records(bytes)
    return Layout(path.name, "", "", lines, lambda: {"x": []}, truth, subdir=False)


def main(folder: Path) -> None:
    from mpi4py import MPI

    world = MPI.COMM_WORLD
    for path in FILES:
        mine = folder / path.name
        if world.rank == 0:  # a copy, so that no index is saved beside the published file
            mine.mkdir()
            shutil.copyfile(path, mine / "x")
        world.Barrier()
        os.chdir(mine)
        layout = layout_of(path)
        assert layouts.lines_of(layout) <= 3
        right = layouts.truth(layout, mine)
        for shuffle in (False, "global", "block"):
            with layouts.load(layout, shuffle) as loader:
                batches = [layouts.check(batch, right) for batch in loader]
            everyones = world.allgather(batches)
            assert len({len(theirs) for theirs in everyones}) == 1
            assert sorted(chain.from_iterable(chain.from_iterable(everyones))) == sorted(right), (path, shuffle)
            if world.rank == 0:
                print(f"{path.name}, {shuffle}: read by {world.size}", flush=True)


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_every_sample_once_and_right(tmp_path: Path, ranks: int) -> None:
    need(FILES[0] if FILES else Path())
    found = os.pathsep.join(filter(None, [str(TESTS), str(TESTS.parent), os.environ.get("PYTHONPATH", "")]))
    job = run_job(ranks, [__file__, str(tmp_path)], limit_s=120, env={"PYTHONPATH": found})
    assert job.status == 0, job.output
    assert job.output.count(f": read by {ranks}\n") == 3 * len(FILES), job.output


if __name__ == "__main__":
    main(Path(sys.argv[1]))
