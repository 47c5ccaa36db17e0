"""What mypy --strict and pyright say about scripts of users: every planted typo, marked `# typo`, and nothing else.

They need torch, whose types the adapter uses, mypy, and for its half pyright; `-m frameworks` runs them.
"""

from __future__ import annotations

import inspect
import json
import subprocess
import sys
from pathlib import Path

import pytest
from required import framework

import pario
from pario.loader.keywords import Keywords

ROOT = Path(__file__).parents[1]

SCRIPTS = {
    "loop": """
        with pario.Loader("train.lmdb", 64, pario.decode.Datum(), shuffle="global", seed=1) as loader:
            for batch in loader:
                x: np.ndarray = batch["data"]
                print(x.mean(), batch.ids.sum(), batch.epoch + batch.step)
            print(loader.report().sentence)
    """,
    "pairs": """
        def norm(pixels: np.ndarray, labels: np.ndarray) -> float:
            return float(pixels.mean()) + len(labels)

        for x, y in pario.Loader("train.lmdb", 64, pario.decode.Datum()):
            norm(x, y)
            x.meen()  # typo
    """,
    "keyword": """
        pario.Loader("train.lmdb", 64, shufle=True)  # typo
    """,
    "order": """
        pario.Loader("train.lmdb", 64, shuffle="globl")  # typo
    """,
    "attribute": """
        loader = pario.Loader("train.lmdb", 64)
        for batch in loader:
            print(batch.idz)  # typo
    """,
    "name": """
        loader = pario.Lodaer("train.lmdb", 64)  # typo
    """,
    "decoder": """
        loader = pario.Loader("train.lmdb", 64, pario.decode.Datums())  # typo
    """,
    "own_decoder": """
        def decode(value: bytes) -> dict[str, np.ndarray]:
            return {"x": np.frombuffer(value, np.float32)}

        with pario.Loader("train.lmdb", 64, decode, select=b"cat/", on_error="skip") as loader:
            for (x,) in loader:
                print(x.shape, loader.skipped)
    """,
    "options": """
        options = pario.Options(slots=4, inflight="auto", tiers=(pario.Tier("memory", "auto"),), max_bad=3)
        with pario.Loader(["a.lmdb", "b.lmdb"], pario.Budget(bytes=1 << 20), options=options) as loader:
            print(len(loader), loader.keys([0, 1])[0].decode())
    """,
    "option": """
        pario.Options(slotz=4)  # typo
    """,
    "resume": """
        loader = pario.Loader("train.lmdb", 64, shuffle="block", weights=None)
        with pario.Checkpointer(slow="run1") as checkpoints:
            if checkpoints.latest() is not None:
                loader.load_state_dict(checkpoints.restore()["loader"])
            for epoch in range(loader.epoch, 3):
                for step, batch in enumerate(loader):
                    checkpoints.save(step, {"loader": loader.state_dict()})
    """,
    "forgotten_call": """
        loader = pario.Loader("train.lmdb", 64)
        print(loader.epochs)  # typo
    """,
    "mapping": """
        def train(data: np.ndarray, label: np.ndarray) -> None: ...

        for batch in pario.Loader("train.lmdb", 64, pario.decode.Datum()):
            train(**batch)
            print({name: array.dtype for name, array in batch.items()}, dict(batch)["data"].nbytes, "x" in batch)
            print([*batch.keys()], batch.get("y") is None)
    """,
    "reader": """
        with pario.Reader("train.lmdb") as reader:
            for value in reader.read(np.arange(3)):
                print(value.tobytes())
    """,
    "torch_loop": """
        from pario.adapters.torch import Loader

        def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            return (x.float().mean() - y).sum()

        with Loader("train.lmdb", 64, pario.decode.Datum(), shuffle="global", device="cuda", ids="i") as loader:
            for batch in loader:
                step(batch["data"], batch["label"]).backward()
            print(loader.report(all_ranks=True).total, loader.stats()["bad"], loader.records, loader.taken)
            plain: pario.Loader[dict[str, torch.Tensor]] = loader
    """,
    "torch_pairs": """
        from pario.adapters.torch import Loader

        for x, y in Loader("train.lmdb", 64, pario.decode.Datum(), form="tuple", drop_last=True):
            torch.nn.functional.cross_entropy(x, y).backward()
            x.flot()  # typo
    """,
    "torch_form": """
        from pario.adapters.torch import Loader

        def pair(tensors: dict[str, torch.Tensor]) -> tuple[torch.Tensor, int]:
            return tensors["data"], len(tensors)

        def epoch(loader: Loader[tuple[torch.Tensor, int]]) -> int:
            return sum(count for _, count in loader)

        epoch(Loader("train.lmdb", 64, pario.decode.Datum(), form=pair))
        epoch(Loader("train.lmdb", 64, pario.decode.Datum()))  # typo
    """,
    "torch_keyword": """
        from pario.adapters.torch import Loader

        Loader("train.lmdb", 64, num_wrokers=3)  # typo
    """,
    "torch_method": """
        from pario.adapters.torch import Checkpointer, Loader

        loader = Loader("train.lmdb", 64, pario.decode.Datum(), seed=3)
        loader.set_epoch(3)
        with Checkpointer(slow="run1") as checkpoints:
            checkpoints.save(3, {"train": loader.state_dict()})
        print(loader.skiped)  # typo
    """,
    "py_lmdb": """
        import pario.lmdb as lmdb

        with lmdb.open("train.lmdb", readonly=True, lock=False) as env, env.begin() as txn:
            print(txn.get(b"key"), txn.stat()["entries"])
    """,
}


