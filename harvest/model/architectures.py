"""Where the blocks and sublayers of each family lie: the one table from which every site follows.

A path in a block is below the block, a path of the trunk below the trunk: the part of a model that turns tokens into
the states which its head reads. A family joins the table when a test compares every site of it with plain hooks.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any, cast

from torch import nn

from harvest.errors import RequestError

Says = bool | tuple[str, ...]
"""Always, never, or when one of these settings of the model's config says so (`not x`: when `x` is false)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Architecture:
    """Where things are in the models of a family; the defaults are Llama's."""

    blocks: str = "layers"
    """List of blocks in the trunk."""
    final_norm: str | None = "norm"
    """In the trunk: what comes between the last block and the head."""
    attn: str | None = "self_attn"
    """Attention module of a block: its input is `attn_input`."""
    attn_out: str | None = None
    """Whose output is `attn`, where the attention module itself adds the residual or a norm; else it is `attn`."""
    o_proj: str | None = "self_attn.o_proj"
    """Output projection of the attention: its input is `attn_heads`."""
    mlp: str | None = "mlp"
    """Feed-forward module of a block: its input is `mlp_input`."""
    mlp_out: str | None = None
    """Whose output is `mlp`, where the feed-forward module itself adds the residual or a norm; else it is `mlp`."""
    down_proj: str | None = "mlp.down_proj"
    """Down projection of a dense feed-forward: its input is `mlp_neurons`."""
    router: str | None = None
    """Of a mixture of experts: its (first) output is the logits."""
    mid: str | None = "post_attention_layernorm"
    """Whose input is the residual stream between attention and MLP: the MLP's norm, or the MLP where it has none."""
    after_attn: str | None = None
    """Norm between the attention and the residual stream: its output is what is added."""
    after_mlp: str | None = None
    """Norm between the MLP and the residual stream."""
    scale: str | None = None
    """Attribute of a block: the factor on what both sublayers add."""
    parallel: Says = False
    """Attention and MLP read the same residual stream, so nothing lies between them."""
    post_norm: Says = False
    """A norm follows each sum, so that the stream is not the sum of what the sublayers add."""
    causal: bool = True
    """A token never looks to its right, where the padding is: then no mask is needed."""
    positions_after_padding: bool = False
    """Learned positions are counted from the padding id + 1, so that the last ones of the table are the limit."""


