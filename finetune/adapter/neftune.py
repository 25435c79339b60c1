"""NEFTune: uniform noise on the token embeddings while training.

A micro-batch's embeddings (B, T, D) get noise from -m to m, m = alpha / sqrt(T x D). T is the
width of the micro-batch, padding included, as in transformers' trainer. The engine runs a
micro-batch's embeddings once per step, with the generator seeded for them, and layers that are
computed again start from their kept input: forward, recompute and a resumed run see one noise.

Source: arXiv:2310.05914, algorithm 1.
"""

from typing import TYPE_CHECKING

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def add_noise(model: "PreTrainedModel", *, alpha: float) -> RemovableHandle:
    """Add noise to what the model's input embeddings return, in training mode only.

    Args:
        model: Without peft's wrapper.
        alpha: Scale of the noise; 5 to 15 are usual.

    Returns:
        A handle that removes the noise.
    """

    def noisy(module: nn.Module, _: object, embedded_BTD: torch.Tensor) -> torch.Tensor:
        if not module.training:
            return embedded_BTD
        num_tokens, width = embedded_BTD.shape[1:]
        # torch's own fp32 arithmetic, so that the draws are transformers' to the bit
        most = (alpha / torch.tensor(num_tokens * width).sqrt()).item()
        return embedded_BTD + torch.empty_like(embedded_BTD).uniform_(-most, most)

    return model.get_input_embeddings().register_forward_hook(noisy)
