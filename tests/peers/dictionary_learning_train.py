"""Run by the interpreter of an environment with dictionary-learning: trains on batches handed over as a file.

python dictionary_learning_train.py BATCHES.npy
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path

import numpy as np
import torch
from dictionary_learning.dictionary import AutoEncoder
from dictionary_learning.trainers.standard import StandardTrainer
from dictionary_learning.training import trainSAE

rows = torch.from_numpy(np.load(sys.argv[1]))
width, steps = rows.shape[1], 400
batches = (rows[i % len(rows) // 16 * 16 :][:16] for i in range(0, 16 * (steps + 5), 16))
config = {
    "trainer": StandardTrainer, "dict_class": AutoEncoder, "activation_dim": width, "dict_size": 4 * width,
    "lr": 3e-3, "l1_penalty": 0.001, "steps": steps, "warmup_steps": 10, "sparsity_warmup_steps": 10,
    "layer": 0, "lm_name": "tiny", "device": "cpu", "seed": 0,
}  # fmt: skip
with tempfile.TemporaryDirectory() as folder:
    trainSAE(batches, [config], steps, save_dir=folder, device="cpu")
    saved = next(Path(folder).rglob("ae.pt"))
    sae = AutoEncoder.from_pretrained(saved, device="cpu")
with torch.no_grad():
    error = (sae(rows) - rows).square().sum() / (rows - rows.mean(dim=0)).square().sum()
print(json.dumps({"unexplained": float(error)}))
