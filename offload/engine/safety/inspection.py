"""Checks once, before the first step, whether a model can be computed layer by layer.

Problem. Streaming computes front, layers, tail and loss separately. This equals the model's own
step only if a layer's output depends on its arguments and weights alone, if the part after the
layers works token by token on the last hidden state alone, and if the model's own loss is the
cross-entropy of the next tokens. Comparing values at one point does not prove this: a path may
start at zero, an extra term may be small, a value may be left in a global.

Idea. Each of these is a statement about structure, and is checked as such, on a few tokens, in one
pass over the layers that is streamed like any other. No gradient is touched.

1. A layer is called on a few of the batch's tokens, then on other values, then on the first ones
   again with gradients recorded. Trained weights that are zero are replaced by random values, here
   and in 2. A `Watch` sees reads and writes of tensors that are not the layer's own, and `kept_by`
   sees counters. The arguments must be unchanged, random numbers may come from torch only, and the
   last output must equal the first. Hooks that only record are ignored.
2. The model's own forward, with all its wrappers, runs with stand-ins for its layers. They return
   the same form as the layers, and the last one a random hidden state. A watch sees whether the
   part after the layers reads anything from before them.
3. Tokens of that hidden state are made NaN, which propagates along every path, even one multiplied
   by zero: only these tokens' logits may become NaN. `TailTrial` does this at the sizes of a step.
4. Logits, and their gradient by the hidden state, are compared with those that a step computes from
   the same hidden states in chunks. The model's own loss must be that of transformers' function for
   causal language models, as `own_loss` says.

Source of 3: the rules of IEEE 754, by which 0 * NaN is NaN.
"""

import inspect
import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NoReturn, TypeVar

import numpy as np
import torch
from torch import nn

from offload.engine.batch import IGNORED, Batch
from offload.engine.closeness import are_close, are_equal
from offload.engine.internals import bare
from offload.engine.model.layers import (
    FORWARD_ERRORS,
    FRONT_INPUTS,
    ONE_STATE,
    LayeredModel,
    cross_entropy_sum,
    homes_of,
    is_classifier,
    kind_of,
    unchanged,
    uncompiled,
)
from offload.engine.model.recorders import (
    Call,
    Closed,
    ClosedInjector,
    Note,
    TouchedError,
    between,
    require_in_order,
)
from offload.engine.model.visits import Graph, visit_with_graph
from offload.engine.randomness import FRONT_LAYER, VisitRandomness, same_randomness
from offload.engine.recompute import NOTHING, OutputSize, Path, Recorded, Recorder, TiledMlp, Unread
from offload.engine.safety.kept import changed_in, kept_by
from offload.engine.safety.parts import TiledMlps, candidates, unread_products
from offload.engine.safety.tail_trial import TailTrial
from offload.engine.safety.watch import JudgedHooks, Watch
from offload.engine.verdict import TrialSize
from offload.engine.visit_cache import patched

T = TypeVar("T")

_LOGITS_DIM = 3
ROWS, TOKENS = 2, 5  # of the inspection's batch
_LOSS_SLACK = 1e-5
_FEW = 1024  # of a weight's elements, which are rarely all zero if it is not
_SEED = 0
_ALONE = "a layer's output may follow only from its arguments and its own weights"
_BY_TOKEN = "what follows the layers must work token by token"
_BEFORE, _AFTER = "the part before the layers", "the part after the layers"
_NEXT_TOKENS = "its loss must be the mean cross-entropy of the next tokens"


