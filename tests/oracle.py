"""Independent right answers: one document alone, unpadded, batch 1, eval, plain forward hooks (O1 of the cases).

Always on the model as transformers builds it: libraries that fold norms and centre weights compute others (E11).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

MODULES = {
    "llama": ("model.layers.{}", "model.layers.{}.self_attn", "model.layers.{}.mlp"),
    "gpt2": ("transformer.h.{}", "transformer.h.{}.attn", "transformer.h.{}.mlp"),
    "gpt_neox": ("gpt_neox.layers.{}", "gpt_neox.layers.{}.attention", "gpt_neox.layers.{}.mlp"),
}
SITES = ("residual", "attn", "mlp")
TOLERANCE_TINY = 1e-5
"""float32 on the tiny models, relative to the row's norm: other batch shapes round by 1e-6, a wrong row is off by 1."""


def alone(model: Any, ids: Any, names: list[str]) -> dict[str, torch.Tensor]:
    """name -> [T, d]: what hooks on the whole model see of this one document."""
    paths = MODULES[model.config.model_type]
    seen: dict[str, torch.Tensor] = {}
    handles = []
    for name in names:
        site, layer = name.rsplit(".", 1)
        module = model.get_submodule(paths[SITES.index(site)].format(layer))

        def take(_m: Any, _a: Any, out: Any, name: str = name) -> None:
            seen[name] = (out[0] if isinstance(out, tuple) else out).detach().clone()[0]

        handles.append(module.register_forward_hook(take))
    training = model.training
    try:
        with torch.no_grad():
            model.eval()(input_ids=torch.as_tensor(np.asarray(ids), dtype=torch.long)[None], use_cache=False)
    finally:
        model.train(training)
        for handle in handles:
            handle.remove()
    return seen


def at_names(model: Any, ids: list[int], names: Sequence[Any]) -> dict[str, torch.Tensor]:
    """The same by hooks at the places of resolved names, with `last`: what the model calls its last hidden state.

    A name tells the module, its side and a factor; other tests hold what the sites are against one another.
    """
    seen: dict[str, torch.Tensor] = {}

    def keep(name: Any, value: Any) -> None:
        first = value[0] if isinstance(value, tuple) else value
        seen.setdefault(str(name), first.detach().clone().reshape(len(ids), -1) * name.scale)

    handles = []
    for name in names:
        module = model.get_submodule(name.module)
        if name.reads == "output":
            handles.append(module.register_forward_hook(lambda _m, _a, out, name=name: keep(name, out)))
        else:
            hook = lambda _m, args, kwargs, name=name: keep(name, args or kwargs["hidden_states"])  # noqa: E731
            handles.append(module.register_forward_pre_hook(hook, with_kwargs=True))
    with torch.no_grad():
        seen["last"] = model(torch.tensor([ids]), use_cache=False, output_hidden_states=True).hidden_states[-1][0]
    for handle in handles:
        handle.remove()
    return seen


def worst_error(stored: torch.Tensor, expected: torch.Tensor) -> float:
    """Largest distance of a row from its expectation, relative to the norm of the expected row."""
    assert stored.shape == expected.shape, (stored.shape, expected.shape)
    if not len(expected):
        return 0.0
    stored, expected = stored.double(), expected.double()
    return float(((stored - expected).norm(dim=-1) / expected.norm(dim=-1).clamp_min(1e-30)).max())


def rows_of(run: Any, document: int) -> list[int]:
    """Row numbers of a document, found in the token table by plain numpy."""
    return np.flatnonzero(run.tokens()["document"].to_numpy() == document).tolist()
