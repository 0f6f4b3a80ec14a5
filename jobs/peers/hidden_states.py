"""transformers by itself: `output_hidden_states`, nothing stored."""

from __future__ import annotations

import torch
from answering import capturing, given
from transformers import AutoModelForCausalLM

work = given()
model = AutoModelForCausalLM.from_pretrained(work.model, dtype=torch.float32)


def capture(batch: torch.Tensor) -> torch.Tensor:
    with torch.inference_mode():
        return model(batch, output_hidden_states=True, use_cache=False).hidden_states[work.layer + 1]


capturing(capture, work.windows.split(work.batch))
