"""DLIO, unmodified but for one thing: what the training loop gets is checked and noted. For `--smoke`.

    mpiexec -n 2 python -m benchmarks.dlio.job NOTES_FOLDER SIDE overrides...

Writes NOTES_FOLDER/RANK.jsonl: per step [epoch, [numbers of the samples]]. The oracle of a sample's bytes is `samples`.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
from dlio_benchmark import main
from dlio_benchmark.framework.torch_framework import TorchFramework
from dlio_benchmark.utils.utility import DLIOMPI

from benchmarks.dlio.samples import number_of, sample


def check_batches(folder: Path, side: int) -> None:
    """Let DLIO's simulated step look at its batch first."""
    compute = TorchFramework.compute

    def checked(self: Any, batch: Any, epoch: int, step: int, seconds: float) -> None:
        images = batch.numpy()
        numbers = [number_of(image) for image in images]
        wrong = [i for i, image in zip(numbers, images, strict=True) if not np.array_equal(image, sample(i, side))]
        assert not wrong, f"epoch {epoch}, step {step}: these samples have other bytes than were written: {wrong}"
        with (folder / f"{DLIOMPI.get_instance().rank()}.jsonl").open("a") as file:
            print(json.dumps([epoch, numbers]), file=file)
        compute(self, batch, epoch, step, seconds)

    TorchFramework.compute = checked


if __name__ == "__main__":
    check_batches(Path(sys.argv[1]), int(sys.argv[2]))
    del sys.argv[1:3]
    main.main()
