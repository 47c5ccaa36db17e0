"""The code blocks of README.md, docs/*.md and measurements/*.md, and how each is tested (tests/test_docs_blocks.py).

A page's blocks run in order, in one folder, Python in one namespace (docs_page.py). `docs_sets.py` makes what a page
takes for granted. Paths below /scratch, /local, /data, /mnt, /run and /tmp are moved into that folder. In bash the
commands are those of docs_shim.py: python and pario are the real ones, mpiexec starts two ranks at most.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cache
from pathlib import Path

__all__ = ["ELSEWHERE", "PARSED", "ROOT", "Block", "blocks", "elsewhere", "pages"]

ROOT = Path(__file__).resolve().parent.parent

#: Blocks that another test or CI runs: (page, how the block begins) -> where.
ELSEWHERE = {
    ("README.md", 'python3 -m venv .venv && .venv/bin/pip install -q ".[demo'): ".ci/run: README: the demo",
    ("README.md", "python3 -m venv .venv && .venv/bin/pip install -q -e"): ".ci/run: README: the tests",
    ("docs/checkpoints.md", "python -m pario checkpoint export"): "tests/test_frameworks_checkpoint.py",
    ("measurements/checkpoints.md", "PARIO_KILLS=100 python -m pytest"): ".ci/run: all other tests",
    ("docs/clusters.md", "python packaging/check.py"): ".ci/run: packages to publish",
    ("measurements/dlio.md", "pip install torch numpy"): ".ci/run: DLIO",
    ("measurements/dlio.md", "framework: pytorch"): "tests/test_dlio.py",
    ("docs/pytorch.md", '"""PyTorch:'): "tests/test_adapters_torch.py",
    ("docs/pytorch.md", '"""Lightning:'): "tests/test_adapters_torch.py",
    ("docs/pytorch.md", '"""Accelerate:'): "tests/test_adapters_torch.py",
    ("docs/pytorch.md", "class Fed(transformers.Trainer)"): "tests/test_frameworks.py",
    ("docs/pytorch.md", '"""JAX:'): "tests/test_frameworks.py",
    ("docs/pytorch.md", '"""TensorFlow:'): "tests/test_frameworks.py",
    ("docs/replace-py-lmdb.md", "db = ase.db.connect"): "tests/test_lmdb_wild.py",
}

#: Commands that a block starts and that are not run there: their own parsers read the arguments, and no more happens.
PARSED = {
    "python -m benchmarks.": "minutes to hours; .ci/run starts them with --smoke; tests/test_bench_micro.py",
    "python -m pario files mount": "needs FUSE; tests/system/test_files_mount.py",
    "python -m pario files view": "needs a kernel that allows it; tests/test_files_view.py",
    "python -m pario plane": "needs other nodes; tests/test_plane_plane.py",
}

#: Commands of which only the arguments are checked: no test machine has the program.
FORM = {
    "srun": "two ranks or one of mpiexec run what it starts; tests/system/test_slurm.py has a Slurm",
    "sbatch": "bash reads the script; tests/system/test_slurm.py submits it",
    "pip": "the extras exist; .ci/run installs them",
    "torchrun": "one process runs what it starts",
    "apptainer": "not at hand",
    "docker": "not at hand",
}


@dataclass(frozen=True)
class Block:
    """page : relative to the root; line : of its first line; name : the file that it is, "" if it is none"""

    page: str
    line: int
    language: str
    name: str
    text: str

    @property
    def needs_torch(self) -> bool:
        return re.search(r"(\b|_)torch\b", self.text) is not None


def pages() -> list[str]:
    found = [*sorted((ROOT / "docs").glob("*.md")), *sorted((ROOT / "measurements").glob("*.md"))]
    return ["README.md", *(str(path.relative_to(ROOT)) for path in found)]


@cache
def blocks(page: str) -> tuple[Block, ...]:
    """All fenced blocks with a language, in order. Raises ValueError for a fence that does not end."""
    found: list[Block] = []
    lines = (ROOT / page).read_text().splitlines()
    at = 0
    while at < len(lines):
        fence = re.fullmatch(r"( *)```([\w{}-]*)", lines[at])
        if fence is None:
            at += 1
            continue
        end = at + 1
        while lines[end] != f"{fence[1]}```":  # IndexError: it does not end
            end += 1
        before = lines[at - 2] if at > 1 and not lines[at - 1] else ""
        named = re.fullmatch(r"`(\w+\.\w+)`:|\[examples/(\w+\.py)\]\([^)]*\).*:", before)
        text = "\n".join(line.removeprefix(fence[1]) for line in lines[at + 1 : end]) + "\n"
        found.append(Block(page, at + 2, fence[2], (named[1] or named[2]) if named else "", text))
        at = end + 1
    return tuple(found)


def elsewhere(block: Block) -> str | None:
    """Where a block is run if not by its page."""
    for (page, begins), where in ELSEWHERE.items():
        if block.page == page and block.text.startswith(begins):
            return where
    return None
