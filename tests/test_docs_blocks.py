"""Every code block of the README, docs/ and measurements/ runs, or a table of docs_blocks.py says where it does."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import docs_sets
import pytest
from docs_blocks import ELSEWHERE, FORM, PARSED, ROOT, blocks, elsewhere, pages
from docs_shim import COMMANDS
from required import framework

pytest.importorskip("click")

#: Python alone, of a second or two each
QUICK = ["docs/order.md", "docs/tuning.md"]
CODE = [page for page in pages() if any(block.language for block in blocks(page))]
TORCH = [page for page in CODE if any(block.needs_torch and not elsewhere(block) for block in blocks(page))]
DRIVER = ROOT / "tests" / "docs_page.py"


def run_page(page: str, folder: Path, *options: str) -> list[str]:
    """The lines of the driver, one or two per block."""
    done = subprocess.run(
        [sys.executable, str(DRIVER), page, str(folder), *options],
        capture_output=True,
        text=True,
        timeout=500,
        check=False,
        env={**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}"},
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    lines: list[str] = re.findall(rf"(?m)^{re.escape(page)}:\d+ .*$", done.stdout)
    return lines


def check_page(page: str, folder: Path) -> None:
    lines = run_page(page, folder)
    ran = {line.removesuffix(" ran") for line in lines if line.endswith(" ran")}
    due = {
        f"{page}:{block.line}"
        for block in blocks(page)
        if block.language and not block.needs_torch and elsewhere(block) is None
    }
    assert ran == due


@pytest.mark.parametrize("page", QUICK)
def test_blocks_run(page: str, tmp_path: Path) -> None:
    check_page(page, tmp_path)


@pytest.mark.full
@pytest.mark.parametrize("page", [page for page in CODE if page not in QUICK])
def test_blocks_of_all_pages_run(page: str, tmp_path: Path) -> None:
    check_page(page, tmp_path)


@pytest.mark.frameworks
@pytest.mark.parametrize("page", TORCH)
def test_blocks_with_torch_run(page: str, tmp_path: Path) -> None:
    framework("torch")
    ran = [line for line in run_page(page, tmp_path, "--torch") if line.endswith(" ran")]
    assert len(ran) == sum(block.needs_torch and not elsewhere(block) for block in blocks(page))


def test_a_block_is_run_or_named_in_a_table() -> None:
    """Only these languages; what looks like a command or a program has one."""
    command = re.compile(r"(?:python3? -m|pip install|mpiexec|srun|import|from \w+ import) .*")
    for page in pages():
        for block in blocks(page):
            assert block.language in ("", "bash", "python", "toml", "yaml"), f"{page}:{block.line}"
            if not block.language:
                assert not [line for line in block.text.splitlines() if command.fullmatch(line)], f"{page}:{block.line}"


def test_tables_name_what_is_there() -> None:
    """An entry that fits no block, or a test that is gone, would be a silent hole."""
    begun = {**ELSEWHERE, **docs_sets.BEFORE, **docs_sets.AFTER, **docs_sets.RANKS}
    for page, begins in begun:
        found = [block for block in blocks(page) if block.text.startswith(begins)]
        assert len(found) == 1, f"{page}: {begins}: {len(found)} blocks"
    assert set(docs_sets.SETS) | set(docs_sets.ENVIRONMENT) <= set(CODE)
    for reason in (*ELSEWHERE.values(), *PARSED.values(), *FORM.values()):
        for file in re.findall(r"tests/[\w/]+\.py", reason):
            assert (ROOT / file).exists(), file
    stages = (ROOT / ".ci" / "run").read_text()
    for where in ELSEWHERE.values():
        stage = re.fullmatch(r"\.ci/run: (.*)", where)
        assert (f'stage "{stage[1]}"' in stages) if stage else (ROOT / where).exists(), where
    bash = "\n".join(block.text for page in CODE for block in blocks(page) if block.language == "bash")
    for command in PARSED:
        assert command in bash, command
    assert set(FORM) <= set(COMMANDS)


def test_a_wrong_command_of_a_page_is_noticed(tmp_path: Path) -> None:
    """What is only parsed, and what is only checked for its form."""
    shim = [sys.executable, str(ROOT / "tests" / "docs_shim.py")]
    env = {**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}"}

    def status(*words: str) -> int:
        return subprocess.run(
            [*shim, *words], capture_output=True, timeout=60, check=False, env=env, cwd=tmp_path
        ).returncode

    right = {
        ("python", "-m", "benchmarks.micro", "threads", "--order", "shuffled"): ("shuffled", "random"),
        ("pip", "install", ".[cli,mpich]"): (".[cli,mpich]", ".[cly,mpich]"),
    }
    for words, (old, new) in right.items():
        assert status(*words) == 0
        assert status(*(new if word == words[-1] else word for word in words)) != 0, (old, new)
    assert status("srun", "--nodess=2", "true") != 0
