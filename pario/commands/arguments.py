"""Arguments that several commands share, for click."""

from __future__ import annotations

import click

path = click.argument("path")
db = click.option("--db", metavar="NAME", help="Named database. Default: the main one.")
decoder = click.option(
    "--decoder",
    metavar="NAME",
    help="Decoder: datum, image, json, zlib+json, ase, ... (docs/decoders.md), module:function or file.py:function.",
)
select = click.option(
    "--select", metavar="WHICH", help='Records START:STOP, or keys that begin so; "all": meta records, too.'
)
as_json = click.option("--json", "as_json", is_flag=True, help="Print one line of JSON instead of text.")
