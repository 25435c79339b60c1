"""Whether the part after the layers computes each token by itself, at the sizes of a step.

Problem. A step computes that part for some tokens at a time, in one row. Code that reads a token
far back does nothing unusual with few tokens, and the logits of many are too large to exist.

Idea. Only the output head makes them large, and it is a product within a token. So it returns one
number for a token meanwhile, a weighted sum of its input, and the model's own code runs on as many
tokens as a step has. Subsets of them are NaN in turn, such that each pair of tokens is apart in one
of them: no other token may become NaN, neither in the rows of the model's own forward, nor in the
chunks of a step. The values of both must be the same, also of chunks of fewer tokens.
"""

import math
from collections.abc import Callable
from contextlib import AbstractContextManager
from itertools import combinations, count, islice
from typing import Any, NoReturn

import torch

from offload.engine.closeness import are_close
from offload.engine.model.layers import (
    FORWARD_ERRORS,
    LayeredModel,
    is_classifier,
    require_outputs_of_last_token,
)
from offload.engine.visit_cache import patched

_BY_TOKEN = "what follows the layers must work token by token"


class TailTrial:
    """The part of a model after its layers, run on many tokens without its output head."""

    def __init__(self, model: LayeredModel, *, chunk_tokens: int) -> None:
        """Keep the parts.

        Args:
            model: The model.
            chunk_tokens: Tokens that a step computes at a time.
        """
        self._model, self._chunk_tokens = model, chunk_tokens

    def require_apart(self, hidden_BTD: torch.Tensor) -> None:
        """Check that outputs of a token depend neither on other tokens nor on their number.

        Args:
            hidden_BTD: Output of the last layer, of any rows.

        Raises:
            UnsupportedModelError: They do.
        """
        flat_1ND = hidden_BTD.flatten(0, 1).unsqueeze(0)
        if is_classifier(self._model):
            require_outputs_of_last_token(self._model, hidden_BTD)
            with self._model.tail() as part:
                self._require_no_spread(part, flat_1ND.transpose(0, 1))
            return
        with self._narrow_head():
            with self._model.tail(self._model.whole) as own:
                own_NV = self._outputs(own, hidden_BTD)
                self._require_no_spread(own, hidden_BTD)
            with self._model.tail() as part:
                order_N = torch.arange(len(own_NV) - 1, -1, -1, device=hidden_BTD.device)
                whole, *others = order_N.split(self._chunk_tokens)
                fewer = [whole[: len(whole) >> n] for n in range(1, len(whole).bit_length())]
                for chunk_n in (whole, *fewer, *others):
                    found_NV = own_NV.clone()
                    found_NV[chunk_n] = self._outputs(part, flat_1ND[:, chunk_n])
                    if not are_close(own_NV, found_NV, num_terms=hidden_BTD.shape[-1]):
                        self._refuse(len(own_NV))
                self._require_no_spread(part, flat_1ND[:, whole])

    def _require_no_spread(self, compute: Callable[..., Any], hidden_BTD: torch.Tensor) -> None:
        """Check that a NaN stays with its token."""
        num = hidden_BTD.shape[0] * hidden_BTD.shape[1]
        for is_poisoned_N in subsets_apart(num).to(hidden_BTD.device):
            poisoned_BTD = hidden_BTD.clone(memory_format=torch.contiguous_format)
            poisoned_BTD.flatten(0, 1)[is_poisoned_N] = torch.nan
            is_nan_N = self._outputs(compute, poisoned_BTD).isnan().any(-1)
            if (is_nan_N & ~is_poisoned_N).any():
                self._refuse(num)

    def _outputs(self, compute: Callable[..., Any], hidden_BTD: torch.Tensor) -> torch.Tensor:
        """Return the outputs of each token, (N, ...)."""
        try:
            outputs: torch.Tensor = compute(hidden_BTD).logits
        except torch.OutOfMemoryError:
            raise
        except FORWARD_ERRORS as error:
            self._model.refuse(
                f"fails where its output head gives one number for a token: {error}",
                limit=_BY_TOKEN,
            )
        return outputs.flatten(0, -2)

    def _narrow_head(self) -> AbstractContextManager[None]:
        """Let the output head, if the model has one, return a weighted sum of its input."""
        head: Any = self._model.model.get_output_embeddings()
        return patched(*([] if head is None else [(vars(head), {"forward": _weighted_sum})]))

    def _refuse(self, num: int) -> NoReturn:
        self._model.refuse(
            "does not compute a token's logits from the last layer's output for it alone, in a"
            f" trial of {num:,} tokens",
            limit=_BY_TOKEN,
        )


def _weighted_sum(x: torch.Tensor, *_args: Any, **_kwargs: Any) -> torch.Tensor:
    weights_D = torch.linspace(-1, 1, x.shape[-1], dtype=x.dtype, device=x.device)
    return (x * weights_D).sum(-1, keepdim=True)


def subsets_apart(num: int) -> torch.Tensor:
    """Return subsets of some things: of any two, one subset has the first and not the second.

    So if code is run once for each subset, with its members made NaN, and no other becomes NaN,
    then none depends on any other. Each thing is in half of the subsets, and no two are in the same
    ones: n subsets are enough for n choose n/2 things, so 15 for 4,096.

    Returns:
        A row for each subset, True for its members: (subsets, num).
    """
    size = next(n for n in count(2) if math.comb(n, n // 2) >= num)
    members = torch.tensor(list(islice(combinations(range(size), size // 2), num)))
    return torch.zeros(size, num, dtype=torch.bool).scatter_(0, members.T, value=True)
