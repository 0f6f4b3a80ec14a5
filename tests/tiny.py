"""Models and tokenizers small enough to build inside a test; nothing is downloaded.

Weights are amplified (drawn from N(0, 0.3)): with a default initialisation a wrong neighbour changes
values so little that a loose tolerance hides it; amplified, faults are of order 1 and rounding of 1e-6.
"""

from __future__ import annotations

from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    GPTNeoXConfig,
    GPTNeoXForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerFast,
)

BOS, EOS = 0, 1
CHAT_TEMPLATE = (
    "{% for m in messages %}<bos>{{ m['role'] }}\n{{ m['content'] }}<eos>{% endfor %}"
    "{% if add_generation_prompt %}<bos>assistant\n{% endif %}"
)


def amplify(model: PreTrainedModel, seed: int = 0) -> PreTrainedModel:
    """Draws every weight of two or more axes from N(0, 0.3); float32, eval."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() >= 2:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.3)
    return model.float().eval()


def tiny_llama(layers: int = 3, vocab: int = 64, seed: int = 0, **more: Any) -> PreTrainedModel:
    """F-LLAMA of the cases: hidden 16, 2 heads, 64 positions."""
    config = LlamaConfig(
        vocab_size=vocab,
        hidden_size=more.pop("hidden_size", 16),
        intermediate_size=32,
        num_hidden_layers=layers,
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=more.pop("max_position_embeddings", 64),
        bos_token_id=BOS,
        eos_token_id=EOS,
        pad_token_id=None,
        **more,
    )
    return amplify(LlamaForCausalLM(config), seed)


def tiny_gpt2(layers: int = 3, vocab: int = 64, seed: int = 0, **more: Any) -> PreTrainedModel:
    """F-GPT2 of the cases: learned positions, 64 of them."""
    config = GPT2Config(
        vocab_size=vocab,
        n_embd=16,
        n_layer=layers,
        n_head=2,
        n_positions=64,
        bos_token_id=BOS,
        eos_token_id=EOS,
        **more,
    )
    return amplify(GPT2LMHeadModel(config), seed)


def tiny_neox(layers: int = 3, vocab: int = 64, seed: int = 0, **more: Any) -> PreTrainedModel:
    """A GPT-NeoX with parallel attention and MLP."""
    config = GPTNeoXConfig(
        vocab_size=vocab,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=layers,
        num_attention_heads=2,
        max_position_embeddings=64,
        bos_token_id=BOS,
        eos_token_id=EOS,
        **more,
    )
    return amplify(GPTNeoXForCausalLM(config), seed)


TINY = {"llama": tiny_llama, "gpt2": tiny_gpt2, "neox": tiny_neox}


def byte_tokenizer(
    *, bos: bool = True, eos_at_end: bool = False, pad: bool = False, chat_template: str | None = None
) -> PreTrainedTokenizerFast:
    """T-BYTE of the cases: `<bos>` 0, `<eos>` 1, then the 256 byte symbols sorted ("a" = 66, "b" = 67)."""
    symbols = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {"<bos>": BOS, "<eos>": EOS} | {symbol: i + 2 for i, symbol in enumerate(symbols)}
    backend = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    if bos or eos_at_end:
        single = " ".join(["<bos>"] * bos + ["$A"] + ["<eos>"] * eos_at_end)
        backend.post_processor = processors.TemplateProcessing(
            single=single, special_tokens=[("<bos>", BOS), ("<eos>", EOS)]
        )
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, bos_token="<bos>", eos_token="<eos>", pad_token="<eos>" if pad else None
    )
    tokenizer.chat_template = chat_template
    return tokenizer
