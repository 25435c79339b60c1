"""Whether a model's own loss is the cross-entropy that a step computes, by identity.

Problem. A step computes the loss itself, chunk by chunk. That values agree on a few tokens does not
show that the model's own loss is the same: class weights, a token without a loss and a schedule
differ only on other tokens, or later.

Idea. Transformers has one function for the loss of causal language models. The model's loss is that
one if the function is what the model calls, with the logits that it returns, the labels that it was
given and no option that changes the result, and if the loss is the very tensor that it returned.
"""

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from offload.engine.batch import IGNORED
from offload.engine.meanwhile import meanwhile

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_OFF = {"num_items_in_batch": None, "ignore_index": IGNORED, "shift_labels": None}
_ATTRIBUTE = "_loss_function"  # what transformers' property returns, where it is set


@dataclass(kw_only=True, slots=True)
class OwnLoss:
    """The function that a model calls for its loss, and its calls.

    Attributes:
        function: The function.
        calls: The arguments by name and the result of each call.
    """

    function: Any
    calls: list[tuple[dict[str, Any], Any]] = field(default_factory=list)

    def problem(
        self, loss: torch.Tensor, logits_BTV: torch.Tensor, labels_BT: torch.Tensor
    ) -> str | None:
        """Return what shows that a loss is another than the cross-entropy of the next tokens.

        Args:
            loss: The loss that the model returned.
            logits_BTV: The logits that it returned.
            labels_BT: The labels that it was given.
        """
        if not _is_transformers_own(self.function):
            return f"has a loss function of its own, `{_name_of(self.function)}`"
        if not self.calls:
            return "computes its loss by other code than its `loss_function`"
        given, returned = self.calls[-1]
        if loss is not returned or len(self.calls) > 1:
            return "changes the loss that its `loss_function` returns"
        changed = [name for name, off in _OFF.items() if given.get(name, off) != off]
        if changed:
            return f"passes `{changed[0]}` to its `loss_function`"
        if given["labels"] is not labels_BT:
            return "passes other labels to its `loss_function` than it is given"
        if given["logits"] is not logits_BTV:
            return "passes other logits to its `loss_function` than it returns"
        return None


def loss_function_of(model: "PreTrainedModel") -> Any:
    """Return the function that a model calls for its loss."""
    return model.loss_function


@contextmanager
def heard_loss(model: "PreTrainedModel") -> Iterator[OwnLoss]:
    """Record the calls of a model's loss function meanwhile."""
    heard = OwnLoss(function=loss_function_of(model))

    def hear(*args: Any, **kwargs: Any) -> Any:
        returned = heard.function(*args, **kwargs)
        if _is_transformers_own(heard.function):
            given = inspect.signature(heard.function).bind(*args, **kwargs).arguments
            heard.calls.append((given, returned))
        return returned

    with meanwhile((vars(model), {_ATTRIBUTE: hear})):
        yield heard


def _is_transformers_own(function: Any) -> bool:
    from transformers.loss.loss_utils import ForCausalLMLoss  # a second, which a plan need not wait

    return function is ForCausalLMLoss


def _name_of(function: Any) -> str:
    name = getattr(function, "__qualname__", type(function).__qualname__)
    return str(name).rpartition("<locals>.")[2]
