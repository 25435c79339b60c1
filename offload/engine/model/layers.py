"""A Hugging Face causal language model seen as front, layers and tail, without changing its code.

Problem. To drive the decoder layers one by one we need the exact arguments that the model would
pass to each of them (masks per layer type, rotary embeddings, positions), and what it does after
the last one (norm, head, loss). Both differ between some two hundred architectures.

Idea. Run the model's own forward with stand-ins in place of its layers. For the *front*, a
recorder records each layer's arguments; the last one stops the pass. For the *tail*, the last
stand-in returns the true hidden states, so the model's own norm, head and loss run on them.
Norm, head and loss work token by token, so the tail gets only the labelled tokens, in chunks: the
logits of a whole batch never exist at once.

This breaks if layers share anything besides the hidden state, or if the model does anything else
with it between or after them: the loss is right and the gradients are wrong. No case is known by
name. What can be detected while a model runs is checked here, at each visit; the rest is checked by
`offload.engine.safety`, once, before any gradient is touched. Either refuses the model and names
the finding.
"""

import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, NoReturn, cast

import torch
from torch import nn

from offload.engine.batch import ROW_LENS, Batch, Shape, Vocabulary, shape_of
from offload.engine.closeness import are_close, are_equal
from offload.engine.host.embedding import HostEmbedding
from offload.engine.model.packed_rows import JoinedRows, PackedCall, packed_calls, rows_apart
from offload.engine.model.recorders import (
    FORMS,
    AllRecordedError,
    Call,
    Form,
    Injector,
    Last,
    Leaves,
    Note,
    Snapshot,
    StandIn,
    TouchedError,
    front_arguments,
    problems,
    require_in_order,
)
from offload.engine.model.router import RouterLoss
from offload.engine.pointwise.layers import FusedLayers
from offload.engine.pointwise.ops import cross_entropy
from offload.engine.pointwise.recognise import DTYPES
from offload.engine.randomness import same_randomness
from offload.engine.verdict import Verdict
from offload.engine.visit_cache import patched
from offload.errors import UnsupportedModelError
from offload.plan.facts.workload import FusedPart

RESIDENT_HINT = "train this model resident, with another tool"

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from offload.engine.model.carried import Carried


# ---------------------------------------------------------------------------------------------
# Rotary embeddings whose frequencies depend on the length of a row: LongRoPE and dynamic NTK.
#
# Problem. transformers writes the frequencies of the longest row of a call into the module: in
# place for LongRoPE, and for dynamic NTK together with the greatest length seen so far. A row would
# be computed with the frequencies of a row before it, or of a longer one in its micro-batch.
#
# Idea. While the model's own forward runs without its layers, these modules start each call from
# the frequencies of their config, and compute rows that are padded to one length one by one, each
# up to its own last token. So a row has the frequencies that it has alone.

_ORIGINAL, _CACHED = "original_inv_freq", "max_seq_len_cached"


