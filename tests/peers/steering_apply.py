"""Run by the interpreter of an environment with repeng and steering-vectors: what their own loaders make of an export.

python steering_apply.py MODEL VECTOR.gguf VECTOR.safetensors SCALE ID [ID ...]
"""

from __future__ import annotations

import json
import re
import sys

import torch
from repeng import ControlModel, ControlVector
from safetensors.torch import load_file
from steering_vectors import SteeringVector
from transformers import AutoModelForCausalLM

path, gguf, vectors, scale = sys.argv[1], sys.argv[2], sys.argv[3], float(sys.argv[4])
ids = torch.tensor([[int(word) for word in sys.argv[5:]]])
model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()

control = ControlVector.import_gguf(gguf)
layers = {int(m[1]): v for name, v in load_file(vectors).items() if (m := re.fullmatch(r"residual\.(\d+)", name))}
steering = SteeringVector(layer_activations={k: v.float() for k, v in layers.items()}, layer_type="decoder_block")
with torch.no_grad():
    bare = model(ids).logits
    with steering.apply(model, multiplier=scale):
        steered = model(ids).logits
    wrapped = ControlModel(model, sorted(control.directions))
    wrapped.set_control(control, scale)
    controlled = wrapped(ids).logits
print(
    json.dumps(
        {
            "model_type": control.model_type,
            "directions": {str(k): v.tolist() for k, v in control.directions.items()},
            "layers": sorted(layers),
            "bare": bare.tolist(),
            "repeng": controlled.tolist(),
            "steering_vectors": steered.tolist(),
        }
    )
)
