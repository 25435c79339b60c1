"""A micro-batch on the device: what the model takes, and which token follows each labelled one."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch

IGNORED = -100
Batch = Mapping[str, torch.Tensor]


@dataclass(frozen=True, kw_only=True, slots=True)
class LabelledBatch:
    """A micro-batch with what the tail needs, on the compute device.

    Attributes:
        inputs: input_ids (B, T) and optionally attention_mask, position_ids.
        positions: Where in the flattened (B * T) tokens a next token is to be predicted, (N,).
        next_tokens: That token, (N,).
    """

    inputs: Batch
    positions: torch.Tensor
    next_tokens: torch.Tensor

    @property
    def num_label_tokens(self) -> int:
        """Tokens with a loss."""
        return self.positions.numel()


def with_labels(batch: Batch, torch_device: torch.device) -> LabelledBatch:
    """Shift the labels, find the tokens that have one, and move all to the device.

    `batch` should be on the host, where finding the labelled tokens costs no synchronisation.
    """
    next_BT = torch.nn.functional.pad(batch["labels"][:, 1:], (0, 1), value=IGNORED).flatten()
    positions = (next_BT != IGNORED).nonzero().flatten()
    return LabelledBatch(
        inputs=to_device({k: v for k, v in batch.items() if k != "labels"}, torch_device),
        positions=positions.to(torch_device, non_blocking=True),
        next_tokens=next_BT[positions].to(torch_device, non_blocking=True),
    )


def to_device(batch: Batch, torch_device: torch.device) -> dict[str, torch.Tensor]:
    """Move a batch's tensors to the device."""
    return {name: tensor.to(torch_device, non_blocking=True) for name, tensor in batch.items()}