class Inspection:
    """One inspection of a model, in its current mode (`train` or `eval`)."""

    def __init__(
        self,
        model: LayeredModel,
        batch: Batch,
        *,
        has_labels: bool,
        mlp_chunk_tokens: int | None,
        head_chunk_tokens: int,
    ) -> None:
        """Run the front.

        Args:
            model: The model; its layers need no weights yet.
            batch: A micro-batch, on the compute device.
            has_labels: Whether a loss will be computed.
            mlp_chunk_tokens: Tokens that an MLP computes at a time; None for all.
            head_chunk_tokens: Tokens of which logits exist at a time.

        Raises:
            UnsupportedModelError: A layer's arguments differ between two calls.
        """
        self._model, self._has_labels = model, has_labels
        self._tail_trial = TailTrial(model, chunk_tokens=head_chunk_tokens)
        self._tiled = mlp_chunk_tokens and TiledMlps(chunk_tokens=mlp_chunk_tokens)
        self._batch = {name: batch[name] for name in FRONT_INPUTS if name in batch}
        self._randomness = VisitRandomness(batch["input_ids"].device)
        self._watch = Watch(homes_of(model.layers, model.around))
        self._hooks = JudgedHooks(self._watch)
        few = self._inputs()
        with self._quietly():
            model.front(few)  # what is only computed once is there then
            before = self._alone(FRONT_LAYER, lambda: model.front(few))
            self._watch.begin(_BEFORE, layer=None, given=())
            with self._watch:
                front = self._alone(FRONT_LAYER, lambda: model.front(few))
            of_calls = [tensor for call in front.calls for tensor in call.tensors()]
            self._watch.end([front.hidden_BTD, *of_calls])
            self._refuse_what_was_seen()
            self._require_nothing_left_for_layers(few)
        if not are_close(before.hidden_BTD, front.hidden_BTD) or not all(
            a.is_same(b) for a, b in zip(before.calls, front.calls, strict=True)
        ):
            model.refuse("passes its layers other values when it is run again", limit=_ALONE)
        self._calls = front.calls
        self._labelled = self._passed_with_labels(few) if has_labels else {}
        self._found: dict[object, dict[str, Path]] = {}
        self._hidden_BTD = front.hidden_BTD.detach().contiguous()
        self._other_BTD = 0.75 * self._hidden_BTD.flip(-1)

    def visit(self, layer: int) -> tuple[tuple[Unread, ...], tuple[TiledMlp, ...]]:
        """Inspect one layer; its weights must be in place, and those before it were inspected.

        Returns:
            With labels: its products whose values nothing reads in a recompute; and its parts that
            are computed some tokens at a time.

        Raises:
            UnsupportedModelError: It does more than compute its output from its arguments.
        """
        module = self._model.layers[layer]
        call = self._calls[layer].with_more(self._labelled.get(layer, {}))
        given = [tensor.detach().clone() for tensor in self._calls[layer].tensors()]
        with self._quietly(), _stirred(list(module.modules())):
            mlps = self._mlps(layer, call)
            unread = self._unread(layer, mlps) if self._has_labels else ()  # while no watch is kept
            first_BTD = self._call(layer, self._hidden_BTD, call)
            kept = self._kept_by(module)
            leaf_BTD = self._hidden_BTD.clone().requires_grad_()
            outputs = []
            for which, hidden_BTD in (("an earlier call of ", self._other_BTD), ("", leaf_BTD)):
                outputs.append(self._watched(layer, hidden_BTD, call, which))
                changed = changed_in(kept, self._kept_by(module))
                if changed:
                    self._refuse_layer(layer, f"changes `{changed[0]}` when it is called")
            other_BTD, again_BTD = outputs
            if not all(map(are_equal, given, self._calls[layer].tensors())):
                self._refuse_layer(layer, "writes to what it is passed")
            if not are_close(first_BTD, again_BTD.detach(), steps=64):
                self._refuse_layer(layer, "gives another output for the same input")
            self._require_no_draws_in_backward(layer, again_BTD, leaf_BTD)
        self._other_BTD, self._hidden_BTD = other_BTD, again_BTD.detach()
        return unread, tuple(mlps.values())

    def attention(self, layer: int) -> tuple[OutputSize, ...]:
        """Return the attention that a recompute of a layer can be given; before `visit`."""
        hidden_BTD, call = self._hidden_BTD, self._calls[layer]
        visit = partial(visit_with_graph, self._model, layer, input_BTD=hidden_BTD, call=call)
        try:
            return sizes_of(
                lambda: self._call(layer, hidden_BTD, call),
                lambda recorded: self._alone(layer, lambda: visit(recorded=recorded)).with_input(),
            )
        except torch.OutOfMemoryError:
            raise
        except FORWARD_ERRORS:  # a layer that cannot be computed alone is refused by `visit`
            return ()

    def around(self, size: TrialSize) -> bool:
        """Inspect what the model computes outside its layers, after all layers were inspected.

        Args:
            size: Of the micro-batches.

        Returns:
            Whether it was possible; False if the logits are NaN.

        Raises:
            UnsupportedModelError: Logits or loss differ from those that a step computes.
        """
        with self._quietly(), _stirred(self._model.around):
            hidden_BTD = self._drawn(ROWS, TOKENS)
            if is_classifier(self._model):
                self._tail_trial.require_apart(self._drawn(size.num_rows, size.row_tokens))
                return True
            logits_BTV = getattr(self._own(hidden_BTD), "logits", None)
            is_drawn = not (isinstance(logits_BTV, torch.Tensor) and logits_BTV.isnan().any())
            if not is_drawn:
                hidden_BTD = self._hidden_BTD  # which may be positive, for one
                logits_BTV = self._own(hidden_BTD).logits
            if not isinstance(logits_BTV, torch.Tensor):
                self._model.refuse("returns no logits", limit=_BY_TOKEN)
            if logits_BTV.dim() != _LOGITS_DIM or logits_BTV.shape[:2] != (ROWS, TOKENS):
                self._model.refuse(
                    f"returns logits of shape {tuple(logits_BTV.shape)} for {ROWS} rows of {TOKENS}"
                    " tokens",
                    limit="logits are (rows, tokens, vocabulary)",
                )
            if logits_BTV.isnan().any():
                return False
            self._require_tokens_apart(hidden_BTD)
            self._require_same_in_chunks(hidden_BTD, logits_BTV)
            if self._has_labels:
                self._require_cross_entropy(hidden_BTD, logits_BTV)
            make = self._drawn if is_drawn else self._repeated
            self._tail_trial.require_apart(make(size.num_rows, size.row_tokens))
        return True

    def _drawn(self, num_rows: int, num_tokens: int) -> torch.Tensor:
        """Return random outputs of the last layer."""
        like_BTD = self._hidden_BTD
        shape = (num_rows, num_tokens, *like_BTD.shape[2:])
        return torch.randn(shape, device=like_BTD.device).to(like_BTD.dtype)

    def _repeated(self, num_rows: int, num_tokens: int) -> torch.Tensor:
        """Return outputs of the last layer that it gave, over and over."""
        flat_ND = self._hidden_BTD.flatten(0, 1)
        index_N = torch.arange(num_rows * num_tokens, device=flat_ND.device) % len(flat_ND)
        return flat_ND[index_N].view(num_rows, num_tokens, *flat_ND.shape[1:])

    # -------------------------------------------------------------------------------------- layers

    def _passed_with_labels(self, few: Batch) -> dict[int, dict[str, torch.Tensor]]:
        """Return placeholders for the labels in calls of layers, which no layer may touch.

        Some models pass the labels on with all other arguments.
        """
        model, labels_BT = self._model, few["input_ids"].clone()
        try:
            with self._quietly():
                notes = model.record(few, model.forms, root=model.whole, labels=labels_BT)
        except torch.OutOfMemoryError:
            raise
        except FORWARD_ERRORS:
            return {}  # it is found again, and refused, where the loss is inspected
        return {
            note.layer: {
                name: between(labels_BT, "its labels in a layer")
                for name, value in note.call.kwargs.items()
                if value is labels_BT
            }
            for note in notes
        }

    def _mlps(self, layer: int, call: Call) -> dict[str, TiledMlp]:
        if not self._tiled:
            return {}
        run = partial(self._call, layer, self._hidden_BTD, call)
        try:
            return self._tiled.of(self._model.layers[layer], run)
        except ValueError as error:
            self._refuse_layer(layer, f"cannot be computed in tiles: {error}")

    def _unread(self, layer: int, mlps: dict[str, TiledMlp]) -> tuple[Unread, ...]:
        """Return the products of a layer that nothing reads, sought once for each kind of layer."""
        module, call = self._model.layers[layer], self._calls[layer]

        def visit(unread: Sequence[Unread]) -> Graph:
            compute = partial(
                visit_with_graph,
                self._model,
                layer,
                input_BTD=self._hidden_BTD,
                call=call,
                unread=unread,
                mlps=tuple(mlps.values()),
            )
            return self._alone(layer, compute)

        kind = kind_of(module, call)
        if kind not in self._found:
            trained = [p for p in module.parameters() if p.requires_grad]
            by = [*trained, *(tensor for tensor in call.tensors() if tensor.requires_grad)]
            try:
                self._found[kind] = unread_products(module, visit, by, mlps)
            except torch.OutOfMemoryError:
                raise
            except RuntimeError:  # a layer that keeps state is refused for it afterwards
                self._found[kind] = {}
        named = candidates(module, mlps)
        found = self._found[kind].items()
        return tuple(Unread(module=named[n], path=path) for n, path in found if n in named)

    def _kept_by(self, module: nn.Module) -> dict[str, object]:
        return {
            **kept_by(module, hooks=self._hooks.acting),
            "Python's random numbers": random.getstate(),
            "numpy's random numbers": _numpy_state(),
        }

    def _require_nothing_left_for_layers(self, few: Batch) -> None:
        """Check that the front leaves no token-dependent state where layers could read it."""
        kinds = {type(layer): layer for layer in self._model.layers}.values()
        before = [kept_by(layer) for layer in kinds]
        fewer = {name: value[..., :-1] for name, value in few.items()}
        fewer["input_ids"] = fewer["input_ids"].flip(-1)
        self._alone(FRONT_LAYER, lambda: self._model.front(fewer))
        for layer, kept in zip(kinds, before, strict=True):
            changed = changed_in(kept, kept_by(layer))
            if changed:
                self._model.refuse(
                    f"changes `{changed[0]}`, which its layers can read, before its layers",
                    limit=_ALONE,
                )

    def _require_no_draws_in_backward(
        self, layer: int, output_BTD: torch.Tensor, leaf_BTD: torch.Tensor
    ) -> None:
        """Check that computations repeated in the backward draw no random numbers."""
        if not self._randomness.is_drawing(layer) or not output_BTD.requires_grad:
            return
        try:
            ones_BTD = torch.ones_like(output_BTD)
            has_drawn = self._randomness.draws_in(lambda: _gradient(output_BTD, leaf_BTD, ones_BTD))
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:
            self._refuse_layer(layer, f"draws random numbers and cannot be inspected: {error}")
        if has_drawn:
            self._refuse_layer(layer, "draws random numbers in its backward (a checkpoint inside)")

    def _refuse_layer(self, layer: int, what: str) -> NoReturn:
        self._model.refuse(f"has a layer {layer} that {what}", limit=_ALONE)

    def _alone(self, part: int, compute: Callable[[], T]) -> T:
        """Compute a part with random numbers that no other thread can change; in `_quietly`."""
        with same_randomness(self._batch["input_ids"].device):
            return self._randomness.visit(part, _SEED, compute)[0]

    def _call(self, layer: int, hidden_BTD: torch.Tensor, call: Call) -> torch.Tensor:
        def compute() -> torch.Tensor:
            with torch.set_grad_enabled(hidden_BTD.requires_grad):
                return self._model.layer_forward(layer, hidden_BTD, call).contiguous()

        try:
            with self._hooks.judged(self._model.layers[layer]):
                return self._alone(layer, compute)
        except TouchedError as error:
            self._model.refuse(str(error), limit=_ALONE)

    def _watched(
        self, layer: int, hidden_BTD: torch.Tensor, call: Call, which: str
    ) -> torch.Tensor:
        self._watch.begin(
            f"{which}layer {layer}",
            layer=layer,
            given=[hidden_BTD, *self._calls[layer].tensors()],
            clamped=() if self._model.carried is None else self._model.carried.clamped(layer),
        )
        with self._watch:
            output_BTD = self._call(layer, hidden_BTD, call)
        self._watch.end([output_BTD])
        if self._watch.problem:
            self._refuse_layer(layer, self._watch.problem)
        return output_BTD

    def _refuse_what_was_seen(self) -> None:
        """Refuse the model if the watch saw a problem outside the layers."""
        if not self._watch.problem:
            return
        if self._watch.culprit == _AFTER:
            self._refuse_tail(f", but {self._watch.problem}")
        self._model.refuse(f"{self._watch.problem}, before its layers", limit=_ALONE)

    # -------------------------------------------------------------------------------------- around

    def _own(self, hidden_BTD: torch.Tensor, *, labels_BT: torch.Tensor | None = None) -> Any:
        """Return the output of the model's own forward, with its wrappers, on a hidden state."""
        model, notes = self._model, list[Note]()
        inputs = self._inputs()
        last = len(model.layers) - 1
        stand_ins = model.stand_ins(Closed, model.forms, notes=notes)
        watch = self._watch
        stand_ins[last] = ClosedInjector(
            model.layers[last],
            last,
            notes=notes,
            form=model.forms[last],
            hidden=model.outside(hidden_BTD),
            on_call=lambda: watch.begin(
                _AFTER,
                layer=None,
                given=[hidden_BTD, *([] if labels_BT is None else [labels_BT])],
            ),
        )
        watch.begin(_BEFORE, layer=None, given=inputs.values())
        watch.made_by(_BEFORE, inputs.values())
        labels = {} if labels_BT is None else {"labels": labels_BT}
        try:
            expected = model.record(inputs, model.forms)
            with model.replaced(stand_ins), unchanged(model.around), watch:
                output = model.whole(**model.given({**inputs, **labels, "use_cache": False}))
            watch.end()
            require_in_order(notes, len(model.layers))
        except torch.OutOfMemoryError:
            raise
        except FORWARD_ERRORS as error:
            is_ours = isinstance(error, TouchedError)
            given = "without its layers" if labels_BT is None else "with labels, without its layers"
            what = str(error) if is_ours else f"fails {given}: {error}"
            model.refuse(f"{what}{self._wrapped}", limit=ONE_STATE)
        self._refuse_what_was_seen()
        calls = [note.alone().call.without(labels_BT) for note in notes]
        if not all(a.call.is_same(b) for a, b in zip(expected, calls, strict=True)):
            model.refuse(
                f"passes its layers other arguments with labels{self._wrapped}", limit=ONE_STATE
            )
        return output

    @property
    def _wrapped(self) -> str:
        """Return the name of the model's wrapper, if it has one."""
        whole = self._model.whole
        if whole is self._model.model:
            return ""
        kinds = (type(module).__name__ for module in (whole, *whole.children()))
        return f", as run by {' and '.join(kinds)}"

    def _inputs(self) -> dict[str, torch.Tensor]:
        """Return some tokens of the batch, and positions and padding if it has them."""
        ids_N = self._batch["input_ids"].flatten()
        some_N = torch.arange(ROWS * TOKENS, device=ids_N.device) % ids_N.numel()
        inputs = {"input_ids": ids_N[some_N].view(ROWS, TOKENS)}
        if "attention_mask" in self._batch:
            inputs["attention_mask"] = torch.ones_like(inputs["input_ids"])
            inputs["attention_mask"][1, -1] = 0
        if "position_ids" in self._batch:
            positions_T = torch.arange(TOKENS, device=ids_N.device)
            leading = self._batch["position_ids"].shape[:-2]
            inputs["position_ids"] = positions_T.expand(*leading, ROWS, TOKENS)
        return inputs

    def _require_tokens_apart(self, hidden_BTD: torch.Tensor) -> None:
        """Check that a NaN stays with its token."""
        poisoned_BTD = hidden_BTD.clone()
        poisoned_BTD[0, 2] = torch.nan
        isnan_BT = self._own(poisoned_BTD).logits.isnan().any(-1)
        isnan_BT[0, 2] = False
        if isnan_BT.any():
            self._refuse_tail()

    def _require_same_in_chunks(self, hidden_BTD: torch.Tensor, logits_BTV: torch.Tensor) -> None:
        """Check values, and gradients by the hidden state, against chunks in another order."""
        size = ROWS * TOKENS
        order_N = torch.arange(size - 1, -1, -1, device=hidden_BTD.device)
        chunks = [order_N[:3], order_N[3:]]
        cotangent_NV = torch.randn_like(logits_BTV).flatten(0, 1).nan_to_num()
        is_finite_NV = logits_BTV.flatten(0, 1).isfinite()
        cotangent_NV = cotangent_NV * is_finite_NV
        with torch.enable_grad():
            leaf_BTD = hidden_BTD.detach().requires_grad_()
            own_NV = self._own(leaf_BTD).logits.flatten(0, 1)
            own_ND = _gradient(own_NV, leaf_BTD, cotangent_NV)
            for chunk_n in chunks:
                leaf_1nD = leaf_BTD.detach().flatten(0, 1)[chunk_n].unsqueeze(0).requires_grad_()
                logits_nV = self._model.tail_logits(leaf_1nD)[0]
                num_features = hidden_BTD.shape[-1]
                if not are_close(own_NV[chunk_n], logits_nV, num_terms=num_features):
                    self._refuse_tail()
                gradient_nD = _gradient(logits_nV, leaf_1nD, cotangent_NV[chunk_n])
                if own_ND is None or gradient_nD is None:
                    self._model.refuse(
                        "has logits without a gradient by the last layer's output", limit=_BY_TOKEN
                    )
                own_nD, num_logits = own_ND.flatten(0, 1)[chunk_n], logits_nV.shape[-1]
                if not are_close(own_nD, gradient_nD[0], steps=64, num_terms=num_logits):
                    self._refuse_tail()

    def _require_cross_entropy(self, hidden_BTD: torch.Tensor, logits_BTV: torch.Tensor) -> None:
        """Check that the model's own loss is transformers' for causal language models."""
        labels_BT = self._labels(logits_BTV)
        with heard_loss(self._model.model) as heard:
            output = self._own(hidden_BTD, labels_BT=labels_BT)
        loss, own_BTV = output.loss, output.logits
        if not isinstance(loss, torch.Tensor) or not isinstance(own_BTV, torch.Tensor):
            self._model.refuse("returns no loss with its logits", limit=_NEXT_TOKENS)
        if not are_close(own_BTV.to(logits_BTV.dtype), logits_BTV):
            self._model.refuse("has other logits where it is given labels", limit=_NEXT_TOKENS)
        num_labels = (labels_BT[:, 1:] != IGNORED).sum()
        right = cross_entropy_sum(own_BTV[:, :-1], labels_BT[:, 1:]) / num_labels
        if not torch.isclose(loss.float(), right, rtol=_LOSS_SLACK):
            num_all = (labels_BT != IGNORED).sum()
            self._refuse_loss(loss, right, cross_entropy_sum(own_BTV, labels_BT) / num_all)
        problem = heard.problem(loss, own_BTV, labels_BT)
        if problem:
            self._model.refuse(problem, limit=_NEXT_TOKENS)

    def _labels(self, logits_BTV: torch.Tensor) -> torch.Tensor:
        """Return labels that have a finite logit at the token before, special ones included."""
        noise_BTV = torch.rand_like(logits_BTV, dtype=torch.float32)
        is_open_BTV = logits_BTV.isfinite()
        chosen_BT = noise_BTV.masked_fill(~is_open_BTV, -1).argmax(-1)
        labels_BT = chosen_BT.roll(1, dims=1)
        config = self._model.model.config.get_text_config()
        special = (getattr(config, name, None) for name in ("pad_token_id", "eos_token_id"))
        for t, token in enumerate(special, start=1):
            if (
                isinstance(token, int)
                and 0 <= token < logits_BTV.shape[-1]
                and is_open_BTV[0, t - 1, token]
            ):
                labels_BT[0, t] = token
        labels_BT[0, 3] = IGNORED
        labels_BT[1, -1] = IGNORED  # padding, where there is a mask
        return labels_BT

    def _refuse_tail(self, why: str = "") -> NoReturn:
        self._model.refuse(
            f"does not compute a token's logits from the last layer's output for it alone{why}",
            limit=_BY_TOKEN,
        )

    def _refuse_loss(
        self, loss: torch.Tensor, right: torch.Tensor, unshifted: torch.Tensor
    ) -> NoReturn:
        if torch.isclose(loss.float(), unshifted, rtol=_LOSS_SLACK):
            self._model.refuse(
                "has a loss that compares each token's logits with the label in its own place",
                limit=_NEXT_TOKENS,
            )
        self._model.refuse(
            f"gives a loss of {loss.item():.6g} where the mean of cross-entropies is"
            f" {right.item():.6g}",
            limit=_NEXT_TOKENS,
        )

    @contextmanager
    def _quietly(self) -> Iterator[None]:
        """Record no graph; draw the same numbers each time, and leave the generators unchanged.

        Compiled code runs uncompiled, so that the watch sees it and nothing is compiled for it.
        """
        device = self._batch["input_ids"].device
        with torch.no_grad(), same_randomness(device), uncompiled():
            self._randomness.seed(_SEED)
            yield


