"""The sums of gradients by the rows of an embedding that trains in host memory.

Of a micro-batch only the rows of its tokens have a gradient. These come from the device and are
added, row by row and one micro-batch after the other, to a sum as large as the weight. All other
rows of it are zero: an optimizer that keeps means of gradients lets them decay there, as plain
PyTorch does, whose gradient of an embedding has these zeros too.
"""

import torch

from offload.errors import OffloadError


class RowSums:
    """A gradient as large as an embedding's weight, zero where no token was.

    Attributes:
        total: (V, D), on the host.
    """

    def __init__(self, weight: torch.Tensor) -> None:
        """Begin with zeros, in the weight's type; no memory is touched yet.

        Args:
            weight: (V, D), on the host.
        """
        self.total = torch.zeros_like(weight, requires_grad=False)
        self._tokens: list[torch.Tensor] = []

    def keep_in_fp32(self) -> None:
        """Add up in fp32 from here on: 16 bits would round small gradients away in a large sum."""
        assert not self._tokens
        self.total = torch.zeros(self.total.shape)

    @torch.no_grad()
    def add(self, tokens_N: torch.Tensor, rows_ND: torch.Tensor) -> None:
        """Add the gradients by some rows.

        Args:
            tokens_N: Whose rows; each once.
            rows_ND: The gradients, on the host.
        """
        self._tokens.append(tokens_N)
        self.total.index_add_(0, tokens_N, rows_ND.to(self.total.dtype))

    def clear(self) -> None:
        """Set all rows to zero that were added to."""
        for tokens_N in self._tokens:
            self.total.index_fill_(0, tokens_N, 0.0)
        self._tokens.clear()


def left_over(name: str) -> OffloadError:
    """Return the error for a weight on the host that still has the gradient of an earlier step."""
    return OffloadError(
        f"{name} still has the gradient of an earlier step",
        limit="gradients of weights on the host are written anew, not added",
        hint="`optimizer.zero_grad(set_to_none=True)` after `optimizer.step()`, of an optimizer"
        " over `engine.trained_parameters`; `model.zero_grad()` before `offload.attach`",
    )
