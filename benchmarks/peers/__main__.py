"""pario beside other loaders, from an empty environment to the page.

    python -m benchmarks.peers --out DIR       everything: installs, writes, checks, measures, fills the page
    python -m benchmarks.peers --out DIR --part speed --limit 280     goes on where it stopped, for at most so long
    python -m benchmarks.peers --smoke         what is installed here beside pario, small sets, no page: does it run?

Starts with any Python 3.10 or newer; `pip` finds the rest. FFCV compiles: its Debian packages are in table.py. The slow
store needs root and FUSE. DIR must lie on the disk that is to be measured and takes about 12 GB with all environments.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from benchmarks.peers import environments
from benchmarks.peers.table import variants

PARTS = ("install", "write", "check", "speed", "behaviour", "fill")
#: of --smoke: its parts, and what has to be installed here (module -> distribution)
SMOKE_PARTS = ("check", "speed")
SMOKE_NEEDS = {"lmdb": "lmdb", "numpy": "numpy", "PIL": "pillow", "sklearn": "scikit-learn"}


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.peers", description=__doc__.split("\n")[0])
    parser.add_argument("--out", help="folder for environments, sets and results")
    parser.add_argument("--part", action="append", choices=PARTS, help="may be given several times; all by default")
    parser.add_argument("--only", help="peers or variants, with commas: pario:global,ffcv")
    parser.add_argument(
        "--cells", default="", help="only those whose names begin so, with commas: 3k/warm,jpeg/cold/1x1"
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--limit", type=float, default=1e9, help="seconds: start no turn after that")
    parser.add_argument("--smoke", action="store_true")
    options = parser.parse_args()
    if options.smoke == bool(options.out):
        parser.error("give either --out DIR or --smoke")
    root, parts = environments.ROOT, options.part or list(PARTS)
    if options.smoke:
        if not set(options.part or ()) <= set(SMOKE_PARTS):
            parser.error(f"--smoke has the parts {' and '.join(SMOKE_PARTS)}")
        missing = [pip for name, pip in SMOKE_NEEDS.items() if importlib.util.find_spec(name) is None]
        if missing:
            parser.error(f"--smoke reads with what is installed here: pip install {' '.join(missing)}")
        with tempfile.TemporaryDirectory(prefix="pario-peers-") as folder:
            command = [sys.executable, "-m", "benchmarks.peers.command", folder, *(options.part or SMOKE_PARTS)]
            command += ["--smoke", "--limit", str(options.limit), "--cells", options.cells]
            command += ["--only", options.only] if options.only else []
            return subprocess.run(command, cwd=root, check=False, timeout=300).returncode
    out = Path(options.out).absolute()
    if "install" in parts:
        only = None if options.only is None else [one.peer.module for one in variants(options.only.split(","))]
        environments.install(out, only)
        parts = [part for part in parts if part != "install"]
    command = [environments.own_python(out), "-m", "benchmarks.peers.command", str(out), *parts]
    command += ["--rounds", str(options.rounds), "--limit", str(options.limit), "--cells", options.cells]
    command += ["--only", options.only] if options.only else []
    return subprocess.run(command, cwd=root, check=False).returncode if parts else 0


if __name__ == "__main__":
    os.environ.setdefault("PIP_ROOT_USER_ACTION", "ignore")
    sys.exit(main())