class LengthRotary:
    """The rotary modules of a model, outside its layers, that depend on a row's length."""

    def __init__(self, decoder: nn.Module, modules: Sequence[nn.Module]) -> None:
        """Find them.

        Args:
            decoder: The module that calls them, which is given the rows and their mask.
            modules: All modules outside the layers.
        """
        self._decoder = decoder
        self._modules = [module for module in modules if _depends_on_length(module)]
        self._lengths = {length for module in self._modules for length in _switch_lengths(module)}
        self._mask_BT: torch.Tensor | None = None

    def switches(self, num_before: int, num_after: int) -> bool:
        """Return whether LongRoPE has other frequencies for a row once it has grown.

        Args:
            num_before: Tokens of the row before.
            num_after: Tokens of it now.
        """
        return any(num_before <= length < num_after for length in self._lengths)

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Compute each row in a block as it is computed alone."""
        if not self._modules:
            yield
            return
        forwards = [{"forward": partial(self._forward, m, m.forward)} for m in self._modules]
        hook = self._decoder.register_forward_pre_hook(self._note_mask, with_kwargs=True)
        try:
            with patched(*zip(map(vars, self._modules), forwards, strict=True)):
                yield
        finally:
            hook.remove()
            for module in self._modules:
                _reset(module)

    def _note_mask(self, _decoder: nn.Module, _args: Any, given: Mapping[str, Any]) -> None:
        mask = given.get("attention_mask")
        self._mask_BT = mask if isinstance(mask, torch.Tensor) else None

    def _forward(
        self,
        module: nn.Module,
        compute: Callable[..., Any],
        x: torch.Tensor,
        position_ids: torch.Tensor,
        **more: Any,
    ) -> Any:
        rows_dim = position_ids.dim() - 2
        if self._mask_BT is None or self._mask_BT.shape[0] == 1:
            _reset(module)
            return compute(x, position_ids, **more)
        mask_BT, rows = self._mask_BT.bool(), list[Any]()
        for b in range(mask_BT.shape[0]):
            own = position_ids.narrow(rows_dim, b if position_ids.shape[rows_dim] > 1 else 0, 1)
            last = torch.where(mask_BT[b], own, 0).amax(dim=-1, keepdim=True)
            _reset(module)
            rows.append(compute(x[b : b + 1], torch.minimum(own, last), **more))
        if isinstance(rows[0], torch.Tensor):
            return torch.cat(rows, dim=rows_dim)
        return tuple(torch.cat(parts, dim=rows_dim) for parts in zip(*rows, strict=True))


def _depends_on_length(module: nn.Module) -> bool:
    kinds = getattr(module, "rope_type", None)
    kinds = kinds.values() if isinstance(kinds, dict) else (kinds,)
    return any(kind == "longrope" or "dynamic" in str(kind) for kind in kinds)


def _switch_lengths(module: Any) -> set[int]:
    """Return the lengths above which a rotary module takes the long factors of LongRoPE."""
    rope = module.config.rope_parameters
    parts = [rope] if "rope_type" in rope else rope.values()  # or by type of layer
    name = "original_max_position_embeddings"
    return {part[name] for part in parts if part["rope_type"] == "longrope"}


def _reset(module: nn.Module) -> None:
    """Set the frequencies to those of the config, in memory of their own."""
    for name, original in list(module.named_buffers(recurse=False)):
        if name.endswith(_ORIGINAL):
            setattr(module, name.replace(_ORIGINAL, "inv_freq"), original.clone())
    for name in list(vars(module)):
        if name.endswith(_CACHED):
            setattr(module, name, getattr(module, "original_max_seq_len"))  # noqa: B009 - untyped


def require_language_model(model: nn.Module) -> None:
    """Check that this is a transformers model whose layers are those of its decoder.

    Raises:
        UnsupportedModelError: It is another module.
    """
    if not (hasattr(model, "config") and hasattr(model, "get_decoder")):
        raise UnsupportedModelError(
            f"a {type(model).__name__} is no causal language model of transformers",
            limit="its config and its decoder are what the layers are found by",
            hint="attach the whole model, e.g. `AutoModelForCausalLM.from_pretrained(...)`, or the"
            " peft model around it",
        )
    if getattr(model.config, "is_encoder_decoder", False):
        raise UnsupportedModelError(
            f"{type(model).__name__} is an encoder with a decoder",
            limit="the tokens that are learned pass through all layers of one stack",
            hint=RESIDENT_HINT,
        )


def find_layers(model: "PreTrainedModel", text_config: Any) -> tuple[nn.Module, str]:
    """Return the module that owns the decoder layers, and the name of their attribute."""
    keys = ("decoder_layers", "num_hidden_layers", "num_layers")
    numbers = {getattr(text_config, key) for key in keys if hasattr(text_config, key)}
    for root in (model.get_decoder(), model.base_model):
        found = [
            (owner, name)
            for owner in (root, *root.children())
            for name, child in owner.named_children()
            if isinstance(child, nn.ModuleList) and len(child) in numbers
        ]
        if len(found) == 1:
            return found[0]
    raise UnsupportedModelError(
        f"{type(model).__name__} has no list, or several, of as many modules as its config has"
        f" layers ({', '.join(map(str, sorted(numbers))) or 'which it does not say'})",
        limit="one list, of its decoder layers, can be streamed",
        hint=RESIDENT_HINT,
    )


def modules_outside(model: nn.Module, layers: nn.ModuleList) -> list[nn.Module]:
    """Return all modules that are reachable from a model other than through its list of layers.

    A layer's module is included if it is reachable in another way as well.
    """
    found: dict[nn.Module, None] = {}
    waiting = [model]
    while waiting:
        module = waiting.pop()
        if module not in found:
            found[module] = None
            waiting += [child for child in module.children() if child is not layers]
    return list(found)


def homes_of(layers: nn.ModuleList, outside: Iterable[nn.Module]) -> dict[int, int]:
    """Return the layer of each parameter, by id, that belongs to one layer alone."""
    shared = {id(p) for module in outside for p in module.parameters(recurse=False)}
    homes: dict[int, int] = {}
    for index, layer in enumerate(layers):
        for parameter in layer.parameters():
            if homes.setdefault(id(parameter), index) != index:
                shared.add(id(parameter))
    return {key: home for key, home in homes.items() if key not in shared}


def find_towers(model: "PreTrainedModel") -> list[nn.Module]:
    """Return the modules next to the decoder of a composite: towers for images and audio.

    Text does not pass through them, so they need not be where the layers compute.
    """
    decoder, owner = model.get_decoder(), model.base_model
    embedding = model.get_input_embeddings()
    towers: list[nn.Module] = []
    while decoder is not owner and decoder in set(owner.modules()):
        children = {child: set(child.modules()) for child in owner.children()}
        towers += [c for c, inside in children.items() if not inside & {decoder, embedding}]
        owner = next(child for child, inside in children.items() if decoder in inside)
    return towers


def refuse_trained_outside(model: nn.Module, base: nn.Module) -> None:
    """Refuse trained parameters in wrappers around the model, such as a soft prompt."""
    inside = {id(parameter) for parameter in base.parameters()}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad and id(parameter) not in inside:
            raise UnsupportedModelError(
                f"`{name}` trains, but is no part of {type(base).__name__}",
                limit="the adapter must live inside the model's own modules",
                hint="use an adapter such as LoRA",
            )


def refuse_layer_drop(model: nn.Module, owner: nn.Module) -> None:
    """Refuse a model that skips layers at random in training.

    Args:
        model: The model.
        owner: Its module that runs the layers.

    Raises:
        UnsupportedModelError: It skips layers.
    """
    if rate := vars(owner).get("layerdrop", 0):
        name = next(name for name, module in model.named_modules() if module is owner)
        raise UnsupportedModelError(
            f"{type(model).__name__} skips layers at random in training: `{name}.layerdrop` is"
            f" {rate}",
            limit="each layer is visited once per pass",
            hint=f"`get_submodule({name!r}).layerdrop = 0.0` on the model, before `offload.attach`",
        )


Forms = tuple[Form, ...]
FRONT_INPUTS = ("input_ids", "attention_mask", "position_ids")
LayerCall = Call | PackedCall
LOGITS_DIM = 3  # (B, T, V), also of a model with several hidden states a token
# config fields of models whose layers share values
CARRYING = ("num_kv_shared_layers", "indexer_types", "router_hidden_size")
COLLECTED = ("output_hidden_states", "output_attentions", "output_router_logits")
"""Config options that make a model collect outputs of its layers."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Front:
    """The layers' inputs: hidden states (B, T, ...), and each layer's other arguments.

    Those of packed rows are in `packed`, and `calls` is empty.
    """

    hidden_BTD: torch.Tensor
    calls: tuple[Call, ...]
    leaves: Leaves
    packed: tuple[PackedCall, ...] = ()

    @property
    def shape(self) -> Shape:
        """What the memory of a visit grows with."""
        num_sequences, num_tokens = self.hidden_BTD.shape[:2]
        return shape_of(num_sequences, num_tokens, self.packed[0].lens if self.packed else ())

    @property
    def layer_calls(self) -> tuple[LayerCall, ...]:
        """Each layer's other arguments, whether rows are packed or not."""
        return self.packed or self.calls

    def backward(self, gradient_BTD: torch.Tensor | None) -> None:
        """Run the front's backward from the gradients of all layer inputs."""
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
            UnsupportedModelError: There is not exactly one stack of decoder layers, or a setting of
                the model would give wrong gradients layer by layer.
        """
        unwrap = getattr(model, "get_base_model", None)  # peft's wrapper
        self.model = cast("PreTrainedModel", model if unwrap is None else unwrap())
        require_language_model(self.model)
        self.name = type(self.model).__name__
        self.whole = model
        refuse_trained_outside(model, self.model)
        text_config = self.model.config.get_text_config()
        self.max_positions: int = getattr(text_config, "max_position_embeddings", sys.maxsize)
        self.embedding: HostEmbedding | None = None
        self.unread_head: Callable[[], AbstractContextManager[None]] = nullcontext
        self._forms: Forms | None = None
        self._returned: dict[int, Form] = {}
        self.token_bytes = 0  # of a layer's input, once the layers were visited
        has_router_loss = getattr(text_config, "output_router_logits", False)
        self._owner, self._name = find_layers(self.model, text_config)
        self.layers = cast("nn.ModuleList", getattr(self._owner, self._name))
        refuse_layer_drop(self.model, self._owner)
        self.towers = find_towers(self.model)
        self.router_loss = (
            RouterLoss(self.model, self.model.get_decoder(), list(self.layers))
            if has_router_loss
            else None
        )
        self.around = modules_outside(self.model, self.layers)
        self.rotary = LengthRotary(self._owner, self.around)
        self.given = front_arguments(self.model)
        self._buffered = [
            [m for m in layer.modules() if list(m.buffers(recurse=False))] for layer in self.layers
        ]
        self.carried: Carried | None = None
        """The values that layers share; None in models that have no such setting."""
        if any(hasattr(text_config, x) for x in CARRYING) and not has_router_loss:
            from offload.engine.model import carried

            self.carried = carried.Carried(self.name, self._owner, list(self.layers))
        self.fused: FusedLayers | None = None
        self.verdict = Verdict()
        """What checks have found out; see `offload.engine.safety.check`."""
        self.joins_rows = False
        """Whether attention of packed rows may be one call."""
        self.joined: set[int] = set()
        """Layers in which it was one, when they last computed rows together."""

    def fuse(self, plain_parts: frozenset[FusedPart] = frozenset()) -> None:
        """Compute norms, rotations, gates and the loss by fused operators, but for these."""
        self.fused = FusedLayers(list(self.layers), plain_parts)

    @property
    def fuses_loss(self) -> bool:
        """Whether one operator computes the loss, of logits in a type that it knows."""
        return self.fused is not None and self.fused.has_loss

    def front(self, batch: Batch) -> Front:
        """Run the part of the model before the layers.

        Args:
            batch: input_ids (B, T) and optionally attention_mask, position_ids, on the compute
                device; or input_ids (1, T) of several rows, and row_lens, the tokens of each.

        Raises:
            UnsupportedModelError: The model does something between its layers, does not visit each
                once and in order, or passes an argument through which they could share state.
        """
        unknown = sorted(set(batch) - {*FRONT_INPUTS, ROW_LENS})
        if unknown:
            self.refuse(
                f"would be given `{unknown[0]}`",
                limit=f"a micro-batch holds labels and {', '.join((*FRONT_INPUTS, ROW_LENS))}",
            )
        lens = batch[ROW_LENS].tolist() if ROW_LENS in batch else []
        leaves = Leaves()
        if len(lens) < 2:
            notes = self.notes(batch)
            calls = tuple(leaves.cut(note.call) for note in notes)
            return Front(hidden_BTD=notes[0].hidden, calls=calls, leaves=leaves)
        rows = list(batch["input_ids"].split(lens, dim=1))
        if len(set(lens)) == 1:  # only a row of another length shows which dimensions count tokens
            rows.append(rows[0].repeat(1, 2))
        by_row = self._notes_of([{"input_ids": row} for row in rows])
        hidden_BTD = torch.cat([notes[0].hidden for notes in by_row[: len(lens)]], dim=1)
        joined = JoinedRows.of(lens, hidden_BTD.device) if self.joins_rows else None
        packed = packed_calls([[note.call for note in notes] for notes in by_row], lens, joined)
        packed = packed if self.carried is None else self.carried.joined(packed)
        distinct = {id(call): call for call in packed}  # layers share them
        cut = {key: call.cut(leaves) for key, call in distinct.items()}
        shared = tuple(cut[id(call)] for call in packed)
        return Front(hidden_BTD=hidden_BTD, calls=(), leaves=leaves, packed=shared)

    def notes(self, batch: Batch, *, shared: object = None, **more: Any) -> list[Note]:
        """Record the arguments of all layers, which may be kept.

        Args:
            batch: As for `front`, of rows that are not packed.
            shared: An object that layers may share, if there is one.
            more: Further arguments of the model.

        Raises:
            UnsupportedModelError: As for `front`.
        """
        (notes,) = self._notes_of([batch], shared=shared, **more)
        return notes

    def _notes_of(
        self, batches: Sequence[Batch], *, shared: object = None, **more: Any
    ) -> list[list[Note]]:
        first = batches[0]
        try:
            if self._forms is None:
                self._few = {name: first[name][:1, :3] for name in FRONT_INPUTS if name in first}
                with same_randomness(first["input_ids"].device):
                    self._forms = self._find_forms()
            found = list(self._recorded(batches, self._forms, **more))
        except TouchedError as error:
            self.refuse(str(error), limit=ONE_STATE)
        for layer, name, problem in (one for notes in found for one in problems(notes, shared)):
            self.refuse(
                f"passes `{name}` to layer {layer}, {problem}",
                limit="a layer may be passed constants, tensors and containers of them",
            )
        return found if self.carried is None else list(map(self.carried.given, found))

    def layer_forward(self, layer: int, hidden_BTD: torch.Tensor, call: LayerCall) -> torch.Tensor:
        """Run one layer; its weights must be in place.

        Packed rows are computed together where the layer is known to keep them apart.

        Raises:
            UnsupportedModelError: As for `row_forward`.
        """
        if not isinstance(call, PackedCall):
            return self.row_forward(layer, hidden_BTD, call)
        if not self.is_together(layer, call):
            return self.rows_alone(layer, hidden_BTD, call)
        joins = layer not in self.verdict.unjoined
        return self.rows_together(layer, hidden_BTD, call, joins=joins)

    def is_together(self, layer: int, call: LayerCall) -> bool:
        """Return whether a layer computes all rows of a call at once."""
        return not isinstance(call, PackedCall) or (
            layer in self.verdict.together and call.together is not None
        )

    def rows_together(
        self, layer: int, hidden_BTD: torch.Tensor, call: PackedCall, *, joins: bool
    ) -> torch.Tensor:
        """Run one layer on all tokens of packed rows, which its attention keeps apart.

        Args:
            layer: The layer, whose weights are in place.
            hidden_BTD: Its input.
            call: Its other arguments.
            joins: Whether attention of all rows may be one call.
        """
        assert call.together is not None
        with rows_apart(self.layers[layer], call, joins=joins) as rows:
            output_BTD = self.row_forward(layer, hidden_BTD, call.together)
        (self.joined.add if rows.has_joined else self.joined.discard)(layer)
        return output_BTD

    def rows_alone(self, layer: int, hidden_BTD: torch.Tensor, call: PackedCall) -> torch.Tensor:
        """Run one layer on each of some packed rows."""
        rows = zip(call.split(hidden_BTD), call.rows, strict=True)
        return torch.cat([self.row_forward(layer, *row) for row in rows], dim=1)

    def row_forward(self, layer: int, hidden_BTD: torch.Tensor, call: Call) -> torch.Tensor:
        """Run one layer on rows that are not packed, or on packed ones as if they were one.

        Raises:
            UnsupportedModelError: The layer changed a read-only argument, so that another layer,
                another micro-batch or its own recompute would see other values.
        """
        module = self.layers[layer]
        before = self._state_of(layer, hidden_BTD, call)
        carried, own = self.carried, call
        if carried is not None:
            tried_BTD = None if layer in self.verdict.together else hidden_BTD
            own = carried.passed(layer, call, tried_BTD)
        with nullcontext() if self.fused is None else self.fused.visited(layer):
            if call.is_hidden_keyword:
                output = module(*call.args, hidden_states=self.outside(hidden_BTD), **own.kwargs)
            else:
                output = module(self.outside(hidden_BTD), *call.args, **own.kwargs)
        if carried is not None:
            carried.keep(layer, call, own, output)
        after = self._state_of(layer, hidden_BTD, call)
        changed = [name for name in before if before[name] != after[name]]
        if changed:
            self.refuse(
                f"has a layer {layer} that changes {' and '.join(changed)}",
                limit="a layer may only read them: it is run again for its gradients",
            )
        self._note_form(layer, output)
        return self.inside(output[0] if isinstance(output, tuple | list) else output)

    def listening(self, layer: int) -> AbstractContextManager[list[torch.Tensor]]:
        """Collect router logits that have a loss, or values to share, in one visit."""
        heard = self.carried or self.router_loss
        return nullcontext([]) if heard is None else heard.listen(layer)

    def inside(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return a hidden state of the model's as (B, T, ...)."""
        return hidden if self.carried is None else self.carried.inside(hidden)

    def outside(self, hidden_BTD: torch.Tensor) -> torch.Tensor:
        """Return a hidden state as the model has it."""
        return hidden_BTD if self.carried is None else self.carried.outside(hidden_BTD)

    def hears(self, layer: int) -> bool:
        """Return whether a layer has routers that have a loss."""
        return self.router_loss is not None and self.router_loss.hears(layer)

    def tail_loss(
        self,
        hidden_ND: torch.Tensor,
        *,
        positions_N: torch.Tensor,
        next_N: torch.Tensor,
        num_items: torch.Tensor,
        gradient_ND: torch.Tensor | None,
        loss_scale: float = 1.0,
    ) -> torch.Tensor:
        """Run norm, head and loss on some tokens, and write the gradient where one is wanted.

        The loss is computed here because a model's own may not accept a divisor.

        Args:
            hidden_ND: Output of the last layer, of all tokens of a micro-batch.
            positions_N: Which of them have a next token to predict.
            next_N: That token.
            num_items: What the sum of the losses is divided by.
            gradient_ND: Where the gradient by `hidden_ND` goes.
            loss_scale: Factor of all gradients.

        Returns:
            The loss, a scalar without a graph.
        """
        is_trained = gradient_ND is not None
        chunk_1ND = hidden_ND[positions_N].unsqueeze(0)
        chunk_1ND.requires_grad_(is_trained)
        if self.fuses_loss and chunk_1ND.dtype in DTYPES:
            logits_NV = self.tail_logits(chunk_1ND).flatten(0, 1)
            divisor = num_items if loss_scale == 1 else num_items / loss_scale
            losses_N, of_logits_NV = cross_entropy(
                logits_NV.detach(), next_N, num_items=divisor, has_gradient=is_trained
            )
            loss = losses_N.sum() / num_items
            if is_trained:
                logits_NV.backward(of_logits_NV)
        else:  # no name holds the logits, so they are gone in the backward
            loss = cross_entropy_sum(self.tail_logits(chunk_1ND), next_N.unsqueeze(0)) / num_items
            if is_trained:
                (loss if loss_scale == 1 else loss_scale * loss).backward()
        if gradient_ND is not None:
            assert chunk_1ND.grad is not None
            gradient_ND[positions_N] = chunk_1ND.grad[0]
        return loss.detach()

    def tail_logits(self, hidden_BTD: torch.Tensor) -> torch.Tensor:
        """Run norm and head on some tokens; returns logits (B, T, V).

        Raises:
            UnsupportedModelError: It has no head, or one that does not predict tokens.
        """
        logits = getattr(self.output(hidden_BTD), "logits", None)
        if not isinstance(logits, torch.Tensor) or logits.dim() != LOGITS_DIM:
            found = "no logits" if logits is None else "one row of outputs for all tokens of a row"
            self.refuse(f"returns {found}", limit="a causal language model predicts each token")
        return logits

    def output(self, hidden_BTD: torch.Tensor, **inputs: Any) -> Any:
        """Return the model's own output, given that its last layer returned `hidden_BTD`.

        Args:
            hidden_BTD: Output of the last layer, of all tokens.
            inputs: Arguments of the model's call.
        """
        with self.tail() as compute:
            return compute(hidden_BTD, **inputs)

    @contextmanager
    def tail(self, root: nn.Module | None = None) -> Iterator[Callable[..., Any]]:
        """Yield a function that runs the model with a tensor as its last layer's output.

        It takes more arguments of the model's call; if no tokens are given, they are zeros.

        Args:
            root: The module to run; None for the model without its wrappers.
        """
        forms, notes = self._forms or (FORMS[0],) * len(self.layers), list[Note]()
        stand_ins = self.stand_ins(StandIn, forms, notes=notes)
        last = len(self.layers) - 1

        def compute(hidden_BTD: torch.Tensor, **inputs: Any) -> Any:
            injector = Injector(
                self.layers[last],
                last,
                notes=notes,
                form=forms[last],
                hidden=self.outside(hidden_BTD),
            )
            getattr(self._owner, self._name)[last] = injector
            any_ids = torch.zeros(hidden_BTD.shape[:2], dtype=torch.long, device=hidden_BTD.device)
            given = {"input_ids": any_ids, "use_cache": False, **inputs}
            try:
                return self.model(**given) if root is None else root(**self.given(given))
            except TouchedError as error:
                self.refuse(str(error), limit=ONE_STATE)
            finally:
                notes.clear()

        unread = nullcontext() if self.embedding is None else self.embedding.unread()
        with self.replaced(stand_ins), unchanged(self.around), unread:
            yield compute

    def record(
        self, batch: Batch, forms: Forms, *, root: nn.Module | None = None, **more: Any
    ) -> list[Note]:
        """Run the model up to its last layer; return a note per layer.

        Args:
            batch: The model's inputs.
            forms: How each layer returns the hidden state.
            root: The module to run; None for the model without its wrappers.
            more: Further arguments.

        Raises:
            TouchedError: Its layers could not be visited one by one.
        """
        (notes,) = self._recorded([batch], forms, root=root, **more)
        return notes

    def _recorded(
        self, batches: Iterable[Batch], forms: Forms, *, root: nn.Module | None = None, **more: Any
    ) -> Iterator[list[Note]]:
        """Yield what was recorded of each batch; its layers are replaced once for all batches."""
        notes: list[Note] = []
        with self._standing_in(forms, notes):
            for batch in batches:
                self._run(batch, root, **more)
                require_in_order(notes, len(self.layers))
                yield [note.alone() for note in notes]
                notes.clear()

    @property
    def forms(self) -> Forms:
        """How each layer returns the hidden state, once the layers were visited."""
        assert self._forms is not None
        return self._forms

    def _find_forms(self) -> Forms:
        """Return the form in which the model expects its layers' output, tried on three tokens.

        If no form works, the error is that of the form that got furthest.
        """
        furthest, reason = 0, ""
        for form in FORMS:
            notes: list[Note] = []
            forms = (form,) * len(self.layers)
            try:
                with self._standing_in(forms, notes):
                    self._run(self._few)
                    require_in_order(notes, len(self.layers))
            except torch.OutOfMemoryError:
                raise
            except FORWARD_ERRORS as error:
                if not reason or len(notes) > furthest:
                    is_ours = isinstance(error, TouchedError)
                    furthest = len(notes)
                    reason = str(error) if is_ours else f"fails without its layers: {error}"
                continue
            hidden = self.inside(notes[0].hidden)
            shape = hidden.shape
            if shape[:2] == self._few["input_ids"].shape:
                self.token_bytes = hidden.element_size() * shape[2:].numel()
                return forms
            reason = f"has hidden states of shape {tuple(shape)} for one row of three tokens"
            break
        raise TouchedError(reason)

    def _note_form(self, layer: int, output: object) -> None:
        """Compare the form of a layer's output with the form the front was recorded with.

        If they differ, the model is run again with stand-ins that return the layer's form, since it
        may treat that one differently.
        """
        if self._forms is None:
            return
        found = Form.of(output)
        if self._returned.setdefault(layer, found) != found:
            self.refuse(
                f"has a layer {layer} that does not always return the same number of values",
                limit=ONE_STATE,
            )
        if found == self._forms[layer]:
            return
        forms = (*self._forms[:layer], *(found,) * (len(self.layers) - layer))
        try:
            with torch.no_grad(), same_randomness(self._few["input_ids"].device):
                before, after = self.record(self._few, self._forms), self.record(self._few, forms)
        except torch.OutOfMemoryError:
            raise
        except FORWARD_ERRORS as error:
            self.refuse(f"{error}, where layer {layer} returns {_words(found)}", limit=ONE_STATE)
        if not all(a.call.is_same(b.call) for a, b in zip(before, after, strict=True)):
            self.refuse(
                f"passes its layers other arguments where layer {layer} returns {_words(found)}",
                limit=ONE_STATE,
            )
        self._forms = forms

    @contextmanager
    def _standing_in(self, forms: Forms, notes: list[Note]) -> Iterator[None]:
        stand_ins = self.stand_ins(StandIn, forms, notes=notes)
        last = len(self.layers) - 1
        stand_ins[last] = Last(self.layers[last], last, notes=notes, form=forms[last])
        with self.replaced(stand_ins):
            yield

    def _run(self, batch: Batch, root: nn.Module | None = None, **more: Any) -> None:
        inputs = {name: batch[name] for name in FRONT_INPUTS if name in batch}
        with suppress(AllRecordedError):
            (root or self.model)(**self.given({"use_cache": False, **inputs, **more}))

    def stand_ins(self, kind: type[StandIn], forms: Forms, *, notes: list[Note]) -> list[StandIn]:
        """Return a stand-in for each layer."""
        handing = (lambda form, _: form) if self.carried is None else self.carried.handing
        return [
            kind(layer, i, notes=notes, form=handing(form, i))
            for i, (layer, form) in enumerate(zip(self.layers, forms, strict=True))
        ]

    @contextmanager
    def replaced(self, stand_ins: Sequence[nn.Module]) -> Iterator[None]:
        """Replace the layers by stand-ins, with collection of layer outputs disabled.

        Outputs are named meanwhile (`return_dict`), whatever the config says. Towers, which may be
        without values, have no parameters: some models move text to the device of their first one.
        """
        configs = (self.model.config, self.model.config.get_text_config())
        flags = [(c, name, True) for c in configs for name in COLLECTED if getattr(c, name, False)]
        flags += [(c, "return_dict", False) for c in configs if not c.return_dict]
        towers = [(m, m._parameters) for tower in self.towers for m in tower.modules()]
        setattr(self._owner, self._name, nn.ModuleList(stand_ins))
        try:
            for config, name, is_on in flags:
                setattr(config, name, not is_on)
            for module, _ in towers:
                module._parameters = {}
            with (
                uncompiled(),
                self.rotary.alone(),
                nullcontext() if self.carried is None else self.carried.whole_rows(),
            ):
                yield
        finally:
            for module, parameters in towers:
                module._parameters = parameters
            setattr(self._owner, self._name, self.layers)
            for config, name, is_on in flags:
                setattr(config, name, is_on)

    def _state_of(self, layer: int, hidden_BTD: torch.Tensor, call: Call) -> dict[str, Snapshot]:
        return {
            "its input": Snapshot(hidden_BTD),
            "its arguments": Snapshot(call.args, call.kwargs),
            "its buffers": Snapshot(
                *(b for m in self._buffered[layer] for b in m.buffers(recurse=False))
            ),
        }

    def refuse(self, what: str, *, limit: str) -> NoReturn:
        """Refuse the model, which does `what`.

        Raises:
            UnsupportedModelError: Always.
        """
        raise UnsupportedModelError(f"{self.name} {what}", limit=limit, hint=RESIDENT_HINT)


