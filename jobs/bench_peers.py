"""The limit, Harvest and its peers on the common work, each peer in a process of an environment of its own.

    make bench-peers && python jobs/bench_peers.py [--pairs 5] [--only nnsight] [--out jobs/results]

The residual stream after block 15 of SmolLM2-135M, the windows of `jobs/work.py`. A peer's process loads the model and
then works when it is told to, in turn with the limit here; loading and importing are in no figure. The whole trunk is
timed twice at the end. That all captured the same is checked by a total of the rows.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import statistics
import tempfile
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import measuring  # noqa: F401  # before torch: it says how threads wait
import transformers
from measuring import Found, Row, in_turn, main, ratios
from peer import Peer, python
from work import BATCH, LAYER, LAYERS, Work, common

import harvest

PEERS = [
    ("transformers output_hidden_states, nothing stored / limit", "", "hidden_states.py"),
    ("nnsight trace, nothing stored / limit", "nnsight", "nnsight_trace.py"),
    ("interlens capture_activations, nothing stored / limit", "interlens", "interlens_capture.py"),
    ("SAELens CacheActivationsRunner, stored / limit", "saelens", "saelens_caching.py"),
]
"""What, environment ("": this one), script."""
SITES = ["residual", "attn", "mlp", "mlp_input"]


def model_folder(work: Work, folder: Path) -> str:
    """The common model as a folder of float32 safetensors, which older versions of transformers read alike."""
    path = folder / "model"
    config = type(work.model.config).from_dict(
        {key: value for key, value in work.model.config.to_dict().items() if key != "quantization_config"}
    )
    plain = transformers.AutoModelForCausalLM.from_config(config)  # one that came from GGUF is not saved
    plain.load_state_dict(work.model.state_dict())
    plain.save_pretrained(path)
    work.tokenizer.save_pretrained(path)
    saved = json.loads((path / "config.json").read_text())
    saved.setdefault("rope_theta", saved["rope_parameters"]["rope_theta"])  # before 5 it is looked for here
    (path / "config.json").write_text(json.dumps(saved))
    return str(path)


@contextlib.contextmanager
def started(work: Work, environment: str, script: str, sites: list[str]) -> Iterator[Peer]:
    """A peer that is ready, with the common model and windows."""
    interpreter = python(environment)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "windows.json").write_text(json.dumps([window["ids"] for window in work.windows]))
        numbers = {"batch": BATCH, "layer": LAYER, "width": work.model.config.hidden_size, "threads": work.threads}
        options = [word for key, value in numbers.items() for word in (f"--{key}", str(value))]
        arguments = [model_folder(work, folder), str(folder / "windows.json"), *options, "--sites", *sites]
        with Peer(interpreter, script, arguments, totals(work, sites)) as peer:
            yield peer


def totals(work: Work, sites: list[str]) -> list[float]:
    """Of the absolute values of each site's rows, as harvested."""
    found = dict.fromkeys(sites, 0.0)
    for batch in work.batches:
        spec = harvest.CaptureSpec(sites=tuple(sites), layers=(LAYER,))
        for _, site, rows in harvest.capture_activations(work.model, batch, spec):
            found[site] += float(rows.double().abs().sum())
    return list(found.values())


def rows(asked: argparse.Namespace) -> Iterator[Row]:
    work = common(asked)
    yield Row(what="the limit / whole trunk", goal=None, measure=partial(limit, work, asked.pairs))
    for what, environment, script in PEERS:
        yield Row(what=what, goal=None, measure=partial(against_limit, work, environment, script, asked.pairs))
    what = "4 names of block 15, stored, one run / SAELens' four runs"
    yield Row(what=what, goal=3.5, measure=partial(four_names, work, asked.pairs))


def limit(work: Work, pairs: int) -> Found:
    return Found(figures=ratios(in_turn(partial(work.bare, LAYERS - 1), partial(work.bare, LAYER), pairs)))


def against_limit(work: Work, environment: str, script: str, pairs: int) -> Found:
    with started(work, environment, script, ["residual"]) as peer:
        timings = in_turn(partial(work.bare, LAYER), peer.seconds, pairs)
        trunk = statistics.median(work.bare(LAYERS - 1) for _ in range(2))
    whole = trunk / statistics.median(seconds for _, seconds in timings)
    return Found(figures=ratios(timings), remark=f"{whole:.2f} of the whole trunk's speed")


def four_names(work: Work, pairs: int) -> Found:
    tables = {"capture": {"sites": SITES, "layers": [LAYER]}, "store": {"dtype": "float32"}}
    with started(work, "saelens", "saelens_caching.py", SITES) as peer, tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        pipeline = work.pipeline(work.plan(folder, **tables), folder)
        timings = in_turn(peer.seconds, partial(work.harvest, pipeline, folder), pairs)
    return Found(figures=ratios(timings), remark=", ".join(SITES))


if __name__ == "__main__":
    main(__doc__, rows)
