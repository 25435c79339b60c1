"""A Hugging Face causal language model seen as front, layers and tail, without changing its code.

Problem. To drive the decoder layers one by one we need the exact arguments that the model would
pass to each of them (masks per layer type, rotary embeddings, positions), and what it does after
the last one (norm, head, loss). Both differ between some two hundred architectures.

Idea. Run the model's own forward with stand-ins in place of its layers. For the *front*, a
recorder notes each layer's arguments and returns the hidden state that it was given; the last one
stops the pass. For the *tail*, stand-ins pass any tokens through and the last one hands over the
true hidden states, so the model's own norm, head and loss run on them. Norm, head and loss work
token by token, so the tail is given only the tokens that have a label, in chunks: the logits of a
whole batch never exist at once.

What would break this is state shared between layers beyond the hidden state, such as keys and
values that a later layer reads again: right loss, wrong gradients. So only arguments that a layer
cannot use to hand state on are let through; any other is refused with its name.
"""

import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import nn

from offload.engine.batch import Batch
from offload.errors import UnsupportedModelError

if TYPE_CHECKING:
    from transformers import PreTrainedModel

CHECKED_TOKENS = 4


@dataclass(frozen=True, kw_only=True, slots=True)
class Call:
    """What the model passes to one layer besides the hidden state."""

    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]


@dataclass(frozen=True, kw_only=True, slots=True)
class Front:
    """What enters the layers: hidden states (B, T, D), and each layer's other arguments."""

    hidden_BTD: torch.Tensor
    calls: tuple[Call, ...]


class _AllRecordedError(Exception):
    """All layers were reached; the rest of the model's forward is not needed."""