ONE_STATE = (
    "one hidden state of (rows, tokens, ...) may go from layer to layer, and only layers may use it"
)
FORWARD_ERRORS = (
    TouchedError,
    TypeError,
    ValueError,
    LookupError,
    AttributeError,
    RuntimeError,
    NotImplementedError,
)


def uncompiled() -> AbstractContextManager[None]:
    """Run compiled code eagerly, and compile nothing."""
    if "torch._dynamo" not in sys.modules:  # nothing is compiled, and importing it takes 1 s
        return nullcontext()
    return cast("AbstractContextManager[None]", torch.compiler.set_stance("force_eager"))


@contextmanager
def unchanged(modules: Sequence[nn.Module]) -> Iterator[None]:
    """Undo what modules cache about their tokens, such as rotary tables for a length."""
    before = [(module, dict(vars(module)), dict(module._buffers)) for module in modules]
    try:
        yield
    finally:
        for module, attributes, buffers in before:
            module.__dict__.update(attributes)
            module._buffers.update(buffers)


def cross_entropy_sum(logits_BTV: torch.Tensor, labels_BT: torch.Tensor) -> torch.Tensor:
    """Return the sum of the tokens' cross-entropies; -100 is no label."""
    return nn.functional.cross_entropy(
        logits_BTV.flatten(0, 1).float(), labels_BT.flatten(), reduction="sum"
    )


