"""A Loader as Trainers know a DataLoader: dataset, sampler and batch sampler, whose indices are numbers of batches.

Lightning tells the epoch to the sampler, and asks whether it is sequential. To resume, Hugging Face's Trainer (by
Accelerate's `skip_first_batches`) makes a DataLoader of the dataset and of a batch sampler that leaves out the first
batches: these are not read.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from pario.errors import OptionError
from pario.records import Batch


class Batches:
    """The batches of an epoch, which can be taken one after the other only. len() is the number of its records."""

    def __init__(self, loader: Any) -> None:
        self._loader = loader
        self._running: Iterator[Any] | None = None
        self._next = 0  # batch of the running loop

    def __len__(self) -> int:
        return int(self._loader.records)

    def __getitems__(self, numbers: list[int]) -> Any:
        """The batch of this number. The first one begins a loop there: collective."""
        if len(numbers) != 1:
            raise OptionError("the dataset of a Loader has batches", hint="Loop over the loader, without a DataLoader.")
        (number,) = numbers
        if self._running is None:
            if number:
                self._loader.set_epoch(self._loader.epoch, number)
            self._running, self._next = iter(self._loader), number
        if number != self._next:
            raise OptionError(
                f"batch {number} was asked for after batch {self._next - 1}: batches come one after the other",
                hint="Iterate over the loader itself; its batches are divided and shuffled already.",
            )
        self._next += 1
        batch = next(self._running)
        if self._next == len(self._loader):  # nobody asks for another one, which would end the epoch
            next(self._running, None)
            self.leave()
        return batch

    def leave(self) -> None:
        """The next batch begins a new loop."""
        self._running = None


class BatchSampler:
    """Numbers of batches. Lightning looks for `loader.batch_sampler.sampler.set_epoch(epoch)`."""

    def __init__(self, loader: Any) -> None:
        self.sampler = self
        self._loader = loader
        #: the only epoch that is run, whatever a Trainer says; None: each
        self.held: int | None = None

    def __len__(self) -> int:
        return len(self._loader)

    def __iter__(self) -> Iterator[list[int]]:
        self._loader.dataset.leave()
        return ([number] for number in range(len(self._loader)))

    def set_epoch(self, epoch: int) -> None:
        loader = self._loader
        if loader._foreign_ranks and loader._loaded and loader.taken:
            raise OptionError(
                f"a state of {loader._foreign_ranks} ranks goes on in the middle of an epoch on "
                f"{loader.groups}: Lightning goes by its number of batches, and would end the epoch at "
                "another record",
                hint="Trainer(callbacks=[pario.adapters.lightning.Resume(train_loader)]) corrects the number "
                "(docs/pytorch.md)",
            )
        loader.set_epoch(epoch if self.held is None else self.held)


def as_it_is(batch: Any) -> Any:
    """What a DataLoader is to make of a batch."""
    return batch


def with_ids(batch: Batch, ids: str | None) -> dict[str, Any]:
    """The arrays of a batch, and under the name `ids`, if that is not None, the record ids."""
    arrays = dict(batch)
    if ids is not None:
        if ids in arrays:
            raise OptionError(
                f"ids={ids!r} is the name of an array of the decoder ({', '.join(arrays)})",
                hint="Choose another name for the record ids.",
            )
        arrays[ids] = batch.ids
    return arrays
