"""One layer and micro-batch: computed without its graph, or with it, and the graph's backward."""

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass

import torch

from offload.engine.internals import refer
from offload.engine.model.layers import FORWARD_ERRORS, LayerCall, LayeredModel
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
            refer(x, x.new_empty(()).expand(x.shape))

    def with_input(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the layer's output with its graph, and the leaf that is its input."""
        return self.said[0], self.input_BTD

    def backward(
        self, gradient_BTD: torch.Tensor | None, router_gradients: Sequence[torch.Tensor | None]
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
