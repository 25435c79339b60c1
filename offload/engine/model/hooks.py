"""Separates hooks that change what a layer computes from those that only record.

A hook that returns nothing may count and keep tensors freely. One that returns a value on any path
through its code, or writes to its arguments, is part of the layer: what it returns may depend on
its state.
"""

import dis
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from types import TracebackType
from typing import Any, Generic, Protocol, TypeVar, cast

import torch
from torch import nn
from torch.nn.modules import module as torch_module
from torch.utils._pytree import tree_leaves

from offload.engine.host.pagelock import trim_heap
from offload.engine.host.slab import Field, Record, lay_out
from offload.engine.model.encoding import Encoding
from offload.engine.model.layers import FORWARD_ERRORS, LayerCall, LayeredModel, homes_of
from offload.engine.model.recorders import look_of
from offload.engine.model.watch import Watch
from offload.engine.recompute import (
    NOTHING,
    Recorded,
    Recorder,
    SavedTensors,
    TiledMlp,
    Unread,
    given,
    left_out,
    tiled,
)
from offload.errors import OffloadError

_KINDS = ("_forward_pre_hooks", "_forward_hooks")


class JudgedHooks:
    """Classifies the hooks of layers as they are called.

    Attributes:
        acting: Hooks that changed something.
    """

    def __init__(self, watch: Watch) -> None:
        """Classify nothing yet.

        Args:
            watch: It must ignore what recording hooks read and write.
        """
        self._watch = watch
        self.acting: list[Any] = []

    @contextmanager
    def judged(self, layer: nn.Module) -> Iterator[None]:
        """Classify the hooks of a layer's modules, and global module hooks, while it is called."""
        tables = [vars(module)[kind] for module in layer.modules() for kind in _KINDS]
        tables += [getattr(torch_module, f"_global{kind}") for kind in _KINDS]
        before = [(table, key, hook) for table in tables for key, hook in table.items()]
        for table, key, hook in before:
            table[key] = partial(self._call, hook)
        try:
            yield
        finally:
            for table, key, hook in before:
                if key in table:  # it may have removed itself
                    table[key] = hook

    def _call(self, hook: Any, *args: Any, **kwargs: Any) -> Any:
        given = [x for x in tree_leaves((args[1:], kwargs)) if isinstance(x, torch.Tensor)]
        versions = [look_of(tensor) for tensor in given]
        mark = self._watch.mark()
        result = hook(*args, **kwargs)
        has_written = versions != [look_of(tensor) for tensor in given]
        if not (has_written or result is not None or _may_return_more(hook)):
            self._watch.return_to(mark)
        elif not any(hook is other for other in self.acting):
            self.acting.append(hook)
        return result


def _may_return_more(hook: Any) -> bool:
    """Return whether a hook that has returned nothing has another return path."""
    while isinstance(hook, partial):
        hook = hook.func
    function = getattr(hook, "__func__", hook)
    function = function if hasattr(function, "__code__") else type(hook).__call__
    code = getattr(function, "__code__", None)
    steps = list(dis.get_instructions(code)) if code else []
    ends = [i for i, step in enumerate(steps) if step.opname.startswith("RETURN_")]
    has_one = len(ends) == 1 and not steps[ends[0]].is_jump_target
    return not has_one and not all(_returns_none(steps[i - 1], steps[i]) for i in ends)


def _returns_none(before: dis.Instruction, step: dis.Instruction) -> bool:
    if step.opname == "RETURN_CONST":
        return step.argval is None
    is_none = before.opname == "LOAD_CONST" and before.argval is None
    return step.opname == "RETURN_VALUE" and is_none and not step.is_jump_target


def all_hooks(model: nn.Module, outside: Iterable[nn.Module]) -> list[Any]:
    """Return the functions that a model runs: hooks, `forward`s, and attributes such as its loss.

    Args:
        model: The model.
        outside: Its modules outside the layers, whose attributes are searched.
    """
    found = [hook for kind in _KINDS for hook in getattr(torch_module, f"_global{kind}").values()]
    for module in model.modules():
        own = vars(module)
        found.append(own.get("forward", type(module).forward))
        for kind in _KINDS:
            found.extend(own[kind].values())
    for module in outside:
        found.extend(value for value in vars(module).values() if callable(value))
    return found


