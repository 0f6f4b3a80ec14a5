"""nnsight: the block's output saved in a trace, nothing stored."""

from __future__ import annotations

import nnsight
import torch
from answering import capturing, given
from transformers import AutoModelForCausalLM

work = given()
model = nnsight.NNsight(AutoModelForCausalLM.from_pretrained(work.model, dtype=torch.float32).eval())
block = model.model.layers[work.layer]


def capture(batch: torch.Tensor) -> torch.Tensor:
    with torch.inference_mode(), model.trace(batch, use_cache=False):
        rows = block.output.save()
    return rows  # noqa: RET504  # the body of a trace is not run where it stands


capturing(capture, work.windows.split(work.batch))
