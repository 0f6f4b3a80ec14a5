"""Which models keep windows apart that are packed in one row, by positions that begin anew with each of them.

transformers turns such positions into a block-diagonal mask where a model hands them to the making of its mask, is
given no mask and keeps no cache. A family is left out of LEAKING when a test compares every window with itself alone.
"""

from __future__ import annotations

from typing import Any

from harvest.model.architectures import architecture_of, config_of, needs_mask

MASKED_FROM_POSITIONS = ("eager", "sdpa")
"""Attention implementations in which the block-diagonal mask is tested."""
_BLIND = "its attention mask does not follow the positions"
INT8 = "bitsandbytes' int8 rounds a token by the largest values of all tokens of a forward"
LEAKING = {
    "bloom": _BLIND,
    "gpt_oss": _BLIND,
    "mpt": _BLIND,
    "opt": _BLIND,
    "mamba": "its recurrent state runs on from one to the next",
    "qwen2_vl_text": "its positions have three dimensions",
    "qwen2_5_vl_text": "its positions have three dimensions",
}
"""By the `model_type` of the config that describes the text model."""


def outliers_of_the_batch(config: Any) -> str | None:
    """Why every window of a model must run by itself and unpadded; None where it may share a forward with others.

    `config` may be of a quantized checkpoint or of a model that was quantized while it was loaded.
    """
    given = getattr(config, "quantization_config", None)
    settings = given if isinstance(given, dict) else getattr(given, "__dict__", {})
    in_int8 = settings.get("load_in_8bit") or settings.get("_load_in_8bit")
    return INT8 if in_int8 and settings.get("llm_int8_threshold", 6.0) > 0 else None


def obstacle(model: Any) -> str | None:
    """Why packed windows would see each other in this model, or why nobody can tell; None where they are apart."""
    config = config_of(model)
    kind, attention = repr(config.model_type), config._attn_implementation
    if config.model_type in LEAKING:
        return f"{kind} does not keep packed documents apart: {LEAKING[config.model_type]}"
    if getattr(
        config, "alibi", False
    ):  # Falcon's, rounded to bfloat16 in every dtype: 3 digits of the place in the row
        return f"{kind} with alibi does not keep packed documents apart: its biases count along the whole row"
    if architecture_of(model) is None:
        return f"{kind} is not in the table of architectures"
    if needs_mask(model):
        return f"{kind} looks at the tokens on the right too"
    if attention not in MASKED_FROM_POSITIONS:
        return f"model.attention = {attention!r} is not one of {', '.join(map(repr, MASKED_FROM_POSITIONS))}"
    return None