def kind_of(layer: nn.Module, call: LayerCall) -> object:
    """Return what two layers have in common that are of the same code and the same sizes."""
    parameters = tuple(
        (name, p.shape, p.dtype, p.requires_grad) for name, p in layer.named_parameters()
    )
    given = call.parts() if isinstance(call, Call) else (call.lens,)
    parts = (p.shape if isinstance(p, torch.Tensor) else type(p) for p in given)
    return repr(layer), parameters, tuple(parts)


def _words(form: Form) -> str:
    return "a hidden state" + (" alone" if form.extras is None else f" and {len(form.extras)} more")


# ---------------------------------------------------------------------------------------------
# What a model reads and returns: how many tokens it knows, or the outputs of a classifier.
#
# A sequence classifier of transformers runs its head on all tokens of a row, and returns the
# outputs of the last one that is no padding; a token classifier returns those of all. So rows of a
# single token give the outputs of any tokens, by the model's own code. Shapes: N tokens, each a row
# of its own, C outputs.


def vocabulary_of(model: "PreTrainedModel") -> Vocabulary:
    """Return the vocabulary; if no head is found, the config's number of tokens is used."""
    head = model.get_output_embeddings()
    num_predicted = _size(head, "out_features")
    embedding = model.get_input_embeddings()
    if head is None:
        num_predicted = getattr(model.config.get_text_config(), "vocab_size", None)
    num_read = _size(embedding, "num_embeddings")
    # Those that stand for something else: embeddings that train, or images.
    num_virtual = _size(embedding, "num_virtual_tokens") or 0
    return Vocabulary(
        num_read=None if num_read is None else num_read + num_virtual,
        num_predicted=num_predicted,
    )


