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
    parser.add_argument("--exact", action="store_true", help="the exact transform, as FFCV's decoder does not use it")
    options = parser.parse_args()
    team = Team()
    import pario

    fast = not options.exact
    decoder = pario.decode.Image(fast=fast)
    if options.work == "crop":
        decoder = pario.decode.Image(224, crop="random", flip=True, mean=MEAN, std=STD, fast=fast)
    loader = pario.Loader(
        options.path, options.batch, decoder, shuffle="global", comm=team.comm,
        options=pario.Options(decode_threads=options.threads),
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
