"""Drawing the tokens of answers, each answer from random numbers of its own.

A token is drawn by inversion: the first one up to which probabilities add up to more than a uniform
number. Sums of blocks of the vocabulary come first, so that only they and one block of each row
leave the device, and no sum is taken in an order that a device may choose.
"""

from collections.abc import Callable, Sequence

import torch
from torch.nn import functional

_BLOCK = 512  # tokens of the vocabulary whose probabilities are added up first

Choose = Callable[[Sequence[int], torch.Tensor], tuple[list[int], list[float]]]
"""Returns a token for each of some answers, and its log-probability in nats.

It is given their numbers, and their logits (B, V).
"""


class Draw:
    """Draws tokens from the model's own distribution."""

    def __init__(self, seeds: Sequence[int], *, temperature: float) -> None:
        """Draw nothing yet.

        Args:
            seeds: The seed of each answer.
            temperature: Divisor of the logits.
        """
        self._generators = [torch.Generator().manual_seed(seed) for seed in seeds]
        self._temperature = temperature

    def __call__(
        self, answers: Sequence[int], logits_BV: torch.Tensor
    ) -> tuple[list[int], list[float]]:
        """Return a token for each answer, and its log-probability."""
        if logits_BV.dtype.itemsize < 4:
            logits_BV = logits_BV.float()
        logps_BV = (logits_BV / self._temperature).log_softmax(-1)
        drawn_B = torch.stack(
            [torch.rand((), generator=self._generators[n], dtype=torch.float64) for n in answers]
        )
        tokens_B = _inverted(logps_BV.exp(), drawn_B)
        logps_B = logps_BV.gather(1, tokens_B.to(logps_BV.device)[:, None])[:, 0]
        return tokens_B.tolist(), logps_B.tolist()


def greedy(answers: Sequence[int], logits_BV: torch.Tensor) -> tuple[list[int], list[float]]:
    """Return the most probable token for each answer; it is certain."""
    return logits_BV.argmax(-1).tolist(), [0.0] * len(answers)


def _inverted(probabilities_BV: torch.Tensor, drawn_B: torch.Tensor) -> torch.Tensor:
    """Return tokens (B,) on the host.

    Args:
        probabilities_BV: They may add up to a little more or less than 1.
        drawn_B: Float64 on the host, in [0, 1).
    """
    num_rows, num_tokens = probabilities_BV.shape
    blocks_BNK = functional.pad(probabilities_BV, (0, -num_tokens % _BLOCK)).view(
        num_rows, -1, _BLOCK
    )
    ends_BN = blocks_BNK.sum(-1, dtype=torch.float64).cpu().cumsum(-1)
    wanted_B1 = (drawn_B * ends_BN[:, -1])[:, None]
    block_B = _first_beyond(ends_BN, wanted_B1)
    rows_B = torch.arange(num_rows)
    before_B = torch.where(block_B > 0, ends_BN[rows_B, block_B - 1], 0.0)
    chosen_BK = blocks_BNK[rows_B, block_B.to(blocks_BNK.device)].cpu().double()
    ends_BK = chosen_BK.cumsum(-1) + before_B[:, None]
    return block_B * _BLOCK + _first_beyond(ends_BK, wanted_B1)


def _first_beyond(ends_BN: torch.Tensor, wanted_B1: torch.Tensor) -> torch.Tensor:
    """Return the first place (B,) whose end is beyond a number; the last that adds any, if none."""
    first_B = torch.searchsorted(ends_BN, wanted_B1, right=True)[:, 0]
    last_B = torch.searchsorted(ends_BN, ends_BN[:, -1:].contiguous())[:, 0]
    return torch.minimum(first_B, last_B)
