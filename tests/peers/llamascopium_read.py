"""Run by the interpreter of an environment with llamascopium: prints what its loader and its factory give.

python llamascopium_read.py EXPORT HOOK [HOOK ...]
"""

from __future__ import annotations

import json
import sys

import torch
from llamascopium.activation.factory import (
    ActivationFactory,
    ActivationFactoryActivationsSource,
    ActivationFactoryConfig,
    ActivationFactoryTarget,
)
from llamascopium.activation.processors.cached_activation import CachedActivationLoader

export, hooks = sys.argv[1], sys.argv[2:]
found: dict[str, object] = {hook: [] for hook in hooks}
dtypes = set()
for item in CachedActivationLoader({hook: f"{export}/{hook}" for hook in hooks}).process():
    for hook in hooks:
        found[hook].append(item[hook].float().tolist())  # type: ignore[attr-defined]
        dtypes.add(str(item[hook].dtype))
    found.setdefault("tokens", []).append(item["tokens"].tolist())  # type: ignore[attr-defined]

config = ActivationFactoryConfig(
    sources=[ActivationFactoryActivationsSource(name="export", path=export, num_workers=0, prefetch=None)],
    target=ActivationFactoryTarget.ACTIVATIONS_1D,
    hook_points=hooks,
    batch_size=4,
    buffer_size=None,
)
batches = [batch[hooks[0]] for batch in ActivationFactory(config).process()]
print(json.dumps({**found, "dtypes": sorted(dtypes), "batches": torch.cat(batches).float().tolist()}))
