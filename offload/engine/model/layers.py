"""A Hugging Face causal language model seen as front, layers and tail, without changing its code.

Problem. To drive the decoder layers one by one we need the exact arguments that the model would
pass to each of them (masks per layer type, rotary embeddings, positions), and what it does after
the last one (norm, head, loss). Both differ between some two hundred architectures.

Idea. Run the model's own forward with stand-ins in place of its layers. For the *front*, a
recorder notes each layer's arguments; the last one stops the pass. For the *tail*, the last
stand-in hands over the true hidden states, so the model's own norm, head and loss run on them.
Norm, head and loss work token by token, so the tail is given only the tokens that have a label, in
chunks: the logits of a whole batch never exist at once.

What would break this is anything that layers share beyond the hidden state, or that the model does
with it between or behind them: right loss, wrong gradients. None of it is known by name. Each is
looked for where it would happen, before any gradient is touched, and refused with what was found.
"""

import sys
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any, NoReturn, cast

import torch
from torch import nn

from offload.engine.batch import Batch
from offload.engine.model.calls import Call, Leaves, version_of
from offload.engine.model.router import RouterLoss
from offload.engine.model.stack import (
    find_layers,
    find_towers,
    find_unread_stores,
    not_storing,
    refuse_layer_drop,
    refuse_shared_state,
    refuse_trained_outside,
    require_language_model,
)
from offload.engine.model.stand_ins import (
    FORMS,
    AllRecordedError,
    Between,
    Form,
    Injector,
    Note,
    Recorder,
    TouchedError,
)
from offload.errors import UnsupportedModelError
from offload.plan.families import RESIDENT_HINT

if TYPE_CHECKING:
    from transformers import PreTrainedModel

