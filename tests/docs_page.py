"""Runs the code blocks of one page: python docs_page.py PAGE FOLDER [--torch]; prints a line per block.

With --torch: the blocks that need PyTorch, else all others (docs_blocks.py).
"""

from __future__ import annotations

import ast
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import docs_shim
from docs_blocks import ROOT, Block, blocks, elsewhere
from docs_sets import AFTER, BEFORE, ENVIRONMENT, RANKS, SETS, common
from launch import run_job

LIMIT_S = 200
_MOVED = re.compile(r"(?<![\w.$}])/(?=(?:scratch|local|data|mnt|run|tmp)\b)")
_EXPORTS = re.compile(r"(?:export \S+.*|mkdir .*|#.*|)")


def main(page: str, folder: Path, torch: bool) -> int:
    os.chdir(folder)
    docs_shim.place(folder / "commands")
    os.environ |= {
        "HOME": str(folder),
        "PATH": f"{folder / 'commands'}:{os.environ['PATH']}",
        "PYTHONPATH": str(ROOT),
        "XDG_CACHE_HOME": str(folder / "cache"),
        **ENVIRONMENT.get(page, {}),
    }
    names = common(folder)
    names |= SETS.get(page, lambda _: {})(folder)
    for block in blocks(page):
        if not block.language:  # what a program prints, or a drawing
            continue
        where = elsewhere(block)
        if where is None and block.needs_torch != torch:
            where = "" if torch else "with --torch"
        if where is not None:
            if where:
                print(f"{page}:{block.line} {where}", flush=True)
            continue
        print(f"{page}:{block.line} ...", flush=True)
        for when in (BEFORE, AFTER):
            if when is AFTER:
                run(block, folder, names)
            for (of, begins), step in when.items():
                if of == page and block.text.startswith(begins):
                    step(folder, names)
        print(f"{page}:{block.line} ran", flush=True)
    return 0


def run(block: Block, folder: Path, names: dict[str, Any]) -> None:
    text = _MOVED.sub(f"{folder}/", block.text)
    if block.language == "toml":
        (folder / "rules.toml").write_text(text)
    elif block.language == "bash":
        bash(text, folder)
    elif block.name:
        ast.parse(text)
        (folder / block.name).write_text(text)  # a later block starts it
    else:
        text = text.replace('device="cuda"', 'device="cpu"')
        ranks = [n for (page, begins), n in RANKS.items() if page == block.page and text.startswith(begins)]
        if ranks:
            (folder / "block.py").write_text(text)
            job = run_job(ranks[0], ["block.py"], limit_s=LIMIT_S)
            assert job.status == 0, job.output
            return
        code = compile("\n" * (block.line - 1) + text, str(ROOT / block.page), "exec")
        exec(code, names)


def bash(text: str, folder: Path) -> None:
    """In a process group of its own, so that what it leaves in the background ends with it."""
    if all(_EXPORTS.fullmatch(line) for line in text.splitlines()):
        text += "\npython train.py\n"  # what is exported must suit a job
    started = subprocess.Popen(["bash", "-euo", "pipefail", "-c", text], cwd=folder, start_new_session=True)
    try:
        status = started.wait(LIMIT_S)
    finally:
        for number in (signal.SIGINT, signal.SIGKILL):
            try:
                os.killpg(started.pid, number)
            except ProcessLookupError:
                break
    assert status == 0, f"status {status}"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], Path(sys.argv[2]), "--torch" in sys.argv[3:]))
