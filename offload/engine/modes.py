"""Modes of torch in which a model cannot be attached, or a step not be run."""

import torch
from torch.nn.utils import parametrize

from offload.errors import OffloadError


def require_gradients() -> None:
    """Check that gradients are recorded.

    Raises:
        OffloadError: A block switches them off.
    """
    if not torch.is_grad_enabled():
        block = "inference_mode" if torch.is_inference_mode_enabled() else "no_grad"
        raise OffloadError(
            f"forward_backward is called in `torch.{block}()`",
            limit="a step records gradients",
            hint="leave the block, or `engine.forward(batch)` for the loss alone",
        )


def require_uncached() -> None:
    """Check that torch does not cache parametrized weights from one visit to the next.

    Raises:
        OffloadError: It does.
    """
    if parametrize._cache_enabled:
        raise OffloadError(
            "a pass is run in `torch.nn.utils.parametrize.cached()`",
            limit="a layer is visited several times, with and without gradients: a weight that is"
            " computed once has none",
            hint="leave the block",
        )


def require_no_inference_mode() -> None:
    """Check that tensors which are made now can take part in training.

    Raises:
        OffloadError: They cannot.
    """
    if torch.is_inference_mode_enabled():
        raise OffloadError(
            "attach is called in `torch.inference_mode()`",
            limit="what it allocates takes part in training later",
            hint="leave the block before `offload.attach`",
        )
