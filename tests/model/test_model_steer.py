"""`harvest.steer` against hooks made by hand, on every kind of call that a model gets."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from tiny import tiny_gpt2, tiny_llama, tiny_neox

import harvest
from harvest.errors import RequestError

IDS = torch.tensor([[5, 9, 2, 7], [3, 3, 8, 1]])
VECTOR = np.random.default_rng(0).normal(size=16)
UNIT = torch.from_numpy(VECTOR / np.linalg.norm(VECTOR)).float()
RAW = torch.from_numpy(VECTOR).float()


def logits(model: Any, ids: torch.Tensor = IDS, **more: Any) -> torch.Tensor:
    with torch.no_grad():
        return model(ids, **more).logits


def by_hand(model: Any, change: Any, paths: list[str], ids: torch.Tensor = IDS) -> torch.Tensor:
    """Logits with `change` put on the outputs of these modules by hooks of the test's own."""

    def hook(_m: Any, _a: Any, output: Any) -> Any:
        return (change(output[0]), *output[1:]) if isinstance(output, tuple) else change(output)

    handles = [model.get_submodule(path).register_forward_hook(hook) for path in paths]
    try:
        return logits(model, ids)
    finally:
        for handle in handles:
            handle.remove()


CHANGES = {
    ("add", "raw"): lambda h: h + 2.5 * RAW,
    ("add", "unit"): lambda h: h + 2.5 * UNIT,
    ("ablate", "raw"): lambda h: h - 2.5 * (h @ UNIT)[..., None] * UNIT,
    ("project", "raw"): lambda h: 2.5 * (h @ UNIT)[..., None] * UNIT,
}


@pytest.mark.parametrize(("mode", "unit"), list(CHANGES))
@pytest.mark.parametrize(
    ("build", "path"),
    [(tiny_llama, "model.layers.{}"), (tiny_gpt2, "transformer.h.{}"), (tiny_neox, "gpt_neox.layers.{}")],
)
def test_every_mode_is_the_hook_that_one_would_write(build: Any, path: str, mode: str, unit: str) -> None:
    model = build()
    plain = logits(model)
    expected = by_hand(model, CHANGES[mode, unit], [path.format(1)])
    with harvest.steer(model, VECTOR, 2.5, mode=mode, unit=unit, layers=[1]):
        steered = logits(model)
    assert torch.allclose(steered, expected, atol=1e-4, rtol=1e-5)
    assert not torch.allclose(steered, plain, atol=1e-2)
    assert torch.equal(logits(model), plain)


def test_all_layers_and_other_sites_are_changed_where_they_are(tmp_path: Any) -> None:
    model = tiny_llama()
    expected = by_hand(model, CHANGES["add", "raw"], [f"model.layers.{i}.mlp" for i in range(3)])
    with harvest.steer(model, VECTOR, 2.5, sites=["mlp"]):
        assert torch.allclose(logits(model), expected, atol=1e-4)
    expected = by_hand(model, CHANGES["add", "raw"], ["model.layers.0"])
    with harvest.steer(model, VECTOR, 2.5, sites=["residual_pre"], layers=[1]):
        assert torch.allclose(logits(model), expected, atol=1e-4)


def test_a_runs_directions_act_each_at_its_own_place() -> None:
    model = tiny_llama()
    rng = np.random.default_rng(1)
    found = {
        f"residual.{layer}": harvest.concept_direction(rng.normal(size=(20, 16)) + layer, np.arange(20) % 2)
        for layer in (0, 2)
    }
    handles = []
    for layer in (0, 2):
        raw = torch.from_numpy(found[f"residual.{layer}"].raw.copy()).float()
        handles.append(
            model.model.layers[layer].register_forward_hook(
                lambda _m, _a, out, raw=raw: (out[0] + raw, *out[1:]) if isinstance(out, tuple) else out + raw
            )
        )
    expected = logits(model)
    for handle in handles:
        handle.remove()
    with harvest.steer(model, found, 1.0):
        assert torch.allclose(logits(model), expected, atol=1e-4)
    with pytest.raises(RequestError, match=r"residual\.1"), harvest.steer(model, found, 1.0, layers=[1]):
        pass