_LLAMA = Architecture()
_MOE = Architecture(router="mlp.gate")
_GEMMA2 = Architecture(
    mid="pre_feedforward_layernorm", after_attn="post_attention_layernorm", after_mlp="post_feedforward_layernorm"
)
_OLMO2 = Architecture(mid="mlp", after_attn="post_attention_layernorm", after_mlp="post_feedforward_layernorm")
_COHERE = Architecture(mid=None, parallel=True)
_BERT = Architecture(
    blocks="encoder.layer",
    final_norm=None,
    attn="attention",
    attn_out="attention.output.dense",
    o_proj="attention.output.dense",
    mlp="intermediate",
    mlp_out="output.dense",
    down_proj="output.dense",
    post_norm=True,
    causal=False,
)
_ROBERTA = dataclasses.replace(_BERT, positions_after_padding=True)
ARCHITECTURES: dict[str, Architecture] = {
    "llama": _LLAMA,
    "mistral": _LLAMA,
    "qwen2": _LLAMA,
    "qwen2_vl_text": _LLAMA,
    "qwen2_5_vl_text": _LLAMA,
    "qwen3": _LLAMA,
    "gemma": _LLAMA,
    "gemma2": _GEMMA2,
    "gemma3_text": _GEMMA2,
    "phi": Architecture(
        o_proj="self_attn.dense", down_proj="mlp.fc2", mid=None, parallel=True, final_norm="final_layernorm"
    ),
    "phi3": _LLAMA,
    "smollm3": _LLAMA,
    "olmo": _LLAMA,
    "olmo2": _OLMO2,
    "olmo3": _OLMO2,
    "granite": Architecture(scale="residual_multiplier"),
    "starcoder2": Architecture(down_proj="mlp.c_proj"),
    "stablelm": Architecture(parallel=("use_parallel_residual",)),
    "cohere": _COHERE,
    "cohere2": _COHERE,
    "glm4": Architecture(after_attn="post_self_attn_layernorm", after_mlp="post_mlp_layernorm"),
    "mixtral": _MOE,
    "qwen3_moe": _MOE,
    "olmoe": _MOE,
    "deepseek_v3": _MOE,
    "gpt_oss": Architecture(router="mlp.router"),
    "gpt2": Architecture(
        blocks="h", final_norm="ln_f", attn="attn", o_proj="attn.c_proj", mid="ln_2", down_proj="mlp.c_proj"
    ),
    "gpt_neo": Architecture(
        blocks="h", final_norm="ln_f", attn="attn", o_proj="attn.attention.out_proj", mid="ln_2", down_proj="mlp.c_proj"
    ),
    "gptj": Architecture(
        blocks="h",
        final_norm="ln_f",
        attn="attn",
        o_proj="attn.out_proj",
        mid=None,
        down_proj="mlp.fc_out",
        parallel=True,
    ),
    "gpt_neox": Architecture(
        final_norm="final_layer_norm",
        attn="attention",
        o_proj="attention.dense",
        down_proj="mlp.dense_4h_to_h",
        parallel=("use_parallel_residual",),
    ),
    "opt": Architecture(
        blocks="decoder.layers",
        final_norm="decoder.final_layer_norm",
        o_proj="self_attn.out_proj",
        mlp="fc1",
        mlp_out="fc2",
        down_proj="fc2",
        mid="final_layer_norm",
        post_norm=("not do_layer_norm_before",),
    ),
    "bloom": Architecture(
        blocks="h",
        final_norm="ln_f",
        attn="self_attention",
        attn_out="self_attention.dense",
        o_proj="self_attention.dense",
        mlp_out="mlp.dense_4h_to_h",
        down_proj="mlp.dense_4h_to_h",
        post_norm=("apply_residual_connection_post_layernorm",),
    ),
    "falcon": Architecture(
        blocks="h",
        final_norm="ln_f",
        attn="self_attention",
        o_proj="self_attention.dense",
        down_proj="mlp.dense_4h_to_h",
        parallel=("parallel_attn", "new_decoder_architecture"),
    ),
    "mpt": Architecture(
        blocks="blocks",
        final_norm="norm_f",
        attn="attn",
        o_proj="attn.out_proj",
        mlp="ffn",
        mlp_out="ffn.down_proj",
        down_proj="ffn.down_proj",
        mid="norm_2",
    ),
    "mamba": Architecture(final_norm="norm_f", attn=None, o_proj=None, mlp=None, down_proj=None, mid=None),
    "bert": _BERT,
    "roberta": _ROBERTA,
    "xlm-roberta": _ROBERTA,
    "modernbert": Architecture(
        final_norm="final_norm", attn="attn", o_proj="attn.Wo", mid="mlp_norm", down_proj="mlp.Wo", causal=False
    ),
}
"""By the `model_type` of the config that describes the text model."""

WRAPPERS = {
    "gemma3": "language_model",
    "llava": "language_model",
    "qwen2_vl": "language_model",
    "qwen2_5_vl": "language_model",
}
"""Multimodal models by `model_type`: where in their trunk the text model lies. Text only: nothing else of them runs."""


def config_of(model: Any) -> Any:
    """The config of a model's text part; RequestError for an object that is no transformers model."""
    if not hasattr(getattr(model, "config", None), "get_text_config"):
        raise RequestError(f"model: {type(model).__name__} has no transformers config; allowed are transformers models")
    return model.config.get_text_config()


def says(flag: Says, config: Any) -> bool:
    """What a flag of the table comes to on a model with this config."""
    if isinstance(flag, bool):
        return flag
    return any(
        not getattr(config, setting.removeprefix("not "), True)
        if setting.startswith("not ")
        else bool(getattr(config, setting, False))
        for setting in flag
    )


def input_embedding(model: Any) -> nn.Module | None:
    """What turns the ids that a model reads into vectors; None where transformers cannot tell."""
    try:
        embedding: nn.Module | None = model.get_input_embeddings()
    except NotImplementedError:
        return None
    return embedding


def vocabulary_of(model: Any) -> int:
    """How many token ids a model reads: rows of its input embedding, or what its config says of an odd one.

    RequestError for a model that reads no ids.
    """
    size = getattr(input_embedding(model), "num_embeddings", None) or getattr(config_of(model), "vocab_size", None)
    if not isinstance(size, int):
        raise RequestError(f"model.name: {model.config.model_type!r} reads no token ids; allowed are models of text")
    return size


