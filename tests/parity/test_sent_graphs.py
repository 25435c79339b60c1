"""Whole graphs that wait in host memory for the backward, in place of a recompute."""

import copy
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from offload.engine.batch import shape_of
from offload.engine.bound import EngineOptions
from offload.engine.engine import Engine
from offload.plan.schedule.op import Kind
from tests.parity.steps import (
    NUM_LAYERS,
    OPTIONS,
    assert_equal,
    gradients,
    micro_batches,
    steps,
    tiny,
)
from tests.tiers import mostly_slow, tiered

ALL = replace(OPTIONS, num_sent_graphs=NUM_LAYERS)
SOME = replace(OPTIONS, num_sent_graphs=2)
MIXED = replace(
    OPTIONS, num_kept_graphs=1, num_sent_graphs=1, num_kept_outputs=1, num_sent_outputs=1
)


@pytest.mark.parametrize(
    ("name", "options"),
    tiered(
        {
            f"{name}-{way}": (name, options)
            for name in ("llama", "qwen3", "qwen3_moe", "gemma3_text", "gpt_oss")
            for way, options in (("all", ALL), ("some", SOME), ("mixed", MIXED))
        },
        default=["qwen3_moe-mixed"],
        slow=["llama-all", "qwen3-some", "qwen3_moe-all", "gemma3_text-mixed", "gpt_oss-mixed"],
    ),
)
def test_move_no_bit_differs_where_graphs_are_sent(name: str, options: EngineOptions) -> None:
    model = tiny(name, dropout=0.3)
    expected, _ = steps(model, OPTIONS)
    found, kinds = steps(model, options)
    assert_equal(found, expected)
    has_outputs = name != "gpt_oss"  # its attention has sinks
    num_sent = options.num_sent_graphs + options.num_sent_outputs * has_outputs
    num_sent *= len(micro_batches())
    assert kinds.count(Kind.SEND) == kinds.count(Kind.RETURN) == num_sent


@pytest.mark.thorough
@pytest.mark.parametrize(
    "others",
    mostly_slow(
        {
            "int8": {"codec": "int8"},
            "nf4": {"codec": "nf4"},
            "stash": {"stash": "host"},
            "stash, graphs and outputs": {
                "stash": "host",
                "num_slots": 3,
                "num_kept_graphs": 1,
                "num_sent_graphs": 1,
                "num_kept_outputs": 1,
                "num_sent_outputs": 1,
            },
            "tiles": {"mlp_chunk_tokens": 5},
            "fused": {"layer_kernels": "fused"},
            "all of it": {
                "codec": "int8",
                "stash": "host",
                "num_kept_graphs": 1,
                "num_sent_outputs": 1,
                "mlp_chunk_tokens": 5,
                "layer_kernels": "fused",
            },
        },
        "all of it",
    ),
)
def test_move_no_bit_differs_with_other_settings(others: dict[str, Any]) -> None:
    model = tiny("qwen3", dropout=0.3 if "mlp_chunk_tokens" not in others else 0.0)
    plain = {name: value for name, value in others.items() if not name.startswith("num_")}
    expected, _ = steps(model, replace(OPTIONS, **plain))
    options = replace(SOME, **others)
    found, kinds = steps(model, options)
    assert_equal(found, expected)
    assert kinds.count(Kind.SEND) >= options.num_sent_graphs * len(micro_batches())


@pytest.mark.thorough
def test_a_layer_whose_graph_is_sent_is_not_computed_again() -> None:
    model: Any = tiny("qwen3")
    visited: list[int] = []
    for number, layer in enumerate(model.get_base_model().model.layers):
        layer.register_forward_hook(lambda *_, number=number: visited.append(number))
    engine = Engine(model, device=torch.device("cpu"), options=MIXED)
    engine.forward_backward(micro_batches())
    visited.clear()
    engine.forward_backward(micro_batches())  # nothing is inspected or measured any more
    graphs = MIXED.residency.sent_graphs(NUM_LAYERS) | {NUM_LAYERS - 1}
    engine.detach()
    counts = [visited.count(number) for number in range(NUM_LAYERS)]
    assert counts == [(1 if number in graphs else 2) * 3 for number in range(NUM_LAYERS)]


@pytest.mark.thorough
def test_a_graph_that_is_lost_on_the_host_gives_other_gradients() -> None:
    """So these tests would see a copy that is lost."""
    model = tiny("qwen3")
    expected, _ = steps(model, OPTIONS, num=1)
    changed = copy.deepcopy(model)
    engine = Engine(changed, device=torch.device("cpu"), options=ALL)
    sent = engine._bound.places.sent
    place = sent.place

    def lost(layer: int, micro_batch: int) -> torch.Tensor:
        return place(layer, micro_batch).zero_()

    sent.place = lost  # type: ignore[method-assign]
    engine.forward_backward(micro_batches(), dropout_seed=0)
    found = gradients(changed)
    engine.detach()
    assert any(not torch.equal(found[name], expected[1][name]) for name in found)


