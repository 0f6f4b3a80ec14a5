"""Every architecture of the table x site x layer x batching x side of the padding: each row is the document's alone.

Whole runs through the pipeline, several shards each, read plainly from the disk; the right answers are hooks on each
document (or piece of the stream) alone, unpadded. Weights are amplified, so that a wrong neighbour is off by 0.1 to 1.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from families import FAMILIES, HAVE, REFUSED, tiny_family
from oracle import TOLERANCE_TINY, at_names, worst_error
from plainrun import PlainRun, read_plain

import harvest
from harvest.errors import RequestError
from harvest.model.points import SITES
from harvest.model.sites import resolve_names

BOS, EOS, CONTEXT = 0, 1, 24
RNG = np.random.default_rng(11)
DOCUMENTS = [
    [7],
    RNG.integers(3, 60, 30).tolist(),  # two windows
    RNG.integers(3, 60, 9).tolist(),
    [5, BOS, BOS, 9, EOS, BOS],  # what pads, begins and ends stands in the text
    RNG.integers(3, 60, 9).tolist(),
    [BOS, 7],
    RNG.integers(3, 60, 17).tolist(),
    [EOS],
    [9, 8, EOS],
]
SHARD = 5
"""Documents of a shard: each has short and long ones."""


class Architecture:
    """A family's model with every name of it, and what hooks see of each window alone."""

    def __init__(self, family: str) -> None:
        self.family, self.model = family, tiny_family(family)
        self.sites = [site for site in SITES if site in HAVE[family]]
        self.names = resolve_names(self.model, self.sites, "all")
        self.alone = [self.rows(ids) for ids in DOCUMENTS]

    def rows(self, ids: list[int]) -> dict[str, torch.Tensor]:
        """name -> [T, d], window by window."""
        pieces = [at_names(self.model, ids[at : at + CONTEXT], self.names) for at in range(0, len(ids), CONTEXT)]
        return {str(name): torch.cat([piece[str(name)] for piece in pieces]) for name in self.names}

    def run(self, path: Path, batching: str) -> PlainRun:
        job: dict[str, Any] = {
            "data": {"ids": "i"},
            "tokens": {"batching": batching, "context": CONTEXT, "batch": 60},
            "capture": {"sites": self.sites},
            "store": {"shard_documents": SHARD},
            "run": {"path": str(path), "threads": 1},
        }
        harvest.run(job, model=self.model, data=[{"i": ids} for ids in DOCUMENTS])
        return read_plain(path)


@pytest.fixture(scope="module", params=FAMILIES)
def architecture(request: pytest.FixtureRequest) -> Architecture:
    return Architecture(request.param)


def check(plain: PlainRun, expected: dict[str, torch.Tensor], keys: list[tuple[int, int, int]]) -> None:
    """`expected`: all rows of each name in order; `keys`: (document, position, token) of each row."""
    assert len(plain.records) == -(-len(DOCUMENTS) // SHARD)
    assert list(zip(*(plain.tokens[column].tolist() for column in ("document", "position", "token")))) == keys
    assert set(plain.rows) == set(expected)
    for name, rows in expected.items():
        assert worst_error(torch.from_numpy(plain.rows[name]), rows) < TOLERANCE_TINY, name


@pytest.mark.parametrize("batching", ["sorted", "packed"])
def test_every_row_of_a_run_is_what_a_hook_sees_of_its_window_alone(  # E01, E03, E04, E07, E08, E18, E23, E24, E35
    architecture: Architecture, batching: str, tmp_path: Path
) -> None:
    if batching == "packed" and architecture.family in REFUSED:
        with pytest.raises(RequestError, match=r"tokens\.batching = 'packed': "):
            architecture.run(tmp_path / "run", batching)
        return
    plain = architecture.run(tmp_path / "run", batching)
    expected = {name: torch.cat([rows[name] for rows in architecture.alone]) for name in architecture.alone[0]}
    check(plain, expected, [(d, p, i) for d, ids in enumerate(DOCUMENTS) for p, i in enumerate(ids)])


def test_every_row_of_a_stream_is_what_a_hook_sees_of_its_piece_alone(  # E24
    architecture: Architecture, tmp_path: Path
) -> None:
    plain = architecture.run(tmp_path / "run", "concatenated")
    keys = [(d, p, i) for d, ids in enumerate(DOCUMENTS) for p, i in enumerate([*ids, EOS])]
    shards = [[i for d, _, i in keys if d // SHARD == shard] for shard in range(-(-len(DOCUMENTS) // SHARD))]
    pieces = [architecture.rows(stream) for stream in shards]
    check(plain, {name: torch.cat([rows[name] for rows in pieces]) for name in pieces[0]}, keys)


@pytest.mark.parametrize("side", ["left", "right", "both"])
def test_every_site_of_a_padded_batch_is_what_it_is_for_each_sequence_alone(  # E17, E21
    architecture: Architecture, side: str
) -> None:
    chosen = [number for number, ids in enumerate(DOCUMENTS) if len(ids) <= CONTEXT]
    length = max(len(DOCUMENTS[number]) for number in chosen) + 2
    ids, mask = np.full((len(chosen), length), 3), np.zeros((len(chosen), length), int)
    for row, number in enumerate(chosen):
        count = len(DOCUMENTS[number])
        start = {"left": length - count, "right": 0, "both": 1}[side]
        ids[row, start : start + count], mask[row, start : start + count] = DOCUMENTS[number], 1
    found = harvest.capture_activations(
        architecture.model, ids, harvest.CaptureSpec(sites=tuple(architecture.sites)), mask
    )
    assert [(layer, site) for layer, site, _ in found] == [(name.layer, name.site) for name in architecture.names]
    for name, (_, _, tensor) in zip(architecture.names, found):
        for row, number in enumerate(chosen):
            real = torch.from_numpy(mask[row] == 1)
            assert worst_error(tensor[row][real], architecture.alone[number][str(name)]) < TOLERANCE_TINY, name
            assert not tensor[row][~real].any()