@contextmanager
def _stirred(modules: Sequence[nn.Module]) -> Iterator[None]:
    """Put random values into trained weights that are zero: zeros hide what they multiply.

    No write is counted, so that generations with these weights go on.
    """
    zero = [
        bare(parameter)
        for module in modules
        for parameter in module.parameters(recurse=False)
        if parameter.requires_grad and not parameter.flatten()[:_FEW].any() and not parameter.any()
    ]
    try:
        for values in zero:
            values.normal_(std=0.1)
        yield
    finally:
        for values in zero:
            values.zero_()


def _gradient(
    value: torch.Tensor, by: torch.Tensor, cotangent: torch.Tensor | None
) -> torch.Tensor | None:
    if not value.requires_grad:
        return None
    (found,) = torch.autograd.grad(value, [by], cotangent, retain_graph=True, allow_unused=True)
    return found


def _numpy_state() -> tuple[bytes, int]:
    state: Any = np.random.get_state(legacy=False)
    return state["state"]["key"].tobytes(), state["state"]["pos"]


def sizes_of(
    forward: Callable[[], torch.Tensor],
    recompute: Callable[[Recorded], tuple[torch.Tensor, torch.Tensor]],
) -> tuple[OutputSize, ...]:
    """Return the sizes of a layer's recorded attention, in the order of its calls.

    There are none unless output and gradient are the same to the bit with the record and without,
    and the forward is the same whether it is recorded or not.

    Args:
        forward: Computes the layer without a graph.
        recompute: Computes it with a graph, given a record; returns its output and its input.
    """
    with Recorder() as recorder:
        with_BTD = forward()
    recorded = recorder.recorded()
    if not recorded.tensors or not torch.equal(with_BTD, forward()):
        return ()
    outputs: list[torch.Tensor] = []
    gradients: list[torch.Tensor] = []
    for one in (recorded, NOTHING):
        output_BTD, input_BTD = recompute(one)
        outputs.append(output_BTD.detach())
        gradients += torch.autograd.grad(output_BTD, input_BTD, outputs[-1])
    return recorded.sizes if torch.equal(*outputs) and torch.equal(*gradients) else ()