# ---------------------------------------------------------------------------------------------
# Hooks on trained parameters: finds those that would receive partial gradients, before a step.
#
# A parameter inside one layer has one backward per micro-batch, as in a plain model. Parameters
# outside of the layers have several: the head is computed in chunks, and a tied weight gets one
# part from the tail and one from the front. Also, all micro-batches pass through one layer before
# the next layer's gradients exist, so the gradients of the whole model are complete only after the
# step.

_HINT = "apply it to `.grad` after `forward_backward` returns"


class GradientHooks:
    """The trained parameters, and which of their hooks a step runs like a plain model."""

    def __init__(
        self, model: nn.Module, layered: LayeredModel, masters: Mapping[str, nn.Parameter]
    ) -> None:
        """Record them.

        Args:
            model: The model as attached.
            layered: The model inside it.
            masters: Parameters that the optimizer updates in place of the layers', by name.
        """
        inside = homes_of(layered.layers, layered.around)
        self._masters = masters
        self._trained = [
            (name, parameter, id(parameter) in inside)
            for name, parameter in model.named_parameters()
            if parameter.requires_grad
        ]

    def require_exact(self) -> None:
        """Check that no hook would receive partial gradients, or would never run.

        A post-accumulate hook that only accumulates its gradients may declare this by a true
        attribute `takes_partial_gradients`.

        Raises:
            OffloadError: One would.
        """
        with torch._C.DisableTorchFunctionSubclass():  # parameters are sealed between passes
            problem = next(self._problems(), None)
        if problem is not None:
            what, limit = problem
            raise OffloadError(what, limit=limit, hint=_HINT)

    def _problems(self) -> Iterator[tuple[str, str]]:
        for name, parameter, is_inside in self._trained:
            after = parameter._post_accumulate_grad_hooks or {}
            if not all(getattr(hook, "takes_partial_gradients", False) for hook in after.values()):
                yield (
                    f"{name} has a hook of `register_post_accumulate_grad_hook`",
                    "a step adds to `.grad` in parts, layer by layer, and the hook runs at each",
                )
            if parameter._backward_hooks and not is_inside:
                yield (
                    f"{name} has a hook of `register_hook` and is not in exactly one layer",
                    "its gradient arrives in parts, and the hook runs at each",
                )
        for name, master in self._masters.items():
            if master._backward_hooks or master._post_accumulate_grad_hooks:
                yield (
                    f"{name}, as `engine.trained_parameters` lists it, has a hook",
                    "its gradient is copied from the device, where no hook of it runs",
                )


# ---------------------------------------------------------------------------------------------
# Intercepts the weights of decoder layers while a model is loaded, tensor by tensor.
#
# Problem. A loader gives every parameter memory of its own, and the engine would then copy the
# layers into its slab: the model is in memory twice. A loader of our own would have to know each
# architecture's tensor names, and which tensors are fused and tied.
#
# Idea. Leave loading to the model's library and use torch's own hook on the registration of
# parameters. The model is built without values first, so when the first parameter with values
# arrives, the module tree is complete: the layers are found and laid out, and a backing is made.
# From then on each parameter of a layer is stored in the backing as it arrives and aliases it, and
# its original memory is free at once. A parameter that does not fit the layout (another dtype than
# the module was built with) keeps its memory, and is resident later.
#
# Cost. Mapped shards are read as pages are touched. In addition to the backing, memory is needed
# only to convert one tensor, provided the library converts one tensor after the other.

_Places = dict[tuple[nn.Module, str], tuple[int, int, Field]]
"""Layer, field index and field of each module and attribute."""

OnPut = Callable[[int, int], None]
"""Called with the number of weight bytes put so far and the total, both before encoding."""


class LoadTarget(Protocol):
    """Where weights are stored while they are loaded."""

    def put(self, layer: int, index: int, values: torch.Tensor) -> torch.Tensor:
        """Store the values of a layer's field; return the tensor that its parameter aliases."""

    def close(self) -> None:
        """Give everything back."""


H = TypeVar("H", bound=LoadTarget)


