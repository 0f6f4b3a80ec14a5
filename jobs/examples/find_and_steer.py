"""Finds a direction between good and bad reviews, says what it is worth, and steers generation with it.

    python jobs/examples/find_and_steer.py [JOB] [--mode whitened] [--scale 5] [--prompt "The film was"]

JOB, whose [[directions]] say what the two groups are, is harvested first, or opened where that is done. The place to
steer at is the one that the run itself chose, without a look at the held-out reviews. To go big: a larger model, more
reviews; nothing here but generation depends on their number.
"""

from __future__ import annotations

import argparse
import importlib.util
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import harvest

JOB = Path(__file__).with_name("reviews.toml")
PROMPTS = ["I watched the film last night. My opinion: it was", "A critic wrote about the new film:"]


def load(name: str) -> tuple[Any, Any]:
    """Model and tokenizer by hub id or folder, or of a `.gguf` file that a package carries, as in a job."""
    where: dict[str, str] = {"pretrained_model_name_or_path": name}
    if name.startswith("package:"):
        package, file = name.removeprefix("package:").split("/", 1)
        (folder,) = importlib.util.find_spec(package).submodule_search_locations
        where = {"pretrained_model_name_or_path": folder, "gguf_file": file}
    model = AutoModelForCausalLM.from_pretrained(**where, dtype=torch.float32).eval()
    return model, AutoTokenizer.from_pretrained(**where)


def written(model: Any, tokenizer: Any, prompt: str, tokens: int) -> str:
    """What the model goes on with, greedily."""
    given = tokenizer(prompt, return_tensors="pt")
    found = model.generate(**given, max_new_tokens=tokens, do_sample=False, pad_token_id=tokenizer.eos_token_id)
    return " ".join(tokenizer.decode(found[0, given["input_ids"].shape[1] :], skip_special_tokens=True).split())


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("job", nargs="?", default=JOB)
    parser.add_argument("--direction", default="sentiment")
    parser.add_argument("--mode", default="whitened")
    parser.add_argument("--scale", type=float, default=5.0)
    parser.add_argument("--tokens", type=int, default=24)
    parser.add_argument("--prompt", action="append", help="repeatable")
    given = parser.parse_args(arguments)

    run = harvest.run(given.job)
    found = run.directions(given.mode)[given.direction]
    print(f"{'at':<18}  {'AUROC, held out':<18}  accuracy")
    for at, direction in found.items():
        print(f"{at:<18}  {direction.evaluation.auroc!s:<18}  {direction.evaluation.accuracy}")

    best = run.best(given.direction, given.mode)
    if best.shuffled is None:
        raise SystemExit("too few documents are held out to judge it by; a larger data.sample gives more")
    print(f"\nbest in folds of the training part: {best.at}; with shuffled labels {best.shuffled:.2f} held out")
    print(best.direction)

    model, tokenizer = load(tomllib.loads(Path(given.job).read_text())["model"]["name"])
    for prompt in given.prompt or PROMPTS:
        print(f"\n{prompt}")
        for scale in (given.scale, 0.0, -given.scale):
            with harvest.steer(model, {best.at: best.direction}, scale, positions="generated"):
                print(f"{scale:+6.1f}  ... {written(model, tokenizer, prompt, given.tokens)}")


if __name__ == "__main__":
    main()
