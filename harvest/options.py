"""The words of the commands: each argument and option with its help, its unit, and what holds where it is left out."""

from __future__ import annotations

from typing import Annotated

import typer

import harvest
from harvest.export.known import DIRECTION_FORMATS, format_names


def _version(asked: bool) -> None:
    if asked:
        print(f"harvest {harvest.__version__}")
        raise typer.Exit


Version = Annotated[
    bool, typer.Option("--version", callback=_version, is_eager=True, help="Prints the version, and nothing else.")
]

# ---- of several commands -------------------------------------------------------------------------------------------

JobFile = Annotated[str, typer.Argument(metavar="JOB", help="The job file (TOML).")]
RunFolder = Annotated[str, typer.Argument(metavar="RUN", help="A run's folder or URL.")]
Overrides = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="KEY.SUB=VALUE",
        help="Overrides a setting of the job, as in data.limit=100; repeatable.",
        show_default="none",
    ),
]
Json = Annotated[bool, typer.Option("--json", help="Machine-readable output.")]

# ---- of one --------------------------------------------------------------------------------------------------------

Calibrate = Annotated[
    bool, typer.Option("--calibrate", help="Harvest half a minute of it, keep nothing, say how long all takes.")
]
Workers = Annotated[
    int | None,
    typer.Option(
        "--workers", metavar="N", help="With --calibrate: how long so many workers take.", show_default="the job's"
    ),
]
Watch = Annotated[bool, typer.Option("--watch", help="Follow it until it is complete, or nobody works on it.")]
Every = Annotated[
    float | None,
    typer.Option("--every", metavar="SECONDS", help="With --watch: seconds between two looks.", show_default="5"),
]
Repair = Annotated[bool, typer.Option("--repair", help="Harvest the damaged shards again.")]
Model = Annotated[str, typer.Argument(metavar="MODEL", help="Hub id, folder, .gguf file or package:.")]
Out = Annotated[
    str | None, typer.Option("--out", metavar="FILE", help="Where to write it.", show_default="RUN/report.html")
]

# ---- of export -----------------------------------------------------------------------------------------------------

Format = Annotated[
    str,
    typer.Argument(
        metavar="FORMAT",
        help=f"One of {', '.join(format_names())}; with --directions {' or '.join(DIRECTION_FORMATS)}.",
    ),
]
NewFolder = Annotated[str, typer.Argument(metavar="OUT", help="A new or empty folder, or a URL.")]
Names = Annotated[
    list[str] | None,
    typer.Option("--name", help="A name of the run, as in residual.12; repeatable.", show_default="all names"),
]
Shuffle = Annotated[
    int | None,
    typer.Option(
        "--shuffle", metavar="SEED", help="In the order of run.batches(seed=SEED).", show_default="dataset order"
    ),
]
Dtype = Annotated[
    str | None,
    typer.Option(
        "--dtype",
        help="float32, float16 or bfloat16; a value that does not fit ends the export.",
        show_default="as stored, or float32 where the format has no such type",
    ),
]
Context = Annotated[
    int | None,
    typer.Option(
        "--context",
        metavar="C",
        help="Only whole contexts, of C consecutive tokens of a document each.",
        show_default="every row by itself",
    ),
]
Naming = Annotated[
    str | None,
    typer.Option("--naming", help="tl (TransformerLens' hooks) or hf (module paths).", show_default="the format's own"),
]
Rows = Annotated[
    str | None,
    typer.Option(
        "--rows",
        metavar="FILTER",
        help="A filter over the token table, as in 'position > 0 and not special'.",
        show_default="all rows",
    ),
]
Limit = Annotated[
    int | None, typer.Option("--limit", metavar="ROWS", help="At most so many rows.", show_default="no limit")
]
Directions = Annotated[bool, typer.Option("--directions", help="Its directions instead of its rows.")]