class CaptureWeights(Generic[H]):
    """Puts the layers' weights of the one model that is loaded in this context into a backing.

    Attributes:
        backing: None until the first parameter of a layer arrives, and if none does.
    """

    def __init__(
        self,
        make_backing: Callable[[Sequence[Record], Sequence[Sequence[str]]], H],
        *,
        codec: str = "native",
        is_loaded: Callable[[nn.Parameter], bool] = lambda _: True,
        on_put: OnPut = lambda _done, _all: None,
    ) -> None:
        """Start without a backing.

        Args:
            make_backing: Makes the backing, given each layer's record and the names of its fields.
            codec: How the layers' matrices are encoded.
            is_loaded: Whether a parameter has its final values when it is registered. If not,
                because it will be initialised, it keeps its memory.
            on_put: Called after each stored parameter, with the progress of loading.
        """
        self.backing: H | None = None
        self._is_loaded = is_loaded
        self._make_backing = make_backing
        self._codec: str = codec
        self._on_put = on_put
        self._done_bytes = self._all_bytes = 0
        self._newest = -1
        self._parents: dict[nn.Module, nn.Module] = {}
        self._places: _Places | None = None

    def __enter__(self) -> "CaptureWeights[H]":
        self._hooks = (
            torch_module.register_module_module_registration_hook(self._note),
            torch_module.register_module_parameter_registration_hook(self._catch),
        )
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for hook in self._hooks:
            hook.remove()
        self._parents.clear()
        self._places = None
        trim_heap()
        if kind is not None and self.backing is not None:
            self.backing.close()

    def _note(self, parent: nn.Module, _name: str, child: nn.Module | None) -> None:
        if child is not None:
            self._parents[child] = parent

    def _catch(self, module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        if parameter is None or parameter.is_meta or not self._is_loaded(parameter):
            return
        if self._places is None:
            self._places = self._plan(module)
        place = self._places.get((module, name))
        if place is None:
            return
        layer, index, field = place
        if (field.shape, field.dtype) != (parameter.shape, parameter.dtype):
            return
        del self._places[module, name]
        assert self.backing is not None
        if layer != self._newest:
            self._newest = layer
            trim_heap()
        num_bytes = parameter.nbytes
        parameter.data = self.backing.put(layer, index, parameter.data)
        self._done_bytes += num_bytes
        self._on_put(self._done_bytes, self._all_bytes)

    def _plan(self, module: nn.Module) -> _Places:
        """Lay out the layers of the model that a module belongs to, and make the backing."""
        while module in self._parents:
            module = self._parents[module]
        layered = LayeredModel(module)
        encoding = Encoding(layered, self._codec)
        tied = cast("Any", module).all_tied_weights_keys
        shared = {*tied, *tied.values()}
        names = {
            parameter: name for name, parameter in module.named_parameters() if name not in shared
        }
        places: _Places = {}
        records, fields = [], []
        for number, layer in enumerate(layered.layers):
            own = {
                parameter: (owner, attribute)
                for owner in layer.modules()
                for attribute, parameter in owner.named_parameters(recurse=False)
                if parameter in names
            }
            record = lay_out(list(own), encoding.codecs(list(own)))
            records.append(record)
            fields.append([names[parameter] for parameter in own])
            places |= {
                own[field.parameter]: (number, index, field)
                for index, field in enumerate(record.fields)
            }
        self._all_bytes = sum(field.parameter.nbytes for _, _, field in places.values())
        self.backing = self._make_backing(records, fields)
        return places


@dataclass(frozen=True, kw_only=True, slots=True)
class Graph:
    """The autograd graph of one layer and micro-batch.

    It aliases the layer's weights in their slot: they must be there again for `backward`.
    """

    input_BTD: torch.Tensor  # the layer's input, a leaf
    said: tuple[torch.Tensor, ...]  # the layer's output, and its router logits
    # Whether products were left out as they were found, and attention was called as it was
    # recorded; if not, the graph is not to be used.
    is_as_found: bool = True

    @property
    def output(self) -> torch.Tensor:
        """The layer's output (B, T, D), without the graph."""
        return self.said[0].detach()

    @property
    def router_logits(self) -> list[torch.Tensor]:
        """The layer's router logits, without the graph."""
        return [logits.detach() for logits in self.said[1:]]

    def let_go(self) -> None:
        """Let go of the memory of input and output: a backward needs their shapes alone."""
        for x in (self.input_BTD, self.said[0]):
            x.data = x.new_empty(()).expand(x.shape)

    def with_input(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the layer's output with its graph, and the leaf that is its input."""
        return self.said[0], self.input_BTD

    def backward(
        self, gradient_BTD: torch.Tensor | None, router_gradients: Sequence[torch.Tensor]
    ) -> torch.Tensor | None:
        """Take gradients of the loss through the layer, once.

        Args:
            gradient_BTD: By the layer's output; None where nothing above depends on it.
            router_gradients: By the layer's router logits.

        Returns:
            The gradient by the layer's input, None where nothing depends on it; those of what
            trains are in `.grad`.
        """
        gradients = zip(self.said, [gradient_BTD, *router_gradients], strict=True)
        known = [(x, g) for x, g in gradients if x.requires_grad and g is not None]
        if known:
            torch.autograd.backward([x for x, _ in known], [g for _, g in known])
        return self.input_BTD.grad


@dataclass(frozen=True, kw_only=True, slots=True)
class Visited:
    """What a visit upwards gave."""

    output_BTD: torch.Tensor  # the layer's output, without a graph
    router_logits: list[torch.Tensor]  # its router logits, if they have a loss
    graph: Graph | None = None  # if it is kept or sent
    saved: SavedTensors | None = None  # what autograd saved, if it is sent
    recorded: Recorded = NOTHING  # its attention, if that is kept or sent


def visit_without_graph(
    model: LayeredModel,
    layer: int,
    *,
    input_BTD: torch.Tensor,
    call: LayerCall,
    mlps: Sequence[TiledMlp],
    has_output: bool,
) -> Visited:
    """Compute a layer without its graph, and record its attention if `has_output`."""
    recorder = Recorder() if has_output else None
    with (
        torch.no_grad(),
        model.listening(layer) as router_logits,
        tiled(mlps),
        recorder or nullcontext(),
    ):
        output_BTD = model.layer_forward(layer, input_BTD, call)
    recorded = recorder.recorded() if recorder else NOTHING
    return Visited(output_BTD=output_BTD, router_logits=router_logits, recorded=recorded)


def visit_to_keep(
    model: LayeredModel,
    layer: int,
    *,
    input_BTD: torch.Tensor,
    call: LayerCall,
    mlps: Sequence[TiledMlp],
    is_sent: bool,
) -> Visited:
    """Compute a layer with its graph; hold what autograd saves of it if that is sent.

    Weights and buffers stay where they are, and so do other arguments.
    """
    saved = None
    if is_sent:
        module = model.layers[layer]
        staying = (*module.parameters(), *module.buffers(), *call.tensors())
        saved = SavedTensors(
            staying={x.untyped_storage().data_ptr() for x in staying}, torch_device=input_BTD.device
        )
    with nullcontext() if saved is None else saved.hooked():
        graph = visit_with_graph(
            model, layer, input_BTD=input_BTD, call=call, mlps=mlps, is_let_go=is_sent
        )
    return Visited(
        output_BTD=graph.output, router_logits=graph.router_logits, graph=graph, saved=saved
    )


def visit_with_graph(
    model: LayeredModel,
    layer: int,
    *,
    input_BTD: torch.Tensor,
    call: LayerCall,
    unread: Sequence[Unread] = (),
    recorded: Recorded = NOTHING,
    mlps: Sequence[TiledMlp] = (),
    is_let_go: bool = False,
) -> Graph:
    """Compute a layer and keep its graph.

    Args:
        model: The model; the layer's weights must be in place.
        layer: Which.
        input_BTD: The layer's input.
        call: Its other arguments.
        unread: Products whose values are left out, and with them that of the output.
        recorded: Attention of the forward visit, which is not computed again.
        mlps: Parts that are computed some tokens at a time.
        is_let_go: Whether the graph will let go of its input and output. Then it has tensors of its
            own over their memory, for a custom function may hold those that the layer sees.
    """
    leaf_BTD = input_BTD.detach().requires_grad_()
    with (
        torch.enable_grad(),
        model.listening(layer) as router_logits,
        tiled(mlps),
        left_out(unread) as left,
        given(recorded) as is_as_recorded,
    ):
        seen_BTD = leaf_BTD.view_as(leaf_BTD) if is_let_go else leaf_BTD
        output_BTD = model.layer_forward(layer, seen_BTD, call)
        said_BTD = output_BTD.view_as(output_BTD) if is_let_go else output_BTD
    return Graph(
        input_BTD=leaf_BTD,
        said=(said_BTD, *router_logits),
        is_as_found=left.is_as_found(output_BTD) and is_as_recorded(),
    )


def attempt(compute: Callable[[], Graph]) -> Graph | None:
    """Return the graph of a visit, or None if it read a product that it was to leave out."""
    try:
        graph = compute()
    except torch.OutOfMemoryError:
        raise
    except FORWARD_ERRORS:  # of a read; others come again where all is computed
        return None
    return graph if graph.is_as_found else None
