"""Run by the interpreter of an environment with dictionary-learning: trains on the batches of a run, as they are.

python dictionary_learning_train.py RUN NAME
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path

import torch
from dictionary_learning.dictionary import AutoEncoder
from dictionary_learning.trainers.standard import StandardTrainer
from dictionary_learning.training import trainSAE

import harvest

run, name, steps = harvest.open(sys.argv[1]), sys.argv[2], 400
batches = run.batches(name, 16, seed=1, epochs=steps * 16 // len(run) + 1, dtype="float32")
width = run[name].shape[1]
config = {
    "trainer": StandardTrainer, "dict_class": AutoEncoder, "activation_dim": width, "dict_size": 4 * width,
    "lr": 3e-3, "l1_penalty": 0.001, "steps": steps, "warmup_steps": 10, "sparsity_warmup_steps": 10,
    "layer": 0, "lm_name": "tiny", "device": "cpu", "seed": 0,
}  # fmt: skip
with tempfile.TemporaryDirectory() as folder:
    trainSAE(batches, [config], steps, save_dir=folder, device="cpu")
    saved = next(Path(folder).rglob("ae.pt"))
    sae = AutoEncoder.from_pretrained(saved, device="cpu")
rows = run[name][:].float()
with torch.no_grad():
    error = (sae(rows) - rows).square().sum() / (rows - rows.mean(dim=0)).square().sum()
print(json.dumps({"unexplained": float(error), "batches": batches.state_dict()["done"]}))
