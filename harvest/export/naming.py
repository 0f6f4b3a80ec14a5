"""What a name of a run is called elsewhere: TransformerLens' hooks, or the model's own module paths."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from harvest.errors import RequestError
from harvest.model.points import MODULES, TRANSFORMER_LENS

HOOKS = {site: hook for hook, site in TRANSFORMER_LENS.items()}
OUTPUTS = ("residual", "attn", "mlp", "router", "final_norm", "module")
"""Sites that are the output of the module that the plan names: what a hook on that path gives elsewhere."""
NAMINGS = ("tl", "hf")


def site_and_layer(name: str) -> tuple[str, int | None]:
    """`residual.12` -> ("residual", 12); ("module", None) for a module of the user's."""
    site, colon, _ = name.partition(":")
    if colon and site in MODULES:
        return site, None
    match = re.fullmatch(r"(.+)\.(\d+)", name)
    return (match[1], int(match[2])) if match else (name, None)


def label(name: str, naming: str | None, plan: Mapping[str, Any]) -> str:
    """The name as it is (None), as TransformerLens spells it ("tl") or as a module path ("hf").

    `plan`: name -> its entry in the run's plan. Raises RequestError for a name without such a spelling.
    """
    if naming is None:
        return name
    if naming not in NAMINGS:
        raise RequestError(f"--naming = {naming!r}: allowed are {' and '.join(NAMINGS)}")
    site, layer = site_and_layer(name)
    if naming == "hf":
        if site in OUTPUTS:
            return str(plan[name]["module"])
        raise RequestError(f"--naming = 'hf': {name} is not the output of a module; allowed are {', '.join(OUTPUTS)}")
    if site in HOOKS and layer is not None:
        return f"blocks.{layer}.{HOOKS[site]}"
    if site == "embedding":
        return "blocks.0.hook_resid_pre"
    raise RequestError(
        f"--naming = 'tl': TransformerLens has no name for {name}; it has one for {', '.join(HOOKS)} and embedding: "
        "choose such names with --name, or --naming hf"
    )
