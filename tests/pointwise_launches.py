"""What the launcher of a layer's fused kernels starts, noted without a card."""

from unittest import mock

import torch

from offload.engine.pointwise import launcher
from tests.compiled import Launch
from tests.mixtures import Recorder

MODULE = "offload.engine.pointwise.kernels"
VOCABULARY = 151936


def launches(dtype: torch.dtype, *, hidden: int, head: int, width: int) -> list[Launch]:
    """Return what the launcher starts, forward and backward, noted over tensors without memory."""
    recorder = Recorder()

    def empty(*shape: int) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    with mock.patch.object(launcher, "_kernels", return_value=recorder):
        for x in (empty(4096, hidden), empty(1, 512, 32, head)):
            weight = empty(x.shape[-1])
            launcher.norm(x, weight, 1e-6, 0.0, False)
            _, inverse = launcher.norm(x, weight, 1e-6, 0.0, True)
            launcher.norm_backward(x, x, weight, inverse, 1.0)
        q, k = (empty(2, 512, heads, head).transpose(1, 2) for heads in (32, 8))
        for is_back in (False, True):
            for rotated in (head, head // 2):
                angles = empty(2, 512, rotated)
                launcher.rotate(q, k, angles, angles, is_back)
        weights, angles = (empty(head), empty(head)), empty(2, 512, head)
        for is_cast_first in (False, True):
            *_, of_q, of_k = launcher.norm_rotate(
                q, k, *weights, angles, angles, 1e-6, 0.0, is_cast_first
            )
            launcher.norm_rotate_backward(q, k, q, k, *weights, angles, angles, of_q, of_k, 0.0)
        gate = empty(4096, width)
        for curve in launcher.GATE_NUMBERS:
            launcher.gated(gate, gate, curve)
            launcher.gated_backward(gate, gate, gate, curve)
        logits, labels = empty(64, VOCABULARY), torch.empty(64, dtype=torch.long, device="meta")
        for has_gradient in (True, False):
            one = torch.empty((), device="meta")
            launcher.cross_entropy(logits, labels, one, has_gradient)
    return recorder.launches
