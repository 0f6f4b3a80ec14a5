"""Trains a TopK sparse autoencoder on one name of a run and judges it on documents that it has not seen.

    python jobs/examples/sparse_autoencoder.py [JOB] [--name residual.15] [--latents 2304] [--k 32] [--epochs 12]

JOB is harvested first, or opened where that is done. One review in ten is held out, by its id. First tokens are left
out: attention parks on them, and their rows are up to a hundred times as long as all others. To go big: a job with more
data, more --latents, --device cuda; the batches come shuffled from disk, whatever the size of the run.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import save_file
from torch import nn

import harvest

JOB = Path(__file__).with_name("reviews.toml")


class Autoencoder(nn.Module):
    """x [B, d] ~ b_dec + scale * f @ W_dec, with at most k of the latents f [B, m] above zero."""

    def __init__(self, sample: torch.Tensor, latents: int, k: int) -> None:
        """`sample` [n, d]: rows that say where the data lie, and how far from there."""
        super().__init__()
        self.k, d = k, sample.shape[1]
        self.b_dec = nn.Parameter(sample.mean(0))
        self.register_buffer("scale", (sample - sample.mean(0)).norm(dim=1).mean() / math.sqrt(d))
        self.W_dec = nn.Parameter(nn.functional.normalize(torch.randn(latents, d), dim=1))
        self.W_enc = nn.Parameter(self.W_dec.detach().T.clone())
        self.b_enc = nn.Parameter(torch.zeros(latents))

    def encode(self, x: torch.Tensor) -> torch.Tensor:
        latents = torch.relu((x - self.b_dec) / self.scale @ self.W_enc + self.b_enc)
        return torch.zeros_like(latents).scatter(1, (top := latents.topk(self.k, dim=1)).indices, top.values)

    def decode(self, latents: torch.Tensor) -> torch.Tensor:
        return self.b_dec + self.scale * (latents @ self.W_dec)


def train(sae: Autoencoder, batches: Iterable[torch.Tensor], steps: int, rate: float) -> None:
    """Adam on the squared error; the rows of W_dec keep length 1."""
    optimizer = torch.optim.Adam(sae.parameters(), lr=rate)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, rate, total_steps=steps, pct_start=0.1)
    for step, x in enumerate(batches):
        loss = ((x - sae.decode(sae.encode(x))) / sae.scale).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
        with torch.no_grad():
            sae.W_dec /= sae.W_dec.norm(dim=1, keepdim=True)
        if step % max(1, steps // 5) == 0:
            print(f"step {step:5} of {steps}: loss {loss.item():.3f}", flush=True)


@torch.no_grad()
def judge(sae: Autoencoder, batches: Iterable[torch.Tensor], mean: torch.Tensor) -> dict[str, float]:
    """What is left of the rows' variance around `mean` [d], and how many latents it takes."""
    rows = left = variance = active = 0.0
    used = torch.zeros(len(sae.b_enc), dtype=torch.bool, device=mean.device)
    for x in batches:
        latents = sae.encode(x)
        rows += len(x)
        left += float((x - sae.decode(latents)).double().square().sum())
        variance += float((x - mean).double().square().sum())
        active += float((latents > 0).sum())
        used |= (latents > 0).any(0)
    return {
        "held-out rows": rows,
        "explained variance": 1 - left / variance,
        "L0": active / rows,
        "latents in use": float(used.sum()),
    }


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("job", nargs="?", default=JOB)
    parser.add_argument("--name", default="residual.15")
    parser.add_argument("--latents", type=int, default=2304)
    parser.add_argument("--k", type=int, default=32)
    parser.add_argument("--epochs", type=int, default=12)
    parser.add_argument("--batch", type=int, default=1024)
    parser.add_argument("--rate", type=float, default=1e-3)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--out", default="runs/sparse_autoencoder.safetensors")
    given = parser.parse_args(arguments)
    torch.manual_seed(0)

    run = harvest.run(given.job)
    keys = run.tokens(columns=["document", "position"])
    later = keys.column("position").to_numpy() > 0
    held_out = keys.column("document").to_numpy() % 10 == 0

    def rows(mask: np.ndarray, **how: int) -> Iterable[torch.Tensor]:
        return run.batches(given.name, given.batch, where=mask & later, dtype="float32", device=given.device, **how)

    batches = rows(~held_out, epochs=given.epochs)
    sample = torch.cat([x for x, _ in zip(rows(~held_out), range(8))])
    sae = Autoencoder(sample, given.latents, given.k).to(given.device)
    train(sae, batches, len(batches), given.rate)
    for what, value in judge(sae, rows(held_out, shuffle=False), sample.mean(0)).items():
        print(f"{what:<20}{value:,.3f}".rstrip("0").rstrip("."))
    Path(given.out).parent.mkdir(parents=True, exist_ok=True)
    about = {"name": given.name, "k": str(given.k), "job": str(given.job)}
    save_file({key: value.contiguous() for key, value in sae.state_dict().items()}, given.out, about)
    print(f"{'saved':<20}{given.out}")


if __name__ == "__main__":
    main()
