"""The two data sets of the benchmarks: Caffe Datum records of 3 KB and of 197 KB, laid out as Caffe's converter does.

    python -m benchmarks.data DIR [--only 3k|197k] [--records N]

They are made by benchmarks/study/sets.py, which the study of the recipes uses too.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from benchmarks.study import sets
from benchmarks.study.sets import SETS, DataSet, record_digest

__all__ = ["SETS", "DataSet", "make", "record_digest"]


def make(folder: str | Path, which: str, records: int | None = None, log: bool = True) -> DataSet:
    """Make one of `SETS` below `folder`, or return the one that is there; see `benchmarks.study.sets.make`."""
    return sets.make(folder, which, records, (lambda line: print(line, file=sys.stderr)) if log else lambda _: None)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.data", description=__doc__.split("\n")[0])
    parser.add_argument("folder", help="where the sets are written; 3.7 GB for both")
    parser.add_argument("--only", choices=sorted(SETS))
    parser.add_argument("--records", type=int, help="number of records, instead of the frozen workload's")
    options = parser.parse_args(argv)
    for which in [options.only] if options.only else SETS:
        made = make(options.folder, which, options.records)
        print(
            f"{made.path}: {made.records} records of {made.value_bytes} bytes, {made.file_bytes / 1e9:.2f} GB, "
            f"records' pages {made.record_bytes / 1e9:.3f} GB, tree pages {made.tree_pages}"
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
