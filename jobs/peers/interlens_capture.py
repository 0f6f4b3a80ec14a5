"""interlens: `capture_activations`, which takes one text at a time, nothing stored."""

from __future__ import annotations

import torch
from answering import capturing, given
from interlens.interp.activation_cache import CaptureSpec
from interlens.interp.capture import capture_activations
from transformers import AutoModelForCausalLM

work = given()
model = AutoModelForCausalLM.from_pretrained(work.model, dtype=torch.float32).eval()
spec = CaptureSpec(sites=("residual",), layers=(work.layer,))
capturing(lambda batch: capture_activations(model, batch, spec)[0].tensor, work.windows.split(1))
