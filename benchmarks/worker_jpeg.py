"""pario's Loader over an LMDB of JPEGs: an epoch for each line of its input. Started by jpeg.py."""

from __future__ import annotations

import argparse

from benchmarks.worker import Team, on_request, run

MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("path")
    parser.add_argument("--work", required=True, choices=["plain", "crop"])
    parser.add_argument("--batch", type=int, required=True)
    parser.add_argument("--threads", type=int, required=True)
    parser.add_argument("--tiers", help="as in PARIO_TIERS; by default records come from the page cache")
    options = parser.parse_args()
    team = Team()
    import pario
    from pario.options import read_tiers

    # With the fast transform, which FFCV's decoder uses: the pixels are the same, bit by bit.
    decoder = pario.decode.Image(fast=True)
    if options.work == "crop":
        decoder = pario.decode.Image(224, crop="random", flip=True, mean=MEAN, std=STD, fast=True)
    loader = pario.Loader(
        options.path, options.batch, decoder, shuffle="global", comm=team.comm,
        options=pario.Options(
            decode_threads=options.threads, tiers=None if options.tiers is None else read_tiers(options.tiers)
        ),
    )  # fmt: skip

    def epoch() -> int:
        seen = 0
        for batch in loader:
            seen += len(batch["data"])
        return seen

    on_request(team, epoch)
    loader.close()


if __name__ == "__main__":
    run(main)