# ---------------------------------------------------------------------------------------------
# Whether a model's own loss is the cross-entropy that a step computes, by identity.
#
# Problem. A step computes the loss itself, chunk by chunk. That values agree on a few tokens does
# not show that the model's own loss is the same: class weights, a token without a loss and a
# schedule differ only on other tokens, or later.
#
# Idea. Transformers has one function for the loss of causal language models. The model's loss is
# that one if the function is what the model calls, with the logits that it returns, the labels that
# it was given and no option that changes the result, and if the loss is the very tensor that it
# returned.

_OFF = {"num_items_in_batch": None, "ignore_index": IGNORED, "shift_labels": None}
_ATTRIBUTE = "_loss_function"  # what transformers' property returns, where it is set


@dataclass(kw_only=True, slots=True)
class OwnLoss:
    """The function that a model calls for its loss, and its calls."""

    function: Any  # the function
    # The arguments by name and the result of each call.
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


@contextmanager
def heard_loss(model: Any) -> Iterator[OwnLoss]:
    """Record the calls of a model's loss function meanwhile."""
    heard = OwnLoss(function=model.loss_function)

    def hear(*args: Any, **kwargs: Any) -> Any:
        returned = heard.function(*args, **kwargs)
        if _is_transformers_own(heard.function):
            given = inspect.signature(heard.function).bind(*args, **kwargs).arguments
            heard.calls.append((given, returned))
        return returned

    with patched((vars(model), {_ATTRIBUTE: hear})):
        yield heard


def _is_transformers_own(function: Any) -> bool:
    from transformers.loss.loss_utils import ForCausalLMLoss  # a second, which a plan need not wait

    return function is ForCausalLMLoss


def _name_of(function: Any) -> str:
    name = getattr(function, "__qualname__", type(function).__qualname__)
    return str(name).rpartition("<locals>.")[2]
