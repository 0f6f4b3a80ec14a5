"""The logits of a few tokens at a few places: the model's own head and whatever the model makes of its output.

The head is given the states of those places alone, [1, k, d] instead of [B, T, d]; everything else is the model's own
forward, so that scales, soft caps and biases are those of its architecture, known or not.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import nn

from harvest.errors import RequestError, WorkError
from harvest.model.architectures import unwrapped
from harvest.model.probe import first_tensor

SETTING = "answers"
LOGITS_BYTES = 256 * 2**20
"""Of float32 logits in one forward: of 128,000 tokens 524 places, of which a batch of short texts may have more."""


def head_of(model: Any) -> nn.Module:
    """What gives logits; works on a skeleton. RequestError for a model without, or whose checkpoint has none."""
    inner: Any = unwrapped(model)
    head: nn.Module | None = inner.get_output_embeddings()
    if head is None:
        raise RequestError(
            f"{SETTING}: {type(inner).__name__} has no head that gives logits; allowed are language models with one"
        )
    config, kind = inner.config, type(inner).__name__
    of_checkpoint = getattr(config, "architectures", None) or [kind]
    known = any(one.lower() == kind.lower() or "CausalLM" in one or "LMHead" in one for one in of_checkpoint)
    if not known and not getattr(config.get_text_config(), "tie_word_embeddings", False):
        raise RequestError(
            f"{SETTING}: the checkpoint is a {of_checkpoint[0]}, which has no head of its own; allowed are language "
            f"models with one ({kind})"
        )
    return head


def head_size(model: Any) -> int:
    """Tokens that have a logit."""
    head: Any = head_of(model)
    return int(getattr(head, "out_features", 0) or len(head.weight))


class Head:
    """The head of one model, and the tokens that are asked for."""

    def __init__(self, model: Any, tokens: Sequence[int]) -> None:
        self._head, self._tokens = head_of(model), list(tokens)
        self._places = max(1, LOGITS_BYTES // (4 * head_size(model)))
        self._ran = False

    def parts(self, source: np.ndarray) -> list[np.ndarray]:
        """The places int64 [k] in parts that one forward has room for."""
        return [source[start : start + self._places] for start in range(0, len(source), self._places)]

    @contextmanager
    def at(self, source: np.ndarray) -> Iterator[None]:
        """For one forward the head sees the places int64 [k] alone, flat indices b * T + t."""
        self._ran = False

        def gather(_module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
            hidden_BTd = args[0] if args else next(iter(kwargs.values()))
            index = torch.from_numpy(source).to(hidden_BTd.device)
            self._ran = True
            return (hidden_BTd.reshape(-1, hidden_BTd.shape[-1]).index_select(0, index)[None], *args[1:]), {}

        handle = self._head.register_forward_pre_hook(gather, with_kwargs=True)
        try:
            yield
        finally:
            handle.remove()

    def logits(self, output: Any, count: int) -> np.ndarray:
        """float64 [count, tokens] out of what that forward gave. Raises WorkError where it is no such thing."""
        logits = getattr(output, "logits", None)
        logits = first_tensor(output) if logits is None else logits
        if not self._ran or tuple(logits.shape[:2]) != (1, count) or logits.shape[2] <= max(self._tokens):
            raise WorkError(
                f"{SETTING}: the forward gave {tuple(logits.shape)} for {count} places; expected are logits of its head"
            )
        chosen: np.ndarray = logits[0][:, self._tokens].to(torch.float64).cpu().numpy()
        return chosen
