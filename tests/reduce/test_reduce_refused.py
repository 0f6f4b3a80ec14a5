"""State files that are damaged, and examples that contradict one another: told in one line, by name."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable

import numpy as np
import pytest
import torch

from harvest.errors import DamageError, RequestError
from harvest.reduce.accumulate import ConceptAccumulator, concept_direction
from harvest.reduce.base import load_states, save_states
from harvest.reduce.covariance import Covariance

STATES = torch.randn(6, 4, generator=torch.Generator().manual_seed(0))
GROUPS = [0, 1, 0, 1, 0, 1]
BLOB = save_states([(Covariance(), {"residual.1": Covariance().zero()})])


def with_header(change: Callable[[dict[str, object]], object]) -> bytes:
    length = struct.unpack("<Q", BLOB[:8])[0]
    header = json.loads(BLOB[8 : 8 + length])
    change(header)
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + BLOB[8 + length :]


def of_width_two(header: dict[str, object]) -> None:
    entry = header["covariance/residual.1/upper"]
    assert isinstance(entry, dict)
    entry.update(shape=[1], data_offsets=[0, 8])


@pytest.mark.parametrize(
    ("blob", "line"),
    [
        (BLOB[:5], "here: cut short: 8 bytes wanted at 0, 5 there"),
        (BLOB[:40], "here: cut short: "),
        (BLOB[:-1], "here: cut short: 8 bytes wanted at "),
        (b"\xff" * 8 + BLOB[8:], "here: not a state file"),
        (BLOB[:8] + b"[" + BLOB[9:], "here: the header of the state file is not ours"),
        (with_header(lambda header: header.pop("__metadata__")), "here: the header of the state file is not ours"),
        (with_header(lambda header: header["covariance/residual.1/rows"].pop("shape")), "here: the header of the"),
        (
            with_header(lambda header: header["covariance/residual.1/rows"].update(dtype="BF16")),
            "here: a state holds BF16; expected one of F64, F32, I64, I32, U8",
        ),
        (with_header(of_width_two), "here: covariance of 'residual.1' cannot be read: a triangle of 1 values is none"),
        (
            with_header(lambda header: header.pop("covariance/residual.1/mean")),
            "here: covariance of 'residual.1' cannot be read: 'mean'",
        ),
        (
            with_header(lambda header: header["__metadata__"].update(versions='{"covariance": "7"}')),
            "here: covariance states have version 7; this program reads 1",
        ),
    ],
)
def test_a_state_file_with_any_harm_is_damage_that_says_which(blob: bytes, line: str) -> None:
    with pytest.raises(DamageError) as caught:
        dict(load_states(Covariance(), blob, "here"))
    assert str(caught.value).startswith(line)


def test_blocks_with_and_without_pairs_do_not_make_one_direction() -> None:
    begun = ConceptAccumulator("pca", 4).update(STATES, GROUPS, pairs=list("aabbcc"))
    with pytest.raises(RequestError, match=r"^pairs: given for some of the examples only; allowed is for all or for"):
        begun.update(STATES, GROUPS).finalise()


def test_a_policy_that_is_none_is_refused_in_pairs_by_order_too() -> None:
    with pytest.raises(RequestError, match=r"^unknown = 'skip': allowed are error, count$"):
        concept_direction(STATES, GROUPS, pairs="order", unknown="skip")
    with pytest.raises(RequestError, match=r"^unknown = 'skip': allowed are error, count$"):
        ConceptAccumulator("mean_difference", 4).update(STATES, GROUPS, unknown="skip")
    assert np.isfinite(concept_direction(STATES, GROUPS, pairs="order").norm or 0)
