"""On a GPU: a Llama of 1B parameters in bfloat16, context 1,024, three names stored, against the bare forward.

    python jobs/bench_gpu.py [--pairs 5] [--wheels FOLDER] [--out jobs/results]
    python jobs/bench_gpu.py --device cpu --tiny          # the same path where there is no GPU: to see that it runs

For a bare machine that has torch and transformers: the model is made from a configuration with random weights, so
nothing is downloaded, and `harvest` is taken from the checkout that this file is in. What the pipeline needs beyond
(pydantic, pyarrow, gguf, google-crc32c, threadpoolctl) is installed there, or carried as a folder of wheels, which
`make .peers/wheels/installed` fills for this machine's kind of Python; they are unpacked into a temporary folder.
"""

from __future__ import annotations

import argparse
import atexit
import shutil
import statistics
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from measuring import Found, NotHereError, Row, in_turn, main, ratios

if TYPE_CHECKING:
    from work import Work

LAYERS = [4, 8, 12]
GOAL = 0.95
SIZES = {
    "vocab_size": 128_256,
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_hidden_layers": 16,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 8192,
}
"""Of a 1B Llama; the output weights are those of the input."""
TINY = {"vocab_size": 300, "hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 8}


def carry(wheels: Path | None) -> None:
    """Makes this checkout, and what the wheels hold, importable."""
    sys.path.insert(0, str(Path(__file__).parents[1]))
    if wheels is None:
        return
    folder = tempfile.mkdtemp(prefix="harvest-wheels-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    for wheel in sorted(wheels.glob("*.whl")):
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(folder)
    sys.path.append(folder)  # last: what is installed here goes first


@cache
def prepared(device: str, tiny: bool, tokens: int, batch: int, threads: int) -> Work:
    """The model on its device, and random windows. Raises NotHereError."""
    import torch
    import transformers

    if device == "cuda" and not torch.cuda.is_available():
        raise NotHereError("no CUDA device on this machine")
    from work import Work

    context = 32 if tiny else 1024
    work = Work(tokens, threads, window=context, batch=batch)
    torch.manual_seed(0)
    with torch.device(device):
        config = transformers.LlamaConfig(**{**SIZES, **(TINY if tiny else {})}, tie_word_embeddings=True)
        model = transformers.LlamaForCausalLM(config)
    work.model = model.to(torch.bfloat16).eval()
    work.tokenizer = numbers_tokenizer()
    ids = torch.randint(3, config.vocab_size, (tokens // context, context), device="cpu")
    work.windows = [{"ids": window} for window in ids.tolist()]
    return work


def numbers_tokenizer() -> Any:
    """One is needed, though nothing is tokenised: documents are ids."""
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    words = Tokenizer(models.WordLevel({"<s>": 1, "</s>": 2, "?": 0}, unk_token="?"))
    return PreTrainedTokenizerFast(tokenizer_object=words, bos_token="<s>", eos_token="</s>", unk_token="?")


def measure(asked: argparse.Namespace, moments: bool) -> Found:
    carry(asked.wheels)
    tokens = asked.tokens if not (asked.tiny or asked.quick) else 4096 if asked.tiny else 65_536
    work = prepared(asked.device, asked.tiny, tokens, asked.batch, asked.threads)
    import torch

    where = torch.cuda.get_device_name() if asked.device == "cuda" else "CPU"
    with tempfile.TemporaryDirectory(dir=asked.folder) as name:
        folder = Path(name)
        tables = {"capture": {"layers": LAYERS}, "statistics": {"moments": moments}}
        pipeline = work.pipeline(work.plan(folder, **tables), folder)
        timings = in_turn(partial(work.bare, LAYERS[-1]), partial(work.harvest, pipeline, folder), asked.pairs)
    speed = work.tokens / statistics.median(seconds for _, seconds in timings)
    size = sum(parameter.numel() for parameter in work.model.parameters()) / 1e9
    return Found(figures=ratios(timings), remark=f"{where}, {size:.2f}B parameters, {speed:,.0f} tokens/s")


def rows(asked: argparse.Namespace) -> Iterator[Row]:
    kind = f"{asked.device.upper()}, {'tiny' if asked.tiny else '1B'} Llama, bfloat16, residual at 3 layers stored"
    yield Row(what=f"{kind} / limit", goal=GOAL, measure=partial(measure, asked, False))
    yield Row(what=f"{kind}, with moments / limit", goal=None, measure=partial(measure, asked, True))


def more(options: argparse.ArgumentParser) -> None:
    options.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    options.add_argument("--tiny", action="store_true", help="a model of a few thousand parameters, context 32")
    options.add_argument("--tokens", type=int, default=262_144)
    options.add_argument("--batch", type=int, default=16, help="windows in a forward")
    options.add_argument("--wheels", type=Path, help="a folder of wheels to take what is not installed from")
    options.add_argument("--folder", type=Path, help="where the run is written, a temporary folder by default")


if __name__ == "__main__":
    main(__doc__, rows, more)
