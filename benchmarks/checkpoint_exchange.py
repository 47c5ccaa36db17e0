"""Checkpoints to others and from others, beside their own writers, for the shapes of five models.

    python -m benchmarks.checkpoint_exchange FOLDER [--rounds 5] [--only NAME ...]

Each round writes, in turns: pario's export of a checkpoint to safetensors and `safetensors.torch.save_file` of the
same tensors in memory; pario's export for torch.distributed.checkpoint and `torch.distributed.checkpoint.save`. Ours
reads the checkpoint past the page cache, checks it, and writes; theirs has the tensors. So theirs is also given with
the seconds of a `restore` before it, which is the same work. All files are synced. After the first round what was
written is loaded by the other side's own loader, and imported and restored, bit by bit. The bar is ours / theirs <=
1.2. The last line has the most memory of an export and of an import, each by a process of its own, less that for a
model of no size. Needs torch and safetensors.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import subprocess
import sys
import time
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file, save_file

from benchmarks.measure import interleave, told
from pario.adapters.dcp import Dcp, to_dcp
from pario.adapters.torch import Checkpointer
from pario.checkpoint.exchange import SafeTensors, bring, opened_at, to_safetensors

Shapes = dict[str, tuple[int, ...]]


def encoder(layers: int, width: int, inner: int, more: Shapes) -> Shapes:
    """A transformer with biases, as BERT, GPT-2 and ViT have them."""
    made = dict(more)
    for k in range(layers):
        for name, shape in {"qkv": (3 * width, width), "out": (width, width), "up": (inner, width)}.items():
            made |= {f"h.{k}.{name}.weight": shape, f"h.{k}.{name}.bias": shape[:1]}
        made |= {f"h.{k}.down.weight": (width, inner), f"h.{k}.down.bias": (width,)}
        made |= {f"h.{k}.norm{n}.{what}": (width,) for n in (1, 2) for what in ("weight", "bias")}
    return made


def llama(layers: int, width: int, inner: int, groups: int, words: int) -> Shapes:
    made: Shapes = {"embed_tokens.weight": (words, width), "lm_head.weight": (words, width), "norm.weight": (width,)}
    for k in range(layers):
        made |= {f"layers.{k}.{name}_proj.weight": (width, width) for name in "qo"}
        made |= {f"layers.{k}.{name}_proj.weight": (groups, width) for name in "kv"}
        made |= {f"layers.{k}.{name}_proj.weight": (inner, width) for name in ("gate", "up")}
        made |= {f"layers.{k}.down_proj.weight": (width, inner)}
        made |= {f"layers.{k}.norm{n}.weight": (width,) for n in (1, 2)}
    return made


def resnet50() -> Shapes:
    made: Shapes = {"conv1.weight": (64, 3, 7, 7), "fc.weight": (1000, 2048), "fc.bias": (1000,)}
    norms, inside = {"bn1": 64}, 64
    for stage, (blocks, width) in enumerate(zip((3, 4, 6, 3), (64, 128, 256, 512), strict=True), 1):
        for block in range(blocks):
            name = f"layer{stage}.{block}"
            sizes = [(width, inside, 1, 1), (width, width, 3, 3), (4 * width, width, 1, 1)]
            sizes += [(4 * width, inside, 1, 1)] if not block else []
            for k, shape in enumerate(sizes, 1):
                made[f"{name}.conv{k}.weight"] = shape
                norms[f"{name}.bn{k}"] = shape[0]
            inside = 4 * width
    for name, width in norms.items():
        made |= {f"{name}.{what}": (width,) for what in ("weight", "bias", "running_mean", "running_var")}
    return made


MODELS: dict[str, tuple[Shapes, torch.dtype]] = {
    "ResNet-50": (resnet50(), torch.float32),
    "ViT-B/16": (encoder(12, 768, 3072, {"patch": (768, 3, 16, 16), "position": (197, 768)}), torch.float32),
    "BERT-base": (encoder(12, 768, 3072, {"words": (30522, 768), "position": (512, 768)}), torch.float32),
    "GPT-2": (encoder(12, 768, 3072, {"wte": (50257, 768), "wpe": (1024, 768)}), torch.float32),
    "TinyLlama-1.1B": (llama(22, 2048, 5632, 256, 32000), torch.bfloat16),
}
NONE: tuple[Shapes, torch.dtype] = {"a": (1,)}, torch.float32


def state_of(shapes: Shapes, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    return {name: torch.randn(shape, dtype=torch.float32).to(dtype) for name, shape in shapes.items()}


def same(a: dict[str, Any], b: dict[str, Any]) -> bool:
    return a.keys() == b.keys() and all(a[name].dtype == b[name].dtype and torch.equal(a[name], b[name]) for name in a)


def timed(call: Callable[[], Any], made: Path) -> float:
    """Seconds until what it makes is durable."""
    began = time.perf_counter()
    call()
    for path in [made] if made.is_file() else list(made.iterdir()):
        fd = os.open(path, os.O_RDONLY)
        os.fsync(fd)
        os.close(fd)
    return time.perf_counter() - began


def saved(folder: Path, state: dict[str, torch.Tensor]) -> str:
    with Checkpointer("self", slow=folder / "run") as ckpt:
        ckpt.save(1, {"model": state}).wait()
    (found,) = (folder / "run").glob("step-*")
    return str(found)


def restored(folder: Path) -> Any:
    with Checkpointer("self", slow=folder) as ckpt:
        return ckpt.restore()


def measure(folder: Path, name: str, rounds: int) -> None:
    state = state_of(*MODELS[name])
    opened = opened_at(saved(folder, state))
    ours, theirs, our_dcp, their_dcp = (folder / each for each in ("o.safetensors", "t.safetensors", "o.dcp", "t.dcp"))
    sides: dict[str, tuple[Callable[[], Any], Path]] = {
        "safetensors": (lambda: to_safetensors(opened, str(ours), ["model"]), ours),
        "their safetensors": (lambda: save_file(state, theirs), theirs),
        "DCP": (lambda: to_dcp(opened, str(our_dcp)), our_dcp),
        "restore": (lambda: restored(folder / "run"), folder),
        "their DCP": (lambda: dcp.save({"model": state}, checkpoint_id=their_dcp, no_dist=True), their_dcp),
    }

    def once(call: Callable[[], Any], made: Path) -> float:
        if made != folder:
            shutil.rmtree(made, ignore_errors=True)
            made.unlink(missing_ok=True)
        return timed(call, made)

    calls = {side: partial(once, *how) for side, how in sides.items()}
    interleave(calls, 1)  # warms up
    check(folder, state, ours, their_dcp, our_dcp)
    took = interleave(calls, rounds)
    cells = []
    for side in ("safetensors", "DCP"):
        for more in ([0.0] * rounds, took["restore"]):
            triples = zip(took[side], took[f"their {side}"], more, strict=True)
            ratio = [ours / (theirs + before) for ours, theirs, before in triples]
            cells.append(told(ratio))
        cells.append(" / ".join(f"{statistics.median(took[each]):.2f}" for each in (side, f"their {side}")))
    nbytes = sum(each.nbytes for each in state.values())
    print(f"| {name} | {len(state)}, {nbytes / 1e6:,.0f} MB | {' | '.join(cells)} |", flush=True)


def check(folder: Path, state: dict[str, torch.Tensor], ours: Path, their_dcp: Path, our_dcp: Path) -> None:
    assert same(load_file(ours), state)
    got = {"model": {name: torch.zeros_like(each) for name, each in state.items()}}
    dcp.load(got, checkpoint_id=our_dcp, no_dist=True)
    assert same(got["model"], state)
    for foreign in (SafeTensors([str(ours)]), Dcp(str(their_dcp))):
        back = folder / "back"
        bring(foreign, str(back), 1)
        got = restored(back)
        assert same(got.get("model", got), state)
        shutil.rmtree(back)


def memory(folder: Path, name: str) -> None:
    """Say how many MB a process needs beyond that for a model of no size."""
    most: dict[str, list[float]] = {}
    for shapes in (NONE, MODELS[name]):
        shutil.rmtree(folder, ignore_errors=True)
        saved(folder, state_of(*shapes))
        for words in (
            ["export", "run", "o.safetensors"], ["export", "run", "o.dcp"],
            ["import", "o.safetensors", "back"], ["import", "o.dcp", "back2"],
        ):  # fmt: skip
            command = [sys.executable, "-c", PEAK, "checkpoint", *words]
            said = subprocess.run(command, cwd=folder, stdout=subprocess.PIPE, text=True, check=True).stdout
            most.setdefault(" ".join(words), []).append(int(said.split()[-1]) / 1024)
    print(name, {what: f"{more - least:.0f} MB" for what, (least, more) in most.items()})


#: VmHWM begins with the program, ru_maxrss with the process that started it.
PEAK = (
    "import re, sys; from pario.cli import main; main(sys.argv[1:]); "
    "print(re.search(r'VmHWM:\\s+(\\d+)', open('/proc/self/status').read())[1])"
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--only", nargs="*", choices=MODELS, default=list(MODELS))
    args = parser.parse_args()
    warnings.simplefilter("ignore")
    folder = args.folder / "exchange"
    of_each = "ours ÷ theirs | ours ÷ restore and theirs | seconds"
    print(f"| model | tensors | safetensors, {of_each} | DCP, {of_each} |\n|{'---|' * 8}")
    for name in args.only:
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        measure(folder, name, args.rounds)
    memory(folder, args.only[-1])
    shutil.rmtree(folder)


if __name__ == "__main__":
    main()