class _Holding(torch.autograd.Function):
    """Doubles, and holds its input where hooks do not see it."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.held = x
        return x * x

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> torch.Tensor:
        return 2 * ctx.held * gradients[0]


class _HoldingOutput(torch.autograd.Function):
    """The same for its output."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.held = x.tanh()
        return ctx.held

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> torch.Tensor:
        return (1 - ctx.held**2) * gradients[0]


def changed(change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """Return a tiny model whose layers change their output."""
    model: Any = tiny("qwen3")
    for layer in model.get_base_model().model.layers:
        layer.mlp.register_forward_hook(lambda _module, _inputs, y: change(y))
    return model


@pytest.mark.thorough
def test_move_what_a_function_holds_without_saving_it_stays_on_the_device() -> None:
    model = changed(_Holding.apply)
    assert_equal(steps(model, ALL)[0], steps(model, OPTIONS)[0])


@pytest.mark.thorough
def test_move_a_function_may_hold_the_input_or_the_output_of_its_layer() -> None:
    """Graphs let go of both: in what the function holds, the values must stay."""
    model: Any = tiny("qwen3")
    for layer in model.get_base_model().model.layers:
        layer.input_layernorm.register_forward_pre_hook(
            lambda _m, args: 0.5 * _Holding.apply(*args)
        )
        layer.register_forward_hook(lambda _m, _args, y: _HoldingOutput.apply(y))
    assert_equal(steps(model, ALL)[0], steps(model, OPTIONS)[0])


@pytest.mark.thorough
def test_move_a_layer_may_differentiate_while_it_computes() -> None:
    def slope(y: torch.Tensor) -> torch.Tensor:
        with torch.enable_grad():
            x = y.detach().requires_grad_()
            (of_x,) = torch.autograd.grad(x.tanh().square().sum(), x)
        return y * of_x

    model = changed(slope)
    assert_equal(steps(model, ALL)[0], steps(model, OPTIONS)[0])


@pytest.mark.thorough
def test_a_layer_that_writes_to_what_was_saved_raises_as_without_hooks() -> None:
    def writing(y: torch.Tensor) -> torch.Tensor:
        z = y.exp()
        if torch.is_grad_enabled() and y.shape[1] > 6:  # after the inspection
            z.add_(1)
        return z

    for options in (OPTIONS, ALL):
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            steps(changed(writing), options)


def more_of(batches: Sequence[Any], sizes: Sequence[int]) -> list[Any]:
    return [{name: x[:, :size] for name, x in batches[-1].items()} for size in sizes]


@pytest.mark.thorough
def test_smaller_micro_batches_need_no_measuring_and_larger_ones_do() -> None:
    model = tiny("qwen3")
    engine = Engine(model, device=torch.device("cpu"), options=ALL)
    measured: list[Any] = []
    measure = engine._bound.executor.measure

    def noting(schedule: Any, inputs: Any, layers: Any) -> None:
        measured.append(inputs["input_ids"].shape[1])
        measure(schedule, inputs, layers)

    engine._bound.executor.measure = noting  # type: ignore[method-assign]
    engine.forward_backward(more_of(micro_batches(), [9, 14]))
    engine.forward_backward(more_of(micro_batches(), [9, 5]))
    engine.forward_backward(more_of(micro_batches(), [16]))
    engine.detach()
    assert measured == [14, 16]


@pytest.mark.thorough
def test_a_graph_larger_than_counted_on_is_computed_again_with_a_warning() -> None:
    model = tiny("qwen3")
    expected, _ = steps(model, OPTIONS)
    streamed = copy.deepcopy(model)
    engine = Engine(streamed, device=torch.device("cpu"), options=replace(ALL, stash="host"))
    sizes = engine._bound.executor.found().graph_sizes

    def too_small(_schedule: Any, inputs: Any, layers: Any) -> None:
        for layer in layers:
            num_rows, num_tokens = inputs["input_ids"].shape
            sizes.add(layer, shape_of(num_rows, num_tokens, ()), 512)

    engine._bound.executor.measure = too_small  # type: ignore[method-assign, assignment]
    with pytest.warns(UserWarning, match=r"graph of layer \d takes \d+ bytes and not 512"):
        engine.forward_backward(micro_batches(), dropout_seed=0)
    result = engine.forward_backward(micro_batches(), dropout_seed=1)  # the sizes were raised
    assert_equal((result.loss, gradients(streamed)), expected)
    engine.detach()
