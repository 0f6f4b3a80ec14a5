"""Token ids as a caller hands them over: checked before they reach a model, and run so that padding changes nothing.

Legend: B sequences, T their common length.
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from harvest.errors import RequestError
from harvest.model.architectures import architecture_of, config_of, input_embedding, vocabulary_of
from harvest.model.lengths import switches
from harvest.model.packing import outliers_of_the_batch
from harvest.model.spread import input_device
from harvest.model.watch import takes


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Sequences:
    """One or several sequences of tokens, padded to a common length."""

    ids: torch.Tensor
    """int64 [B, T], where the caller has them."""
    real: torch.Tensor
    """bool [B, T]: a token, not padding."""

    @classmethod
    def of(cls, input_ids: Any, attention_mask: Any = None) -> Sequences:
        """Checks ids [T] or [B, T] and their mask; RequestError says what is wrong with them, and in which row."""
        ids_BT = _rows("input_ids", input_ids)
        if attention_mask is None:
            return cls(ids=ids_BT, real=torch.ones_like(ids_BT, dtype=torch.bool))
        mask_BT = _rows("attention_mask", attention_mask, whole=False).to(ids_BT.device)
        if mask_BT.shape != ids_BT.shape:
            raise RequestError(f"attention_mask: {_shape(mask_BT)} for input_ids {_shape(ids_BT)}; allowed is the same")
        if not ((mask_BT == 0) | (mask_BT == 1)).all():
            raise RequestError("attention_mask: allowed are 1 for a token and 0 for padding; there are other values")
        real_BT = mask_BT.bool()
        for row, real_T in enumerate(real_BT.cpu()):
            tokens = real_T.nonzero().flatten()
            if not len(tokens):
                raise RequestError(f"attention_mask: row {row} has no token; allowed are sequences of at least one")
            if int(tokens[-1] - tokens[0]) >= len(tokens):
                raise RequestError(f"attention_mask: row {row} has padding between its tokens; allowed is at its ends")
        return cls(ids=ids_BT, real=real_BT)

    @property
    def single(self) -> bool:
        """There is one sequence: its tensors have no batch axis."""
        return len(self.ids) == 1

    def forwards(self, model: Any) -> list[Sequences]:
        """What may share a forward: all of it, or each sequence without its padding where nobody knows what that does.

        In the table of architectures padding is known to change nothing; elsewhere convolutions and Fourier transforms
        take it for tokens, whatever the mask says.
        """
        return [self] if self.real.all() or architecture_of(model) is not None else self.alone()

    def alone(self) -> list[Sequences]:
        """Each sequence by itself, without its padding."""
        return [Sequences.of(ids_T[real_T]) for ids_T, real_T in zip(self.ids, self.real)]

    def inputs(self, model: Any, runs: nn.Module) -> dict[str, torch.Tensor]:
        """Arguments of a forward of `runs`, on its device: a mask and positions where the padding asks for them.

        RequestError for ids beyond the vocabulary, more tokens than the model has learned positions for, and lengths
        of which it computes one otherwise beside another.
        """
        config = config_of(model)
        vocabulary = vocabulary_of(model)
        pad = getattr(config, "pad_token_id", None)
        filler = pad if isinstance(pad, int) and 0 <= pad < vocabulary else 0
        self._fit(vocabulary, _learned_positions(runs, config, input_embedding(model)))
        device = input_device(runs)
        real_BT = self.real.to(device)
        if (reason := outliers_of_the_batch(model.config)) and not (self.single and real_BT.all()):
            raise RequestError(
                f"input_ids: {len(self.ids)} padded or several sequences: {reason}; allowed is one, unpadded"
            )
        if real_BT.all() and not (architecture_of(model) is None and takes(runs, "attention_mask")):
            return {"input_ids": self.ids.to(device)}  # elsewhere a model without a mask may make one from the ids
        inputs = {"input_ids": self.ids.to(device).masked_fill(~real_BT, filler)}  # what stood there need be no id
        if takes(runs, "attention_mask"):
            inputs["attention_mask"] = real_BT.long()
        if (real_BT[:, 0].all() and not self._beside_one_another(config)) or _counts_by_id(runs):  # it counts by itself
            return inputs
        if takes(runs, "position_ids"):  # the others of the table count by the mask, or not at all
            inputs["position_ids"] = (real_BT.long().cumsum(1) - 1).clamp_min(0)
        return inputs

    def _fit(self, vocabulary: int, positions: int | None) -> None:
        ids = self.ids[self.real]
        wrong = ids[(ids < 0) | (ids >= vocabulary)]
        if len(wrong):
            raise RequestError(f"input_ids: {int(wrong[0])}: beyond the vocabulary; allowed are 0 to {vocabulary - 1}")
        longest = int(self.real.sum(1).max())
        if positions is not None and longest > positions:
            raise RequestError(
                f"input_ids: {longest} tokens; allowed are {positions}, the positions that the model learned"
            )

    def _beside_one_another(self, config: Any) -> bool:
        """Whether the padding, counted as tokens, would change how the model computes these; RequestError where they
        change it for one another."""
        lengths = self.real.sum(1).tolist()
        found = switches(config, self.ids.shape[1])
        sides = {bisect_left(found, length) for length in lengths}
        if len(sides) > 1:
            raise RequestError(
                f"input_ids: sequences of {min(lengths)} to {max(lengths)} tokens: beyond {found[0]} "
                f"{config.model_type!r} computes every token of a batch otherwise; allowed in one batch are sequences "
                "of one side, or of one length"
            )
        return bisect_left(found, self.ids.shape[1]) not in sides

    def together(self, found: list[torch.Tensor]) -> torch.Tensor:
        """What each of `forwards` gave, as [T, d] of one sequence or [B, T, d] of several; rows of padding are zero."""
        (first, *_), d = found, found[0].shape[-1]
        if self.real.all():
            return first
        real = (self.real[0] if self.single else self.real).to(first.device)
        if first.shape[:-1] == real.shape:
            return first.masked_fill_(~real.unsqueeze(-1), 0)  # selected, for they may be NaN
        rows = first.new_zeros(*real.shape, d)
        rows[real] = torch.cat(found)
        return rows


def _rows(what: str, given: Any, *, whole: bool = True) -> torch.Tensor:
    """[B, T] of int64 (`whole`) or of any numbers."""
    try:
        tensor = torch.as_tensor(given)
    except (TypeError, ValueError, RuntimeError) as error:
        why = " ".join(str(error).split())
        raise RequestError(
            f"{what}: no tensor ({why}); allowed are numbers [T] or [B, T], padded to one length"
        ) from None
    if tensor.dim() not in (1, 2) or not tensor.numel():
        raise RequestError(f"{what}: shape {_shape(tensor)}; allowed are [T] and [B, T] with at least one token")
    if whole and (tensor.is_floating_point() or tensor.is_complex() or tensor.dtype == torch.bool):
        raise RequestError(f"{what}: {tensor.dtype}; allowed are whole numbers")
    tensor = tensor.detach()
    return (tensor.long() if whole else tensor).reshape(-1, tensor.shape[-1])


def _shape(tensor: torch.Tensor) -> list[int]:
    return list(tensor.shape)


def _counts_by_id(runs: nn.Module) -> bool:
    """Positions as in RoBERTa: counted over the ids that are not the padding's, which fill the padding here."""
    return any(hasattr(module, "create_position_ids_from_input_ids") for module in runs.modules())


def _learned_positions(runs: nn.Module, config: Any, embedding: nn.Module | None) -> int | None:
    """How many positions there is a vector for; None where positions are computed and have no end."""
    limit = getattr(config, "max_position_embeddings", None)
    tables = [module for module in runs.modules() if isinstance(module, nn.Embedding) and module is not embedding]
    if not limit or not any(limit <= table.num_embeddings <= limit + 2 for table in tables):  # OPT's has two more
        return None
    return int(limit) - (config.pad_token_id + 1 if _counts_by_id(runs) else 0)
