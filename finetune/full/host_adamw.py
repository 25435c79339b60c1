"""AdamW on the host: torch's fused kernel on a piece of a weight at a time.

An update reads and writes a weight, its gradient and two moments, and little arithmetic: it is as
fast as the host's memory. So everything else that an update does (scaling of gradients, putting
split masters together and taking them apart) is done on the same piece while it is in the cache.
"""

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch.optim.adamw import adamw

from finetune.full.split_master import joined, split_into

PIECE_ELEMENTS = 2**18  # for each core, 1 MiB of fp32: its temporaries stay in a cache
LOW, MEAN, SQUARE = "low", "mean", "square"  # after a colon, in names of a checkpoint's tensors
BETAS, EPS = (0.9, 0.999), 1e-8  # as torch.optim.AdamW


class HostAdamW:
    """AdamW's states of weights on the host, and its update.

    Weights in bf16 are the high halves of fp32 masters: see `finetune.full.split_master`.

    Attributes:
        num_updates: Steps whose update was begun.
    """

    def __init__(self, weights: Mapping[str, torch.Tensor], *, weight_decay: float) -> None:
        """Make states, which are zero, and the low halves of weights in bf16, as if just rounded.

        Args:
            weights: Name -> contiguous fp32 or bf16 tensor on the host.
            weight_decay: Of tensors of two dimensions or more.
        """
        self._weights, self._weight_decay = dict(weights), weight_decay
        self._means = {n: torch.zeros(w.shape) for n, w in weights.items()}
        self._squares = {n: torch.zeros(w.shape) for n, w in weights.items()}
        self._lows = {
            name: torch.zeros(weight.shape, dtype=torch.int16)
            for name, weight in weights.items()
            if weight.dtype is torch.bfloat16
        }
        self.num_updates = 0

    @property
    def tensors(self) -> dict[str, torch.Tensor]:
        """All that a resume needs except `num_updates`, by name: weights, low halves, moments."""
        return {
            **self._weights,
            **{f"{name}:{LOW}": low for name, low in self._lows.items()},
            **{f"{name}:{MEAN}": mean for name, mean in self._means.items()},
            **{f"{name}:{SQUARE}": square for name, square in self._squares.items()},
        }

    def masters(self) -> dict[str, torch.Tensor]:
        """Return fp32 copies of the weights, put together where they are split."""
        return {
            name: joined(weight, self._lows[name]) if name in self._lows else weight.clone()
            for name, weight in self._weights.items()
        }

    def forget(self) -> None:
        """Set all moments and the number of updates to zero."""
        self.num_updates = 0
        for state in (*self._means.values(), *self._squares.values()):
            state.zero_()

    @torch.no_grad()
    def update(
        self,
        gradients: Mapping[str, torch.Tensor],
        *,
        num_updates: int,
        lr: float,
        scale: float,
    ) -> None:
        """Update weights in place by their gradients, which are left scaled or unchanged.

        Args:
            gradients: Name -> gradient of a weight, on the host.
            num_updates: This one's number, counted from 1.
            lr: Learning rate.
            scale: Factor of the gradients.
        """
        piece_elements = PIECE_ELEMENTS * torch.get_num_threads()
        for name, gradient in gradients.items():
            tensors = [self._weights[name], self._means[name], self._squares[name], gradient]
            pieces = zip(*(t.view(-1).split(piece_elements) for t in tensors), strict=True)
            low = self._lows.get(name)
            lows = () if low is None else low.view(-1).split(piece_elements)
            for number, (weight, mean, square, piece) in enumerate(pieces):
                master = joined(weight, lows[number]) if lows else weight
                adamw(
                    [master],
                    [piece.float() * scale],
                    [mean],
                    [square],
                    [],
                    [torch.tensor(num_updates - 1.0)],
                    fused=True,
                    amsgrad=False,
                    beta1=BETAS[0],
                    beta2=BETAS[1],
                    lr=lr,
                    weight_decay=self._weight_decay if self._weights[name].dim() > 1 else 0.0,
                    eps=EPS,
                    maximize=False,
                )
                if lows:
                    split_into(master, weight, lows[number])

    def state_dict(self) -> dict[str, Any]:
        """Return the number of updates and the settings, in the form of torch's optimizers."""
        settings = {"betas": list(BETAS), "eps": EPS, "weight_decay": self._weight_decay}
        return {
            "state": {0: {"step": torch.tensor(float(self.num_updates))}},
            "param_groups": [{"params": [0], **settings}],
        }

    def load_state_dict(self, content: Mapping[str, Any]) -> None:
        """Take the number of updates that `state_dict` returned."""
        self.num_updates = int(content["state"][0]["step"])


def total_norm(norms: Iterable[torch.Tensor]) -> float:
    """Return the norm of all gradients from the norm of each."""
    return float(torch.linalg.vector_norm(torch.stack([norm.cpu() for norm in norms])))