def unwrapped(model: Any) -> nn.Module:
    """The transformers model that the paths of modules start at; PEFT wrappers are looked through.

    RequestError for a wrapper that puts learned vectors before every document: they are no part of this model.
    """
    if not hasattr(model, "get_base_model"):
        return cast(nn.Module, model)
    for adapter in getattr(model, "active_adapters", ()):
        if getattr(model.peft_config.get(adapter), "is_prompt_learning", False):
            raise RequestError(
                f"model: its adapter {adapter!r} is {model.peft_config[adapter].peft_type.value}, whose virtual tokens "
                "belong to no document; allowed are adapters that change weights, such as LoRA"
            )
    return cast(nn.Module, model.get_base_model())


def trunk_of(model: Any) -> nn.Module:
    """The part of a model that turns tokens into states: without its head, and the text part where there are others."""
    inner = unwrapped(model)
    trunk: nn.Module = getattr(inner, "base_model", inner)
    wrapped = WRAPPERS.get(model.config.model_type)
    return trunk.get_submodule(wrapped) if wrapped is not None else trunk


def architecture_of(model: Any) -> Architecture | None:
    """The table's entry for a model; None where there is none; RequestError for an encoder-decoder."""
    config = config_of(model)
    if getattr(model.config, "is_encoder_decoder", False):
        raise RequestError(
            f"model.name: {model.config.model_type!r} is an encoder-decoder model, whose two stacks read two texts; "
            "allowed are decoder-only models and encoders"
        )
    if config is not model.config and model.config.model_type not in WRAPPERS:
        return None  # another wrapper: its text model is known, but not where it lies
    trunk = trunk_of(model)
    kinds = type(getattr(trunk, "_orig_mod", trunk)).__mro__  # where torch.compile keeps what it wraps
    if not any(kind.__module__.startswith("transformers.models.") for kind in kinds):
        return None  # remote code may call itself `llama` and lie otherwise
    return ARCHITECTURES.get(config.model_type)


def blocks_path(model: Any) -> str:
    """Where in the trunk the list of blocks is; RequestError for an architecture whose blocks cannot be told."""
    architecture = architecture_of(model)
    if architecture is not None:
        return architecture.blocks
    n_layers = getattr(config_of(model), "num_hidden_layers", None)
    lists: list[str] = [
        path
        for path, module in trunk_of(model).named_modules()
        if isinstance(module, nn.ModuleList) and len(module) == n_layers
    ]
    outermost = [path for path in lists if not any(path.startswith(f"{other}.") for other in lists)]
    if len(outermost) != 1:
        raise RequestError(
            f"model.name: architecture {model.config.model_type!r} is not supported, and its blocks cannot be told: "
            f"it has {len(outermost)} lists of {n_layers} blocks; "
            f"with one such list, residual and module:PATH work; supported are {', '.join([*ARCHITECTURES, *WRAPPERS])}"
        )
    (path,) = outermost
    return path


def decoder_layers(model: Any) -> nn.ModuleList:
    """The model's blocks, first to last; RequestError for an architecture whose blocks cannot be told."""
    path = blocks_path(model)  # before the trunk: it says what is wrong with a model that has none
    blocks = trunk_of(model).get_submodule(path)
    assert isinstance(blocks, nn.ModuleList)
    return blocks


def needs_mask(model: Any) -> bool:
    """Whether padding on the right could be seen: everywhere but in models known to be causal."""
    architecture, config = architecture_of(model), config_of(model)
    looks_right = getattr(config, "use_bidirectional_attention", False) or not getattr(config, "is_causal", True)
    return architecture is None or not architecture.causal or bool(looks_right)


def unused_positions(config: Any) -> int:
    """Positions of a config's limit that no token ever takes."""
    architecture, padding = ARCHITECTURES.get(config.model_type), getattr(config, "pad_token_id", None)
    return (padding or 0) + 1 if architecture is not None and architecture.positions_after_padding else 0


def is_encoder(config: Any) -> bool:
    """Whether a config describes an encoder of the table: it is loaded without a head, as it was trained to be used."""
    architecture = ARCHITECTURES.get(config.model_type)
    return architecture is not None and not architecture.causal and not getattr(config, "is_decoder", False)
