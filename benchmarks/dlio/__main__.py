"""DLIO with pario beside DLIO's own readers, from an empty environment.

    python -m benchmarks.dlio --out DIR               makes DIR/venv, installs DLIO and this checkout there, measures
    python -m benchmarks.dlio --out DIR --smoke       tiny data: does every sample come once, with its bytes?
    python -m benchmarks.dlio --out DIR --here        in this environment, which has what is needed
    python -m benchmarks.dlio --out DIR --fill measurements/dlio.md    only fills the page from DIR/dlio.json

Without --here it needs nothing but Python 3.10 to 3.13 with pip. Measuring needs root, fuse3 and an idle machine. What
has been measured is in DIR/dlio.json after each run; a further call goes on from there, --seconds says when to stop.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import venv
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]

#: DLIO's wheel asks for TensorFlow, DALI and older versions of everything: what it really uses is named here.
NEEDS = ["numpy", "mpi4py", "mpich", "hydra-core", "omegaconf", "pandas", "psutil", "h5py", "Pillow", "PyYAML", "lmdb"]
TORCH = "torch==2.13.0"  # a version with a build for the CPU
DLIO = ["dlio_benchmark==2.0.0", "pydftracer==1.0.2"]


def install(folder: Path) -> Path:
    """The interpreter of an environment with DLIO and this checkout; made if it is missing."""
    python = folder / "bin" / "python"
    done = folder / "installed"
    if not done.exists():
        venv.create(folder, with_pip=True, clear=True)
        for words in ([TORCH], NEEDS, ["--no-deps", *DLIO], ["-e", f"{ROOT}[mpich,latency-store]"]):
            subprocess.run([python, "-m", "pip", "install", "-q", *words], check=True)
        done.touch()
    return python


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.dlio", description=__doc__.split("\n")[0])
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="on the disk that is to be measured")
    parser.add_argument("--smoke", action="store_true", help="tiny data, nothing measured; DIR must be empty")
    parser.add_argument("--here", action="store_true", help="use this environment instead of making one")
    parser.add_argument("--only", default="disk,large,slow,checkpoint", help="parts to measure (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=1e9, help="begin no run after this time")
    parser.add_argument("--fill", action="append", type=Path, metavar="PAGE", help="measure nothing: fill this page")
    options = parser.parse_args()
    out = options.out.absolute()
    out.mkdir(parents=True, exist_ok=True)
    if not (options.here or options.fill):
        python = install(out / "venv")
        words = [str(python), "-m", "benchmarks.dlio", *sys.argv[1:], "--here"]
        return subprocess.run(words, cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)}, check=False).returncode
    if options.smoke:
        from benchmarks.dlio.smoke import smoke

        smoke(out)
        return 0
    from benchmarks.dlio import study

    if not options.fill:
        study.measure(out, options.only.split(","), options.rounds, options.seconds)
    return study.publish(out / "dlio.json", options.fill or [])


if __name__ == "__main__":
    sys.exit(main())