def greedy(model: Any, prompt: torch.Tensor, count: int, start: int) -> list[int]:
    """Greedy tokens with the whole sequence read anew each time, and positions from `start` on changed by hand."""
    ids = prompt
    for _ in range(count):
        change = lambda h: torch.cat([h[:, :start], CHANGES["add", "raw"](h[:, start:])], dim=1)  # noqa: E731
        ids = torch.cat([ids, by_hand(model, change, ["model.layers.1"], ids)[:, -1:].argmax(-1)], dim=1)
    return ids[0, prompt.shape[1] :].tolist()


@pytest.mark.parametrize("use_cache", [True, False])
@pytest.mark.parametrize("positions", ["all", "generated"])
def test_generation_is_steered_token_by_token(use_cache: bool, positions: str) -> None:
    model, prompt = tiny_llama(), IDS[:1]
    model.generation_config.eos_token_id = None  # it would end early
    expected = greedy(model, prompt, 6, 0 if positions == "all" else prompt.shape[1] - 1)
    settings = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 1, "use_cache": use_cache}
    with harvest.steer(model, VECTOR, 2.5, layers=[1], positions=positions):
        made = model.generate(prompt, attention_mask=torch.ones_like(prompt), **settings)
    assert made[0, prompt.shape[1] :].tolist() == expected


@pytest.mark.parametrize("side", ["left", "right"])
def test_the_last_prompt_token_is_the_last_real_one_on_either_side(side: str) -> None:
    model = tiny_llama()
    short = IDS[1:, :2]
    with harvest.steer(model, VECTOR, 2.5, layers=[1], positions="generated"):
        alone = logits(model, short)
    pad = torch.ones(1, 2, dtype=torch.long)
    padded = torch.cat([pad, short] if side == "left" else [short, pad], dim=1)
    mask = torch.cat([0 * pad, pad] if side == "left" else [pad, 0 * pad], dim=1)
    ids, masks = torch.cat([IDS[:1], padded]), torch.cat([torch.ones(1, 4, dtype=torch.long), mask])
    places = (masks.cumsum(-1) - 1).clamp_min(0)
    with harvest.steer(model, VECTOR, 2.5, layers=[1], positions="generated"):
        together = logits(model, ids, attention_mask=masks, position_ids=places)
    last = 3 if side == "left" else 1
    assert torch.allclose(together[1, last], alone[0, -1], atol=1e-4)


def test_bfloat16_models_are_steered_in_float32() -> None:
    model = tiny_llama().to(torch.bfloat16)
    with harvest.steer(model, VECTOR, 1.0, mode="ablate", layers=[2]):
        out: list[torch.Tensor] = []
        handle = model.model.norm.register_forward_pre_hook(lambda _m, args: out.append(args[0].detach()))
        logits(model)
        handle.remove()
    h = out[0]
    assert h.dtype == torch.bfloat16
    assert float((h.float() @ UNIT).abs().max()) < 2**-7 * float(h.float().norm(dim=-1).max())


def test_the_model_is_left_as_found_after_an_error() -> None:
    model = tiny_llama()

    def hooks() -> int:
        return sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules())

    def fail() -> None:
        with harvest.steer(model, VECTOR, 1.0):
            assert hooks() == 4
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert hooks() == 0


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ({"mode": "twist"}, "twist"),
        ({"unit": "cm"}, "cm"),
        ({"positions": "some"}, "some"),
        ({"scale": float("nan")}, "nan"),
        ({"layers": [9]}, "9"),
        ({"layers": 1}, r"layers = 1: allowed is a list of whole numbers"),
        ({"layers": ["1"]}, r"layers = \['1'\]: allowed is a list of whole numbers"),
        ({"sites": "residual"}, r"sites = 'residual': allowed is a list of names"),
        ({"direction": "up"}, r"direction = 'up': allowed are a Direction, a vector"),
        ({"sites": ["nowhere"]}, "nowhere"),
        ({"direction": np.ones(5)}, r"\(5,\)"),
        ({"direction": np.zeros(16)}, "some length"),
        ({"direction": harvest.concept_direction(np.ones((4, 16)), [0, 0, 1, 1])}, "no difference"),
        ({"direction": {"residual.0@-1": VECTOR, "residual.0@-2": VECTOR}}, "several places"),
    ],
    ids=str,
)
def test_what_cannot_be_steered_is_refused(more: dict[str, Any], words: str) -> None:
    asked = {"direction": VECTOR, "scale": 1.0, **more}
    with pytest.raises(RequestError, match=words), harvest.steer(tiny_llama(), **asked):
        pass
