"""One lesson: a PyTorch-style script that reads an LMDB, as it is, with py-lmdb and with pario.

    python examples/pytorch_style.py SET                        py-lmdb reads, through its memory map
    python -m pario run examples/pytorch_style.py SET           pario reads; not a word of this file is different

SET is any LMDB: a directory with data.mdb, or the file itself. `import lmdb` stands below as in thousands of scripts.
`pario run` makes it mean pario for environments that are opened with readonly=True.

Every epoch prints its records per second. To see the difference:

    warm    run as above: what counts is the last epoch, when the file is in the page cache.
    cold    with --cold, which asks the kernel to forget the file before the first epoch. The first epoch is the one to
            compare; the later ones are warm. It does nothing for a file in a memory file system (/tmp may be one), and
            what other processes have mapped stays. With records of many pages the memory map faults in page by page
            what pario asks for at once.

On one machine (2 cores, local disk, the set below, medians of 3 runs in turn), records per second:

    cold epoch   py-lmdb   405, pario  3,546 (8.8 times); with --workers 4:    898 and  4,311 (one run)
    warm epoch   py-lmdb 14,903, pario 11,898 (0.80 times); with --workers 4: 12,116 and 10,196

--workers 4 reads in four processes of torch's DataLoader. Without torch (pip install torch) the script loops itself.
Without a set of your own:  python examples/pytorch_style.py --make SET  writes 2,000 records of 197 KB (400 MB).
"""

from __future__ import annotations

import argparse
import importlib
import os
import random
import time
import zlib
from collections.abc import Iterable
from typing import Any

import lmdb

torch_data: Any
try:
    torch_data = importlib.import_module("torch.utils.data")
except ImportError:
    torch_data = None

BATCH = 32


class Records(torch_data.Dataset if torch_data else object):  # type: ignore[misc]
    """Every record of an LMDB; the environment is opened in the process that reads."""

    def __init__(self, path: str) -> None:
        self.path = path
        self.env: Any = None
        env = self.open()
        with env.begin() as txn:
            self.keys = list(txn.cursor().iternext(values=False))
        self.reader = repr(type(env))
        env.close()

    def open(self) -> Any:
        return lmdb.open(
            self.path, subdir=os.path.isdir(self.path), readonly=True, lock=False, readahead=False, meminit=False
        )

    def __len__(self) -> int:
        return len(self.keys)

    def __getitem__(self, index: int) -> tuple[int, int]:
        if self.env is None:
            self.env = self.open()
        with self.env.begin() as txn:
            value = txn.get(self.keys[index])
        return len(value), zlib.adler32(value)  # a real one would decode the image here


def batches(data: Records, epoch: int, workers: int) -> Iterable[list[tuple[int, int]]]:
    """The records in random order, the same on every run."""
    order = list(range(len(data)))
    random.Random(epoch).shuffle(order)
    if torch_data is not None:
        loader: Iterable[list[tuple[int, int]]] = torch_data.DataLoader(
            data, batch_size=BATCH, sampler=order, num_workers=workers, collate_fn=list
        )
        return loader
    return ([data[i] for i in order[at : at + BATCH]] for at in range(0, len(order), BATCH))


def forget(path: str) -> None:
    """Ask the kernel to drop the file from its page cache."""
    file = os.path.join(path, "data.mdb") if os.path.isdir(path) else path
    fd = os.open(file, os.O_RDONLY)
    os.fsync(fd)  # what is not written yet cannot be dropped
    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    os.close(fd)


def make(path: str, records: int, nbytes: int) -> None:
    """A set of random records with the keys that Caffe gives."""
    env = lmdb.open(path, map_size=2 * records * (nbytes + 8192) + (1 << 20))
    for start in range(0, records, 1000):
        with env.begin(write=True) as txn:
            for i in range(start, min(start + 1000, records)):
                txn.put(b"%08d" % i, random.Random(i).randbytes(nbytes))
    env.close()


def main() -> None:
    parser = argparse.ArgumentParser(description="Read an LMDB as PyTorch scripts do, and print records per second.")
    parser.add_argument("set", help="directory or data file")
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--workers", type=int, default=0, help="processes of torch's DataLoader")
    parser.add_argument("--cold", action="store_true", help="drop the file from the page cache first")
    parser.add_argument("--make", action="store_true", help="write a set first")
    parser.add_argument("--records", type=int, default=2000, help="of the set to write")
    parser.add_argument("--bytes", type=int, default=197_000, help="per record of the set to write")
    args = parser.parse_args()
    if args.make:
        make(args.set, args.records, args.bytes)
    if args.workers and torch_data is None:
        parser.error("--workers needs torch: pip install torch")
    data = Records(args.set)
    print(f"{len(data):,} records, read by {data.reader}")
    if args.cold:
        forget(args.set)
    for epoch in range(args.epochs):
        begin = time.perf_counter()
        records = total = check = 0
        for batch in batches(data, epoch, args.workers):
            for nbytes, checksum in batch:
                records, total, check = records + 1, total + nbytes, check ^ checksum
        seconds = time.perf_counter() - begin
        state = "cold" if args.cold and epoch == 0 else "warm"
        print(
            f"epoch {epoch}: {records:,} records, {total:,} bytes, checksum {check:08x}; "
            f"{state}: {records / seconds:,.0f} records/s, {total / seconds / 1e6:,.0f} MB/s",
            flush=True,
        )


if __name__ == "__main__":
    main()