class _StandIn(nn.Module):
    """Takes a layer's place; the model reads the layer's attributes through it."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.__dict__["stood_in_for"] = layer

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["stood_in_for"], name)


class _Recorder(_StandIn):
    def __init__(self, layer: nn.Module, notes: list[tuple[torch.Tensor, Call]], last: int) -> None:
        super().__init__(layer)
        self.__dict__["notes"] = notes
        self.__dict__["last"] = last

    def forward(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        if args:
            hidden, args = args[0], args[1:]
        else:
            hidden = kwargs.pop("hidden_states")
        notes = cast("list[tuple[torch.Tensor, Call]]", self.__dict__["notes"])
        notes.append((hidden, Call(args=args, kwargs=kwargs)))
        if len(notes) == self.__dict__["last"]:
            raise _AllRecordedError
        return cast("torch.Tensor", hidden)


class _PassThrough(_StandIn):
    def forward(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        return cast("torch.Tensor", args[0] if args else kwargs["hidden_states"])


class _Injector(_StandIn):
    def __init__(self, layer: nn.Module, hidden: torch.Tensor) -> None:
        super().__init__(layer)
        self.__dict__["hidden"] = hidden

    def forward(self, *_args: Any, **_kwargs: Any) -> torch.Tensor:
        return cast("torch.Tensor", self.__dict__["hidden"])


class LayeredModel:
    """Front, layers and tail of a causal language model; `model` may be wrapped by peft."""

    def __init__(self, model: nn.Module) -> None:
        """Find the decoder layers.

        Raises:
            UnsupportedModelError: There is not exactly one stack of decoder layers, or the model
                is configured for something that layer by layer would give wrong gradients.
        """
        unwrap = getattr(model, "get_base_model", None)  # peft's wrapper
        self.model = cast("PreTrainedModel", model if unwrap is None else unwrap())
        text_config = self.model.config.get_text_config()
        _refuse_shared_state(text_config)
        self.max_positions: int = getattr(text_config, "max_position_embeddings", sys.maxsize)
        self._is_loss_checked = False
        self._owner, self._name = _find_layers(self.model, text_config.num_hidden_layers)
        self.layers = cast("nn.ModuleList", getattr(self._owner, self._name))

    def front(self, batch: Batch) -> Front:
        """Run what comes before the layers.

        Args:
            batch: input_ids (B, T) and optionally attention_mask, position_ids, on the compute
                device.

        Raises:
            UnsupportedModelError: A layer was not visited exactly once and in order, or gets an
                argument through which layers could share state.
        """
        notes: list[tuple[torch.Tensor, Call]] = []
        recorders = [_Recorder(layer, notes, len(self.layers)) for layer in self.layers]
        inputs = {name: batch[name] for name in _FRONT_INPUTS if name in batch}
        with self._replaced(recorders):
            try:
                self.model(**inputs, use_cache=False)
            except _AllRecordedError:
                pass
            else:
                raise UnsupportedModelError(
                    f"{type(self.model).__name__} called {len(notes)} of {len(self.layers)} layers",
                    limit="each layer must be called once in each forward",
                    hint="train this model resident, with another tool",
                )
        hidden_BTD = notes[0][0]
        for layer, (hidden, call) in enumerate(notes):
            if hidden is not hidden_BTD:
                raise UnsupportedModelError(
                    f"{type(self.model).__name__} changes the hidden state between layers"
                    f" {layer - 1} and {layer}",
                    limit="only layers may change it",
                    hint="train this model resident, with another tool",
                )
            _check_call(type(self.model).__name__, layer, call)
        return Front(hidden_BTD=hidden_BTD, calls=tuple(call for _, call in notes))

    def layer_forward(self, layer: int, hidden_BTD: torch.Tensor, call: Call) -> torch.Tensor:
        """Run one layer; its weights must be in place."""
        output = self.layers[layer](hidden_BTD, *call.args, **call.kwargs)
        return cast("torch.Tensor", output[0] if isinstance(output, tuple) else output)

    def tail_loss(
        self, hidden_BTD: torch.Tensor, labels_BT: torch.Tensor, num_label_tokens: torch.Tensor
    ) -> torch.Tensor:
        """Run norm, head and loss on some tokens.

        Args:
            hidden_BTD: Output of the last layer for these tokens.
            labels_BT: The token that follows each of them (already shifted).
            num_label_tokens: What the sum of the losses is divided by.
        """
        output = self._tail(
            hidden_BTD,
            labels=labels_BT,
            shift_labels=labels_BT,
            num_items_in_batch=num_label_tokens,
        )
        return cast("torch.Tensor", output.loss)

    def check_loss_once(self, hidden_BTD: torch.Tensor, labels_BT: torch.Tensor) -> None:
        """Check on the first tokens that come that the model's loss is what a step needs.

        It must be the sum of the tokens' cross-entropies over the number that it is given. Models
        that compute their own loss may shift labels again, or ignore that number.

        Raises:
            UnsupportedModelError: The loss is another one.
        """
        if self._is_loss_checked:
            return
        hidden_BTD, labels_BT = hidden_BTD[:, :CHECKED_TOKENS], labels_BT[:, :CHECKED_TOKENS]
        with torch.no_grad():
            logits_BTV = self.tail_logits(hidden_BTD)
            right = torch.nn.functional.cross_entropy(
                logits_BTV[0].float(), labels_BT[0], reduction="sum"
            )
            three = torch.tensor(3, device=hidden_BTD.device)
            found = self.tail_loss(hidden_BTD, labels_BT, three) * 3
        if not torch.isclose(found.float(), right, rtol=1e-3):
            raise UnsupportedModelError(
                f"{type(self.model).__name__} gives a loss of {float(found):.4f} where the sum of"
                f" cross-entropies is {float(right):.4f}",
                limit="its loss must take `shift_labels` and `num_items_in_batch`",
                hint="train this model resident, with another tool",
            )
        self._is_loss_checked = True

    def tail_logits(self, hidden_BTD: torch.Tensor) -> torch.Tensor:
        """Run norm and head on some tokens; returns logits (B, T, V)."""
        return cast("torch.Tensor", self._tail(hidden_BTD).logits)

    def _tail(self, hidden_BTD: torch.Tensor, **loss_inputs: torch.Tensor) -> Any:
        stand_ins: list[nn.Module] = [_PassThrough(layer) for layer in self.layers[:-1]]
        stand_ins.append(_Injector(self.layers[-1], hidden_BTD))
        any_token_BT = torch.zeros(hidden_BTD.shape[:2], dtype=torch.long, device=hidden_BTD.device)
        with self._replaced(stand_ins):
            return self.model(input_ids=any_token_BT, use_cache=False, **loss_inputs)

    @contextmanager
    def _replaced(self, stand_ins: Sequence[nn.Module]) -> Iterator[None]:
        setattr(self._owner, self._name, nn.ModuleList(stand_ins))
        try:
            yield
        finally:
            setattr(self._owner, self._name, self.layers)


_FRONT_INPUTS = ("input_ids", "attention_mask", "position_ids")


def _find_layers(model: "PreTrainedModel", num_layers: int) -> tuple[nn.Module, str]:
    """Return the module that owns the decoder layers, and their attribute's name there."""
    decoder = model.get_decoder()
    found = [
        (owner, name)
        for owner in decoder.modules()
        for name, child in owner.named_children()
        if isinstance(child, nn.ModuleList)
        and len(child) == num_layers
        and any(owner is parent for parent in (decoder, *decoder.children()))
    ]
    if len(found) != 1:
        raise UnsupportedModelError(
            f"{type(model).__name__} has {len(found)} lists of {num_layers} modules",
            limit="exactly one, its decoder layers, can be streamed",
            hint="train this model resident, with another tool",
        )
    return found[0]


def _refuse_shared_state(text_config: Any) -> None:
    """Refuse configurations whose gradients would be wrong layer by layer."""
    if getattr(text_config, "num_kv_shared_layers", 0):
        raise UnsupportedModelError(
            f"config.num_kv_shared_layers is {text_config.num_kv_shared_layers}",
            limit="layers that read another layer's keys and values cannot be visited alone",
            hint="train this model resident, with another tool",
        )
    if getattr(text_config, "output_router_logits", False):
        raise UnsupportedModelError(
            "config.output_router_logits is true, which adds a router loss over all layers at once",
            limit="the loss must be a sum over tokens",
            hint="set `output_router_logits` to false in the model's config.json",
        )


def _check_call(model_name: str, layer: int, call: Call) -> None:
    """Let through only arguments that cannot carry state from layer to layer."""
    named = [*((f"argument {i + 1}", v) for i, v in enumerate(call.args)), *call.kwargs.items()]
    for name, value in named:
        problem = _problem_of(value)
        if problem:
            raise UnsupportedModelError(
                f"{model_name} passes `{name}` to layer {layer}, {problem}",
                limit="a layer may be passed only constants and tensors without gradient",
                hint="train this model resident, with another tool",
            )


def _problem_of(value: object) -> str:
    if isinstance(value, torch.Tensor):
        return "a tensor that requires grad" if value.requires_grad else ""
    if isinstance(value, tuple):
        return next(filter(None, map(_problem_of, value)), "")
    if value is None or isinstance(value, bool | int | float | str | torch.dtype):
        return ""
    return f"a {type(value).__name__} that layers could share state through"
