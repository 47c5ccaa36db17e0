"""What happens when something goes wrong, measured: runs the tests of failures, writes measurements/failures.md.

    python -m benchmarks.failures                 3 runs of every test, as root; about 20 minutes
    python -m benchmarks.failures --runs 1 --only "killed"

Every row is a test of tests/test_failures.py or tests/system/test_failures_of_the_machine.py, which also asserts it.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.marked import fill_marked

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "measurements" / "failures.md"
TESTS = ("tests/test_failures.py", "tests/system/test_failures_of_the_machine.py")


def table(rows: list[dict[str, Any]]) -> str:
    """One line per thing that goes wrong, in the order of the tests."""
    cases: dict[tuple[str, str, str], list[dict[str, Any]]] = {}
    for row in rows:
        cases.setdefault((row["what"], row["when"], row["happens"]), []).append(row)
    lines = [
        "| what goes wrong | when | what happens | on every rank after | job ended after | left behind |",
        "|---|---|---|---|---|---|",
    ]
    for (what, when, happens), of_case in cases.items():
        left = sorted({name for row in of_case for name in row["left"]})
        cells = [what, when, happens, _seconds(of_case, "error_s"), _seconds(of_case, "end_s")]
        lines.append(f"| {' | '.join([*cells, ', '.join(left) or 'nothing'])} |")
    runs = sorted({len(of_case) for of_case in cases.values()})
    lines += [
        "",
        f"Seconds after the harm, median (min … max) of {' to '.join(map(str, runs[:1] + runs[1:][-1:]))} runs; ",
    ]
    lines[-1] += f"{os.cpu_count()} cores, Linux {platform.release()}, `alive_seconds` of 1."
    return "\n".join(lines)


def _seconds(rows: list[dict[str, Any]], name: str) -> str:
    values = [row[name] for row in rows if row.get(name) is not None]
    if not values:
        return ""
    return f"{statistics.median(values):.1f} ({min(values):.1f} … {max(values):.1f})"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--only", default="", help="as pytest's -k")
    parser.add_argument("--rows", help="a file of rows that were measured already")
    parser.add_argument("--keep", help="keep the rows in this file")
    given = parser.parse_args()
    if given.rows:
        rows = [json.loads(line) for line in Path(given.rows).read_text().splitlines()]
    else:
        with tempfile.NamedTemporaryFile("r", suffix=".json") as file:
            env = {**os.environ, "PARIO_FAILURES_JSON": file.name, "PARIO_REQUIRE_SYSTEM": "1"}
            for _ in range(given.runs):
                words = [sys.executable, "-m", "pytest", "-q", "-m", "", "-k", given.only, *TESTS]
                if subprocess.run(words, cwd=ROOT, env=env, check=False).returncode:
                    return 1
            lines = file.readlines()
        if given.keep:
            Path(given.keep).write_text("".join(lines))
        rows = [json.loads(line) for line in lines]
    PAGE.write_text(fill_marked(PAGE.read_text(), "failures", {"": table(rows)}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
