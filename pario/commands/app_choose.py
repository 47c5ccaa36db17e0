"""The command `choose`, its arguments and help texts, for click (app.py). choose.py does the work."""

from __future__ import annotations

from typing import Any

import click

__all__ = ["choose"]


@click.command()
@click.argument("path")
@click.option("--iteration", metavar="SECONDS", type=click.FloatRange(min=0, min_open=True), required=True,
              help="Of one training iteration with data in memory.")
@click.option("--batch", metavar="RECORDS", type=click.IntRange(min=1), required=True, help="Per node and iteration.")
@click.option("--sync", is_flag=True, help="The script reads and computes in turns, instead of reading ahead.")
@click.option("--threads", metavar="N", type=click.IntRange(min=1), help="That decode.  [default: cores]")
@click.option("--db", metavar="NAME", help="A named database.")
@click.option("--samples", metavar="N", type=click.IntRange(min=2), default=2000, show_default=True, help="Records.")
@click.option("--seconds", metavar="S", type=click.FloatRange(min=0.01), default=0.5, show_default=True,
              help="Per candidate and measurement.")
@click.option("--margin", metavar="SHARE", type=click.FloatRange(0, 1, max_open=True), default=0.1, show_default=True,
              help="Of the allowance, that stays free for what the equations leave out.")
def choose(
    path: str,
    iteration: float,
    batch: int,
    sync: bool,
    threads: int | None,
    db: str | None,
    **measuring: Any,
) -> int:  # fmt: skip
    """Find the codec that a training job can afford.

    Samples records of the LMDB at PATH, measures ratio and decoding rate of every codec on this machine, and the store
    at raw and at compressed sizes, past the page cache if it can. Of the codecs that keep up with the iterations, the
    one with the highest ratio is chosen.

    \b
    Examples:
      python -m pario choose train.lmdb --iteration 0.65 --batch 512
      python -m pario choose train.lmdb --iteration 0.65 --batch 512 --sync
    """
    from pario.codec.select import Application
    from pario.commands.choose import run_choose

    # Bytes and threads are not known before the samples are read.
    application = Application(batch, 0.0, iteration, threads or 1, sync)
    return run_choose(path, application, db=db, threads=threads, **measuring)