CHECKED_TOKENS = 4
FRONT_INPUTS = ("input_ids", "attention_mask", "position_ids")
COLLECTED = ("output_hidden_states", "output_attentions", "output_router_logits")
"""What a config can have a model collect from its layers."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Front:
    """What enters the layers: hidden states (B, T, ...), and each layer's other arguments."""

    hidden_BTD: torch.Tensor
    calls: tuple[Call, ...]
    leaves: Leaves

    def backward(self, gradient_BTD: torch.Tensor | None) -> None:
        """Take the gradients of all that enters the layers back through the front."""
        sources, gradients = self.leaves.gradients()
        # not where only the head trains, nor where a layer passes none on
        if self.hidden_BTD.requires_grad and gradient_BTD is not None:
            sources.append(self.hidden_BTD)
            gradients.append(gradient_BTD)
        if sources:
            torch.autograd.backward(sources, gradients)


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
        require_language_model(self.model)
        self.name = type(self.model).__name__
        refuse_trained_outside(model, self.model)
        text_config = self.model.config.get_text_config()
        refuse_shared_state(text_config)
        self.max_positions: int = getattr(text_config, "max_position_embeddings", sys.maxsize)
        self._has_own_loss = True
        self._is_tail_checked = False
        self._form: Form | None = None
        has_router_loss = getattr(text_config, "output_router_logits", False)
        self._owner, self._name = find_layers(self.model, text_config)
        self.layers = cast("nn.ModuleList", getattr(self._owner, self._name))
        refuse_layer_drop(self.model, self._owner)
        in_layers = set(self.layers.modules())
        self.towers = find_towers(self.model)
        self.router_loss = (
            RouterLoss(self.model, self.model.get_decoder(), list(self.layers))
            if has_router_loss
            else None
        )
        self._buffered = [[m for m in layer.modules() if m._buffers] for layer in self.layers]
        self._unread = find_unread_stores(list(self.layers))
        self._around = [m for m in self.model.base_model.modules() if m not in in_layers]

    def front(self, batch: Batch) -> Front:
        """Run what comes before the layers.

        Args:
            batch: input_ids (B, T) and optionally attention_mask, position_ids, on the compute
                device.

        Raises:
            UnsupportedModelError: The model does something between its layers, does not visit each
                once and in order, or passes an argument through which they could share state.
        """
        unknown = sorted(set(batch) - set(FRONT_INPUTS))
        if unknown:
            self._refuse(
                f"would be given `{unknown[0]}`",
                limit=f"a micro-batch holds labels and {', '.join(FRONT_INPUTS)}",
            )
        notes: list[Note] = []
        try:
            if self._form is None:
                with _same_randomness(batch["input_ids"].device):
                    self._form = self._find_form(batch)
            self._record(batch, self._form, notes)
        except TouchedError as error:
            self._refuse(str(error), limit=_ONE_STATE)
        for note in notes:
            for name, problem in note.call.problems():
                self._refuse(
                    f"passes `{name}` to layer {note.layer}, {problem}",
                    limit="a layer may be passed constants, tensors and containers of them",
                )
        leaves = Leaves()
        return Front(
            hidden_BTD=notes[0].hidden,
            calls=tuple(leaves.cut(note.call) for note in notes),
            leaves=leaves,
        )

    def layer_forward(self, layer: int, hidden_BTD: torch.Tensor, call: Call) -> torch.Tensor:
        """Run one layer; its weights must be in place.

        Raises:
            UnsupportedModelError: The layer changed what it may only read, so that another layer,
                another micro-batch or its own recompute would see something else.
        """
        module = self.layers[layer]
        held = self._buffers_of(layer)  # or a new one could have the id of one let go
        before = self._state_of(layer, hidden_BTD, call)
        with not_storing(self._unread[layer]):
            if call.is_hidden_keyword:
                output = module(*call.args, hidden_states=hidden_BTD, **call.kwargs)
            else:
                output = module(hidden_BTD, *call.args, **call.kwargs)
        after = self._state_of(layer, hidden_BTD, call)
        del held
        changed = [name for name in before if before[name] != after[name]]
        if changed:
            self._refuse(
                f"has a layer {layer} that changes {' and '.join(changed)}",
                limit="a layer may only read them: it is run again for its gradients",
            )
        if not isinstance(output, tuple | list):
            return cast("torch.Tensor", output)
        if self._form is not None and self._form.is_none and any(x is not None for x in output[1:]):
            self._refuse(
                f"has a layer {layer} that returns more than a hidden state",
                limit="nothing else may go from layer to layer",
            )
        return cast("torch.Tensor", output[0])

    @contextmanager
    def listening(self, layer: int) -> Iterator[list[torch.Tensor]]:
        """Collect the router logits of one visit; none where there is no router loss."""
        if self.router_loss is None:
            yield []
        else:
            with self.router_loss.listen(layer) as heard:
                yield heard

    def tail_loss(
        self, hidden_BTD: torch.Tensor, labels_BT: torch.Tensor, num_label_tokens: torch.Tensor
    ) -> torch.Tensor:
        """Run norm, head and loss on some tokens.

        Args:
            hidden_BTD: Output of the last layer for these tokens.
            labels_BT: The token that follows each of them (already shifted).
            num_label_tokens: What the sum of the losses is divided by.
        """
        if not self._has_own_loss:
            logits_BTV = self.tail_logits(hidden_BTD)
            return _cross_entropy_sum(logits_BTV, labels_BT) / num_label_tokens
        output = self._tail(
            hidden_BTD,
            labels=labels_BT,
            shift_labels=labels_BT,
            num_items_in_batch=num_label_tokens,
        )
        return cast("torch.Tensor", output.loss)

    def tail_logits(self, hidden_BTD: torch.Tensor) -> torch.Tensor:
        """Run norm and head on some tokens; returns logits (B, T, V)."""
        output = self._tail(hidden_BTD)
        if not hasattr(output, "logits"):
            self._refuse("returns no logits", limit="a causal language model has a head")
        return cast("torch.Tensor", output.logits)

    def output(self, hidden_BTD: torch.Tensor, **inputs: Any) -> Any:
        """Return what the model itself gives once its last layer has returned `hidden_BTD`.

        Args:
            hidden_BTD: Output of the last layer, of all tokens.
            inputs: What the model is called with.
        """
        return self._tail(hidden_BTD, **inputs)

    def check_tail_once(self, hidden_BTD: torch.Tensor, labels_BT: torch.Tensor) -> None:
        """Check on the first tokens that come that the tail is what a step needs.

        Norm and head must work token by token and on nothing else. The loss must be the sum of the
        tokens' cross-entropies over the number that it is given; where a model ignores that number
        or shifts the labels itself, but means the same, the sum is computed here.

        Raises:
            UnsupportedModelError: The tail or the loss is another one.
        """
        if self._is_tail_checked:
            return
        hidden_BTD, labels_BT = hidden_BTD[:, :CHECKED_TOKENS], labels_BT[:, :CHECKED_TOKENS]
        if not bool(hidden_BTD.isfinite().all()):
            return  # nothing can be told from these; whoever reads the loss will see
        with torch.no_grad(), _same_randomness(hidden_BTD.device):
            logits_BTV = self.tail_logits(hidden_BTD)
            if logits_BTV.isnan().any():
                return  # nothing can be told yet, and the loss will say so itself
            turned_BTV = self._tail(hidden_BTD.flip(1), any_token=1).logits.flip(1)
            largest = float(logits_BTV[logits_BTV.isfinite()].abs().max())
            slack = 8 * torch.finfo(logits_BTV.dtype).eps * largest
            if not torch.allclose(logits_BTV, turned_BTV, rtol=0, atol=slack):
                self._refuse(
                    "does not compute a token's logits from the last layer's output for it alone",
                    limit="what follows the layers must work token by token",
                )
            self._check_loss(hidden_BTD, logits_BTV, labels_BT)
        self._is_tail_checked = True

    def _check_loss(
        self, hidden_BTD: torch.Tensor, logits_BTV: torch.Tensor, labels_BT: torch.Tensor
    ) -> None:
        right = _cross_entropy_sum(logits_BTV, labels_BT)
        three = torch.tensor(3, device=hidden_BTD.device)
        found = self.tail_loss(hidden_BTD, labels_BT, three) * 3
        if torch.isclose(found.float(), right, rtol=1e-3):
            return
        plain = self._tail(hidden_BTD, labels=labels_BT).loss.float()
        unshifted = right / labels_BT.numel()
        shifted = _cross_entropy_sum(logits_BTV[:, :-1], labels_BT[:, 1:]) / (labels_BT.numel() - 1)
        if not any(torch.isclose(plain, mean, rtol=1e-3) for mean in (unshifted, shifted)):
            self._refuse(
                f"gives a loss of {float(found):.4f} where the sum of cross-entropies is"
                f" {float(right):.4f}",
                limit="its loss must be the cross-entropy of the next tokens",
            )
        self._has_own_loss = False

    def _find_form(self, batch: Batch) -> Form:
        """Return how the model wants its layers' output, tried on three tokens.

        Where no form will do, the one that came furthest tells why.
        """
        inputs = {name: batch[name][:1, :3] for name in FRONT_INPUTS if name in batch}
        furthest, reason = 0, ""
        for form in FORMS:
            notes: list[Note] = []
            try:
                self._record(inputs, form, notes)
            except torch.OutOfMemoryError:
                raise
            except _FORWARD_ERRORS as error:
                if not reason or len(notes) > furthest:
                    is_ours = isinstance(error, TouchedError)
                    furthest = len(notes)
                    reason = str(error) if is_ours else f"fails without its layers: {error}"
                continue
            shape = notes[0].hidden.shape
            if shape[:2] == inputs["input_ids"].shape:
                return form
            reason = f"has hidden states of shape {tuple(shape)} for one row of three tokens"
            break
        raise TouchedError(reason)

    def _record(self, batch: Batch, form: Form, notes: list[Note]) -> None:
        """Run the model up to its last layer; a note per layer."""
        last = len(self.layers) - 1
        recorders = [
            Recorder(layer, i, notes=notes, form=form, is_last=i == last)
            for i, layer in enumerate(self.layers)
        ]
        inputs = {name: batch[name] for name in FRONT_INPUTS if name in batch}
        with self._replaced(recorders), suppress(AllRecordedError):
            self.model(**inputs, use_cache=False)
        visited = [note.layer for note in notes]
        if visited != list(range(last + 1)):
            raise TouchedError(f"visits its layers in the order {visited}, not each once")
        for before, note in pairwise(notes):
            if note.hidden is not before.returned:
                raise TouchedError(
                    f"changes the hidden state between layers {before.layer} and {note.layer}"
                )
            if any(isinstance(part, Between) for part in note.call.parts()):
                raise TouchedError(f"hands more than a hidden state on to layer {note.layer}")

    def _tail(self, hidden_BTD: torch.Tensor, *, any_token: int = 0, **inputs: Any) -> Any:
        """Run the model with `hidden_BTD` as what its last layer returns; on any tokens if none."""
        form = self._form or FORMS[0]
        stand_ins: list[nn.Module] = [
            Recorder(layer, i, notes=[], form=form, is_last=False)
            for i, layer in enumerate(self.layers[:-1])
        ]
        stand_ins.append(Injector(self.layers[-1], hidden_BTD, form=form))
        any_ids = torch.full(
            hidden_BTD.shape[:2], any_token, dtype=torch.long, device=hidden_BTD.device
        )
        inputs = {"input_ids": any_ids} | inputs
        with self._replaced(stand_ins), _unchanged(self._around):
            try:
                return self.model(use_cache=False, **inputs)
            except TouchedError as error:
                self._refuse(str(error), limit=_ONE_STATE)

    @contextmanager
    def _replaced(self, stand_ins: Sequence[nn.Module]) -> Iterator[None]:
        """Put stand-ins in the layers' places; what layers return is not collected meanwhile.

        Outputs have names meanwhile, whatever the config says.
        """
        configs = (self.model.config, self.model.config.get_text_config())
        flags = [(c, name, True) for c in configs for name in COLLECTED if getattr(c, name, False)]
        flags += [(c, "return_dict", False) for c in configs if not c.return_dict]
        setattr(self._owner, self._name, nn.ModuleList(stand_ins))
        try:
            for config, name, is_on in flags:
                setattr(config, name, not is_on)
            yield
        finally:
            setattr(self._owner, self._name, self.layers)
            for config, name, is_on in flags:
                setattr(config, name, is_on)

    def _buffers_of(self, layer: int) -> list[torch.Tensor]:
        owners = self._buffered[layer]
        return [b for owner in owners for b in owner._buffers.values() if b is not None]

    def _state_of(self, layer: int, hidden_BTD: torch.Tensor, call: Call) -> dict[str, object]:
        return {
            "its input": version_of(hidden_BTD),
            "its arguments": call.fingerprint(),
            "its buffers": [(id(b), version_of(b)) for b in self._buffers_of(layer)],
        }

    def _refuse(self, what: str, *, limit: str) -> NoReturn:
        raise UnsupportedModelError(f"{self.name} {what}", limit=limit, hint=RESIDENT_HINT)


_ONE_STATE = (
    "one hidden state of (rows, tokens, ...) may go from layer to layer, and only layers may use it"
)
_FORWARD_ERRORS = (
    TouchedError,
    TypeError,
    ValueError,
    LookupError,
    AttributeError,
    RuntimeError,
    NotImplementedError,
)


@contextmanager
def _unchanged(modules: Sequence[nn.Module]) -> Iterator[None]:
    """Undo what modules note about the tokens that they see, such as rotary tables for a length."""
    before = [(module, dict(vars(module)), dict(module._buffers)) for module in modules]
    try:
        yield
    finally:
        for module, attributes, buffers in before:
            module.__dict__.update(attributes)
            module._buffers.update(buffers)


def _same_randomness(device: torch.device) -> AbstractContextManager[None]:
    """Leave the generators as they are, so that a check does not change a dropout mask."""
    return torch.random.fork_rng(devices=[device] if device.type == "cuda" else [])


def _cross_entropy_sum(logits_BTV: torch.Tensor, labels_BT: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(
        logits_BTV.flatten(0, 1).float(), labels_BT.flatten(), reduction="sum"
    )