@pytest.fixture(scope="module")
def scripts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    framework("torch")
    folder = tmp_path_factory.mktemp("scripts")
    for name, text in SCRIPTS.items():
        imports = [f"import {module}\n" for module in ("numpy as np", "torch") if f"{module.split()[-1]}." in text]
        (folder / f"{name}.py").write_text("".join(imports) + "import pario\n" + inspect.cleandoc(text) + "\n")
    return folder


def planted(folder: Path) -> set[tuple[str, int]]:
    return {
        (path.name, number)
        for path in folder.glob("*.py")
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if line.endswith("# typo")
    }


def test_there_are_twenty_scripts_and_ten_typos() -> None:
    assert len(SCRIPTS) == 20
    assert sum(text.count("# typo") for text in SCRIPTS.values()) >= 10


def test_the_keywords_are_those_of_the_loader() -> None:
    """Names, types and that all may be left out; the adapter passes them on."""
    given = inspect.signature(pario.Loader.__init__).parameters.values()
    ours = {each.name: each.annotation for each in given if each.kind is each.KEYWORD_ONLY}
    told = {name: getattr(kind, "__forward_arg__", kind) for name, kind in Keywords.__annotations__.items()}
    assert told == ours
    assert not Keywords.__required_keys__


@pytest.mark.frameworks
def test_mypy_finds_every_typo_and_nothing_else(scripts: Path) -> None:
    framework("mypy")
    # Silent: what else mypy finds in pario, where it is no installed package, is told by the project's own run.
    words = ["--strict", "--follow-imports=silent", "--untyped-calls-exclude=torch"]
    words += ["--cache-dir", str(scripts / "cache"), str(scripts)]
    done = subprocess.run([sys.executable, "-m", "mypy", *words], cwd=ROOT, capture_output=True, text=True, timeout=300)
    lines = [line.split(":") for line in done.stdout.splitlines() if ": error:" in line]
    assert {(Path(line[0]).name, int(line[1])) for line in lines} == planted(scripts), done.stdout + done.stderr


@pytest.mark.frameworks
def test_pyright_finds_every_typo_and_nothing_else(scripts: Path) -> None:
    framework("pyright")
    (scripts / "pyrightconfig.json").write_text(json.dumps({"extraPaths": [str(ROOT)]}))
    words = ["--outputjson", "--pythonpath", sys.executable, "-p", str(scripts)]
    done = subprocess.run([sys.executable, "-m", "pyright", *words], capture_output=True, text=True, timeout=300)
    said = json.loads(done.stdout)["generalDiagnostics"]
    found = {(Path(each["file"]).name, each["range"]["start"]["line"] + 1) for each in said}
    assert found == planted(scripts), done.stdout + done.stderr
