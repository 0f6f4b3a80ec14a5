"""The page of the run folder: every file, and what is in it, from the records and schemas that write it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import pyarrow as pa

from harvest.records import FORMAT_VERSION
from harvest.results import Totals
from harvest.store.examples import KEYS, STATES
from harvest.store.tables import documents_schema, tokens_schema
from writers.markdown import code, fields, prose, table

ATTEMPT = "shards/f00000-s000017.9c1f02ab-1"
FILES = {
    "run.json": "what was asked for and what it stands on; written first",
    "coordinator.json": "who is at work on the run: one process at a time",
    "ledger/f00000-s000017.json": "a shard's commit record; without one the shard does not exist",
    f"{ATTEMPT}/zarr.json": "an attempt at a shard: a Zarr v3 group; its name has the coordinator's life and a number",
    f"{ATTEMPT}/residual.12/zarr.json": "the array of a name, [rows, width]: shape, dtype, codecs, attributes",
    f"{ATTEMPT}/residual.12/c.0.0": "its rows; `c.1.0` and so on where they are more than 256 MiB",
    f"{ATTEMPT}/residual.12.scale/c.0.0": "of an int8 array: a float32 per row, by which its codes are multiplied",
    f"{ATTEMPT}/pooled/mean/residual.12/c.0.0": "one row per document that has rows, where `capture.pool` asks for it",
    f"{ATTEMPT}/tokens.parquet": "which token each row is, row by row with the arrays",
    f"{ATTEMPT}/documents.parquet": "every document, stored or skipped",
    f"{ATTEMPT}/states.safetensors": "the shard's sums",
    f"{ATTEMPT}/examples-sentiment.arrow": "a sample of the examples of a direction",
    "statistics.parquet": "statistics of every name, merged when all shards are committed",
    "covariance.safetensors": "the shards' sums of the covariance merged, by `statistics.covariance`; as `states`",
    "directions/sentiment.safetensors": "the vectors of a direction",
    "directions/sentiment.json": "its card: counts, figures, layers",
    "complete.json": "totals; written when every shard is committed",
    "report.html": "the report; nothing is read from it",
}
"""Path, by example -> what it is."""
HEAD = f"""A run is a folder, or a prefix in an object store. This is format {FORMAT_VERSION}; another one is
refused by its number. JSON Schemas of the records are in `schemas/`. Files that begin with a dot are locks and
unfinished writes.
"""
ARRAYS = """An uncompressed file of rows is a Zarr shard and a raw file at once: rows in C order, then the index
of its chunks. float32, float16 and int8 are Zarr's own data types; bfloat16 is the upper half of a float32, and
Zarr knows it once `harvest.store.bfloat16` is imported. The attributes say `model`, `site`, `layer`, `module`
and `dtype`, and of int8 `scale` and `decoding`.
"""
SUMS = """Keys are `KIND/NAME/FIELD`, such as `moments/residual.12/ordinary.mean`; the metadata say which
version of each kind it is. Moments have the fields of rows of ordinary and of special tokens apart
(`ordinary.`, `special.`): `mean` and `m2` float64 [width], `floats` (sum, squares, least and largest of the
norms, least and largest value), `counts` (rows, rows of zeros, rows left out, values that are no finite
number), `norms` int64 [k], a histogram from the bin `first` on. Directions
(`directions/sentiment/residual.12/...`) have `means` float64 [3, width] of A, B and the rest, `sums`, `counts`,
and of pairs those that wait for their partner. The covariance (`covariance/residual.12/...`, also in
`covariance.safetensors`) has `rows`, `mean` float64 [width] and `upper`, the summed products of deviations from
the mean: the upper triangle, row by row. Further reductions have fields of their own.
"""
TOKENS = {
    "document": "the document's id: number of the source file * 2**40 + row in the file",
    "position": "of the token in the document's full sequence",
    "token": "its id",
    "chunk": "which window of the document it was read in",
    "special": "a special token of the tokenizer",
    "variant": "which sequence of the document; only with `data.contrast`",
    "span": "the innermost span around it, null outside all; only where the job uses spans",
}
EXAMPLES = {
    "read": "which of several reads: what follows `@` in the name; empty for a single one",
    "document": "its id",
    "variant": "which sequence of the document, of a contrast",
    "position": "where the state is read, the last place of several",
    "group": "0 is A, 1 is B",
    "weight": "what it counts",
    "logit_diff": "logit of the right answer minus that of the best other one, where the job asks",
    "held_out": "kept for evaluation, in no sum",
    "pair": "key of its pair, where there are any",
}
ARROW = {
    "`int`": "`int64`",
    "`float`": "`double`",
    "`np.ndarray`": "list of `double`",
    "`Mapping[float, float]`": "list of `share`, `norm`",
}
"""Type of a figure -> of its column."""
VECTORS = """Keys are `MODE/AT/FIELD`, such as `whitened/residual.12/raw`; a direction that is undefined has
none. `raw` is float64 [width] in the units of the activations, `vector` the same at length 1; mode `leace` has
the eraser's `left`, `right` and `mean`, too.
"""
CARD = {
    "direction": "its name",
    "settings": "its table of the job, with every default",
    "model": "`model.name`",
    "revision": "`model.revision`",
    "weights": "fingerprint of the model",
    "dtype": "of the forward",
    "job": "hash of all that locks the run",
    "harvest": "version that began the run",
    "answers": "group value -> the answer's text and its first token",
    "best": "mode -> the name chosen by folds of the training part; null without enough examples",
    "control": "mode -> held-out AUROC at that name of directions made with shuffled labels",
    "cosines": "name -> cosines between the vectors of the modes",
    "check": "what adding the direction does to the answers' logits, where `check` asks for it",
    "directions": "every mode at every name: counts, norm, midpoint, figures with intervals, status",
}
COMPLETE = {
    "format": "version of the run folder",
    "shards": "committed",
    "bytes": "of all objects",
    "self_check": "the largest of each name",
    "environments": "hardware and libraries that worked on it",
    "directions": "file of a direction -> hash of its content",
}
"""What is not added up over the records; the other keys are called as there."""


def page() -> str:
    """File by file, in the order in which a run writes them."""
    parts = [f"# Run folder\n\n{HEAD}", table(["file", "what it is"], [(code(p), prose(w)) for p, w in FILES.items()])]
    parts += [_record("run.json", "store.ledger.RunRecord"), "`plan.resolved`:\n", _fields("plan.Resolved")]
    parts += [_record("coordinator.json", "store.lease.Holder")]
    parts += [_record("ledger", "records.ShardRecord"), "`shard`:\n", _fields("records.Shard")]
    parts += ["Each of `objects`:\n", _fields("records.StoredObject"), f"## Arrays\n\n{prose(ARRAYS)}\n"]
    parts += ["## tokens.parquet\n", _columns(tokens_schema(spans=True, variants=True), TOKENS)]
    schema = documents_schema(variants=True, logit_diffs=True)
    parts += [
        "## documents.parquet\n",
        _columns(schema, {name: what for name, _, what in fields("records.DocumentRow")}),
    ]
    parts += ["Then the columns of `data.keep`, typed by their values.\n", f"## states.safetensors\n\n{prose(SUMS)}\n"]
    parts += ["## examples-NAME.arrow\n", _columns(KEYS, EXAMPLES)]
    parts += [f"Then `{STATES}NAME` for every name, float32 [width].\n", "## statistics.parquet\n", _statistics()]
    parts += [f"## directions/NAME.safetensors\n\n{prose(VECTORS)}\n", "## directions/NAME.json\n", _keys(CARD)]
    parts += ["## complete.json\n", _keys(complete())]
    return "\n".join(parts)


def complete() -> dict[str, str]:
    """Key of complete.json -> what it is."""
    return {
        key: COMPLETE.get(key, "that of all records, added up") for key in ("format", *Totals().data(), "directions")
    }


def _record(title: str, path: str) -> str:
    told = "" if path.endswith("Holder") else "Beside these `crc32c`, a checksum of the record itself.\n"
    return f"## {title}\n\n{_fields(path)}\n{told}"


def _fields(path: str) -> str:
    return table(["field", "type", ""], fields(path))


def _columns(schema: pa.Schema, said: Mapping[str, str]) -> str:
    """`said`: column -> what it is, plain or as `fields` has it."""
    rows = [(code(one.name), _type(one), said.get(code(one.name)) or prose(said[one.name])) for one in schema]
    return table(["column", "type", ""], rows)


def _type(field: pa.Field) -> str:
    kind = "string" if pa.types.is_dictionary(field.type) else str(field.type)
    return code(kind) + (" or null" if field.nullable else "")


def _statistics() -> str:
    first = [
        ("`name`", "`string`", "of the activations"),
        ("`rows`", "`string`", "`all`, or `ordinary`: without special tokens"),
    ]
    rows = [(name, ARROW[kind], what) for name, kind, what in fields("reduce.moments.RowStatistics")]
    return table(["column", "type", ""], [*first, *rows])


def _keys(said: Mapping[str, str]) -> str:
    rows: Iterable[tuple[str, str]] = ((code(key), prose(what)) for key, what in said.items())
    return table(["key", ""], rows)
