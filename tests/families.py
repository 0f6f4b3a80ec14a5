"""A tiny random model of every family in the table of sites, and of some that are not in it; nothing is downloaded.

Sizes differ wherever a mix-up could hide: 16 hidden, 2 heads, 3 layers, 24 or 32 neurons, 4 experts, 64 tokens.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from tiny import amplify
from transformers import CONFIG_MAPPING, AutoModel, AutoModelForCausalLM, PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

from harvest.model.points import SITES

LAYERS, HIDDEN, HEADS, EXPERTS, VOCABULARY = 3, 16, 2, 4, 64
_H = {
    "hidden_size": HIDDEN,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "intermediate_size": 24,
    "max_position_embeddings": 64,
}
_KV = {**_H, "num_key_value_heads": 1}
_N = {"n_embd": HIDDEN, "n_layer": LAYERS, "n_head": HEADS, "n_positions": 64}
_WIDE = {**_KV, "head_dim": 12}  # heads that together are wider than the residual stream
_MOE = {"num_experts": EXPERTS, "num_experts_per_tok": 2}
_SLIDING = {"sliding_window": 4, "layer_types": ["sliding_attention", "full_attention", "sliding_attention"]}
_VISION = {"hidden_size": HIDDEN, "num_hidden_layers": LAYERS, "num_attention_heads": 2, "intermediate_size": 24}
_DEEPSEEK = {
    "moe_intermediate_size": 8,
    "n_routed_experts": EXPERTS,
    "num_experts_per_tok": 2,
    "n_group": 2,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "q_lora_rank": 8,
    "kv_lora_rank": 8,
    "qk_rope_head_dim": 4,
    "qk_nope_head_dim": 4,
    "v_head_dim": 6,
    "n_shared_experts": 1,
    "num_key_value_heads": 2,
}
CONFIGS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", _KV),
    "mistral": ("mistral", {**_KV, "sliding_window": 4}),
    "qwen2": ("qwen2", _KV),
    "qwen3": ("qwen3", _WIDE),
    "gemma": ("gemma", _WIDE),
    "gemma2": ("gemma2", {**_WIDE, "sliding_window": 4}),
    "gemma3_text": ("gemma3_text", {**_WIDE, **_SLIDING}),
    "gemma3_both_ways": ("gemma3_text", {**_WIDE, **_SLIDING, "use_bidirectional_attention": True}),
    "gemma3": (
        "gemma3",
        {
            "text_config": {**_WIDE, **_SLIDING, "vocab_size": VOCABULARY},
            "vision_config": {**_VISION, "image_size": 8, "patch_size": 4},
            "mm_tokens_per_image": 4,
            "image_token_index": 60,
            "boi_token_index": 61,
            "eoi_token_index": 62,
        },
    ),
    "llava": (
        "llava",
        {
            "text_config": {**_KV, "model_type": "llama", "vocab_size": VOCABULARY},
            "vision_config": {**_VISION, "model_type": "clip_vision_model", "image_size": 8, "patch_size": 4},
            "image_token_index": 60,
        },
    ),
    "qwen2_5_vl": (
        "qwen2_5_vl",
        {
            "text_config": {
                **_KV,
                "vocab_size": VOCABULARY,
                "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 1, 2]},
            },
            "vision_config": {"depth": LAYERS, "hidden_size": HIDDEN, "num_heads": 2, "out_hidden_size": HIDDEN},
            "image_token_id": 60,
            "video_token_id": 61,
            "vision_start_token_id": 62,
            "vision_end_token_id": 63,
        },
    ),
    "qwen2_vl": (
        "qwen2_vl",
        {
            "text_config": {
                **_KV,
                "vocab_size": VOCABULARY,
                "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 1, 2]},
            },
            "vision_config": {"depth": LAYERS, "embed_dim": HIDDEN, "num_heads": 2, "hidden_size": HIDDEN},
            "image_token_id": 60,
            "video_token_id": 61,
            "vision_start_token_id": 62,
            "vision_end_token_id": 63,
        },
    ),
    "phi": ("phi", _H),
    "phi3": ("phi3", _KV),
    "olmo": ("olmo", _KV),
    "olmo2": ("olmo2", _KV),
    "olmo3": ("olmo3", {**_KV, **_SLIDING}),
    "smollm3": ("smollm3", _KV),
    "glm4": ("glm4", {**_WIDE, "partial_rotary_factor": 0.5}),
    "granite": ("granite", {**_KV, "residual_multiplier": 0.22, "embedding_multiplier": 3.0}),
    "starcoder2": ("starcoder2", {**_KV, "sliding_window": 4}),
    "stablelm": ("stablelm", _KV),
    "stablelm_parallel": ("stablelm", {**_KV, "use_parallel_residual": True}),
    "cohere": ("cohere", _KV),
    "cohere2": ("cohere2", {**_KV, **_SLIDING}),
    "mixtral": ("mixtral", {**_KV, "num_local_experts": EXPERTS, "num_experts_per_tok": 2}),
    "qwen3_moe": ("qwen3_moe", {**_KV, **_MOE, "head_dim": 8, "moe_intermediate_size": 8, "mlp_only_layers": [1]}),
    "olmoe": ("olmoe", {**_KV, **_MOE}),
    "deepseek_v3": ("deepseek_v3", {**_H, **_DEEPSEEK}),
    "gpt_oss": (
        "gpt_oss",
        {**_KV, **_SLIDING, "head_dim": 8, "num_local_experts": EXPERTS, "num_experts_per_tok": 2},
    ),
    "gpt2": ("gpt2", _N),
    "gpt_neo": (
        "gpt_neo",
        {
            "hidden_size": HIDDEN,
            "num_layers": LAYERS,
            "num_heads": HEADS,
            "attention_types": [[["global", "local", "global"], 1]],
            "window_size": 4,
            "max_position_embeddings": 64,
        },
    ),
    "gptj": ("gptj", {**_N, "rotary_dim": 4}),
    "gpt_neox": ("gpt_neox", _H),
    "gpt_neox_serial": ("gpt_neox", {**_H, "use_parallel_residual": False}),
    "opt": (
        "opt",
        {
            "hidden_size": HIDDEN,
            "num_hidden_layers": LAYERS,
            "num_attention_heads": HEADS,
            "ffn_dim": 24,
            "max_position_embeddings": 64,
            "word_embed_proj_dim": HIDDEN,
        },
    ),
    "opt_350m": (
        "opt",
        {
            "hidden_size": HIDDEN,
            "num_hidden_layers": LAYERS,
            "num_attention_heads": HEADS,
            "ffn_dim": 24,
            "max_position_embeddings": 64,
            "word_embed_proj_dim": 8,
            "do_layer_norm_before": False,
        },
    ),
    "bloom": ("bloom", {"hidden_size": HIDDEN, "n_layer": LAYERS, "n_head": HEADS}),
    "bloom_post_norm": (
        "bloom",
        {
            "hidden_size": HIDDEN,
            "n_layer": LAYERS,
            "n_head": HEADS,
            "apply_residual_connection_post_layernorm": True,
        },
    ),
    "falcon": ("falcon", {**_H, "parallel_attn": True}),
    "falcon_serial": ("falcon", {**_H, "parallel_attn": False, "multi_query": False, "alibi": True}),
    "falcon_new": ("falcon", {**_H, "new_decoder_architecture": True, "num_kv_heads": 1}),
    "mpt": ("mpt", {"d_model": HIDDEN, "n_layers": LAYERS, "n_heads": HEADS, "max_seq_len": 64}),
    "mamba": ("mamba", {"hidden_size": HIDDEN, "num_hidden_layers": LAYERS, "state_size": 4}),
    "bert": ("bert", _H),
    "roberta": ("roberta", {**_H, "max_position_embeddings": 66, "pad_token_id": 1}),
    "xlm-roberta": ("xlm-roberta", {**_H, "max_position_embeddings": 66, "pad_token_id": 1}),
    "modernbert": ("modernbert", {**_H, "global_attn_every_n_layers": 2, "local_attention": 4, "pad_token_id": 0}),
    # not in the table
    "helium": ("helium", {**_KV, "head_dim": 8}),
    "qwen2_moe": ("qwen2_moe", {**_KV, **_MOE, "moe_intermediate_size": 8, "shared_expert_intermediate_size": 8}),
    "t5": ("t5", {"d_model": HIDDEN, "num_layers": 2, "num_decoder_layers": 2, "num_heads": 2, "d_ff": 24, "d_kv": 8}),
}
"""Family -> model type and its settings."""
ENCODERS = ("bert", "roberta", "xlm-roberta", "modernbert")
NOT_IN_THE_TABLE = ("helium", "qwen2_moe", "t5")
FAMILIES = [family for family in CONFIGS if family not in NOT_IN_THE_TABLE]
DENSE = set(SITES) - {"router"}
MIXTURE = set(SITES) - {"mlp_neurons"}
BOTH = DENSE | MIXTURE
PARALLEL = DENSE - {"residual_mid"}
POST_NORM = PARALLEL - {"attn_contribution", "mlp_contribution"}
NO_LAST_NORM = POST_NORM - {"final_norm"}
HAVE: dict[str, set[str]] = {
    **dict.fromkeys(FAMILIES, DENSE),
    **dict.fromkeys(["mixtral", "olmoe", "gpt_oss"], MIXTURE),
    **dict.fromkeys(["qwen3_moe", "deepseek_v3"], BOTH),
    **dict.fromkeys(
        ["phi", "cohere", "cohere2", "gptj", "gpt_neox", "falcon", "falcon_new", "stablelm_parallel"], PARALLEL
    ),
    **dict.fromkeys(["bert", "roberta", "xlm-roberta", "opt_350m"], NO_LAST_NORM),
    "bloom_post_norm": POST_NORM,
    "mamba": {"residual", "residual_pre", "embedding", "final_norm"},
}
"""Family -> the sites it has, written down apart from the table of the package."""
RNG = np.random.default_rng(7)
DOCUMENTS = [RNG.integers(3, 60, length).tolist() for length in (6, 1, 13, 2, 10, 3, 13)] + [[5, 0, 0, 9, 1, 0], [0, 7]]
"""Some hold the ids that pad, begin and end: they are tokens like others."""

LEAK = {"opt", "opt_350m", "bloom", "bloom_post_norm", "mpt", "mamba", "gpt_oss", "qwen2_vl", "qwen2_5_vl", *ENCODERS}
"""Families whose documents see each other in a row, or whose positions are not what they were."""
REFUSED = LEAK | {"gemma3_both_ways", "falcon_serial"}
APART = [family for family in FAMILIES if family not in REFUSED]


def tiny_config(family: str, **more: Any) -> Any:
    """The config of a family's tiny model; special tokens lie inside the vocabulary."""
    model_type, settings = CONFIGS[family]
    ids = {"bos_token_id": 0, "eos_token_id": 1, "pad_token_id": None}
    if "text_config" in settings:
        settings = {**settings, "text_config": {**ids, **settings["text_config"]}}
    else:
        ids["vocab_size"] = VOCABULARY
    return CONFIG_MAPPING[model_type](**{**ids, **settings, **more})


def tiny_family(family: str, seed: int = 0, **more: Any) -> PreTrainedModel:
    """Amplified weights, biases and gains too, so that no part of a block is the identity; float32, eval."""
    config = tiny_config(family, **more)
    headed = type(config) in MODEL_FOR_CAUSAL_LM_MAPPING and family not in ENCODERS
    torch.manual_seed(seed)
    model = amplify((AutoModelForCausalLM if headed else AutoModel).from_config(config), seed)
    generator = torch.Generator().manual_seed(seed + 1)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() == 1 and "vision" not in name:
                parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.1)
    return model