def is_classifier(model: LayeredModel) -> bool:
    """Return whether a model classifies rows or tokens, by the name that transformers gives it."""
    return model.name.endswith(("ForSequenceClassification", _OF_TOKENS))


def classifier_outputs(
    model: LayeredModel, hidden_1ND: torch.Tensor, *, index: int | None
) -> torch.Tensor:
    """Run norm and head of a classifier on some tokens.

    Returns one output of each, (N,), or all of them, (N, C).

    Args:
        model: The classifier.
        hidden_1ND: Output of its last layer.
        index: Which output; None takes all.

    Raises:
        UnsupportedModelError: It is no classifier, or has fewer outputs.
    """
    outputs_NC = _of_last_token(model, hidden_1ND.transpose(0, 1))
    if not isinstance(outputs_NC, torch.Tensor) or outputs_NC.dim() != 2:
        model.refuse("returns no outputs for a whole row", limit=_CLASSIFIER)
    if index is None:
        return outputs_NC
    if not 0 <= index < outputs_NC.shape[1]:
        model.refuse(
            f"has {outputs_NC.shape[1]} outputs, from 0, and the loss reads {index}",
            limit="it reads one of the head's outputs",
        )
    return outputs_NC[:, index]


def require_outputs_of_last_token(model: LayeredModel, hidden_BTD: torch.Tensor) -> None:
    """Check that a classifier's outputs for a row follow from its last token alone.

    Args:
        model: The classifier.
        hidden_BTD: Output of its last layer for any rows.

    Raises:
        UnsupportedModelError: They are not.
    """
    padding = getattr(model.model.config.get_text_config(), "pad_token_id", None)
    ids_BT = torch.full(hidden_BTD.shape[:2], int(padding == 0), device=hidden_BTD.device)
    poisoned_BTD = hidden_BTD.clone()
    poisoned_BTD[:, :-1] = torch.nan
    own_BC = _of_last_token(model, poisoned_BTD, input_ids=ids_BT)
    last_BC, again_BC = (_of_last_token(model, hidden_BTD[:, -1:]) for _ in range(2))
    if not are_close(last_BC, own_BC, num_terms=hidden_BTD.shape[-1]):
        model.refuse("does not compute its outputs from a row's last token", limit=_CLASSIFIER)
    if not are_equal(last_BC, again_BC):
        model.refuse("gives other outputs for the same hidden state", limit=_CLASSIFIER)


def _of_last_token(model: LayeredModel, hidden_BTD: torch.Tensor, **inputs: torch.Tensor) -> Any:
    """Return a classifier's outputs of the last token of each row, (B, C)."""
    logits = getattr(model.output(hidden_BTD, **inputs), "logits", None)
    is_by_token = isinstance(logits, torch.Tensor) and logits.dim() == _BY_TOKEN_DIM
    if is_by_token and model.name.endswith(_OF_TOKENS):
        assert logits is not None
        return logits[:, -1]
    return logits


_BY_TOKEN_DIM, _OF_TOKENS = 3, "ForTokenClassification"
_CLASSIFIER = (
    "a loss of the head's outputs trains a sequence classifier, e.g."
    " `AutoModelForSequenceClassification.from_pretrained(..., num_labels=1)`"
)


def _size(module: Any, name: str) -> int | None:
    """Return a size of a module, which peft may have wrapped."""
    module = getattr(module, "original_module", module)
    unwrap = getattr(module, "get_base_layer", None)
    size = getattr(module if unwrap is None else unwrap(), name, None)
    return size if isinstance(size, int) else None
