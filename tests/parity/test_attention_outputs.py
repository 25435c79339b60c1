"""Attention that is not computed again: kept on the device, or sent to the host and back."""

import copy
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from offload.engine.bound import EngineOptions
from offload.engine.engine import Engine
from offload.errors import TransferError
from offload.plan.schedule.op import Kind, Lane
from tests.doubles import HookedDevice
from tests.parity.steps import (
    NUM_LAYERS,
    OPTIONS,
    assert_equal,
    gradients,
    micro_batches,
    steps,
    tiny,
)
from tests.tiers import mostly_slow

KEPT = replace(OPTIONS, num_kept_outputs=NUM_LAYERS)
SENT = replace(OPTIONS, num_sent_outputs=NUM_LAYERS)
BOTH = replace(OPTIONS, num_kept_outputs=1, num_sent_outputs=2)


class Counted(TorchDispatchMode):
    """Counts fused attention."""

    num = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.num += func is torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    ("name", "options"),
    mostly_slow(
        {
            f"{name}-{way}": (name, options)
            for name in ("qwen3", "qwen3_moe", "gemma3_text")
            for way, options in (("kept", KEPT), ("sent", SENT), ("both", BOTH))
        },
        "qwen3-sent",
    ),
)
def test_move_no_bit_differs_where_attention_is_not_computed_again(
    name: str, options: EngineOptions
) -> None:
    model = tiny(name, dropout=0.3)
    expected, _ = steps(model, OPTIONS)
    found, kinds = steps(model, options)
    assert_equal(found, expected)
    num_sent = options.num_sent_outputs * len(micro_batches())
    assert kinds.count(Kind.SEND) == kinds.count(Kind.RETURN) == num_sent


@pytest.mark.thorough
@pytest.mark.parametrize(
    "others",
    mostly_slow(
        {
            "codec": {"codec": "int8"},
            "stash": {"stash": "host"},
            "kept graphs": {"num_kept_graphs": 2},
            "stash and a graph": {"stash": "host", "num_kept_graphs": 1, "num_slots": 3},
        },
        "stash and a graph",
    ),
)
def test_move_no_bit_differs_with_codecs_stash_and_kept_graphs(others: dict[str, Any]) -> None:
    model = tiny("qwen3")
    expected, _ = steps(model, replace(OPTIONS, **others))
    assert_equal(steps(model, replace(BOTH, **others))[0], expected)


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("options", "num"),
    mostly_slow(
        {
            "neither": (OPTIONS, 2 * NUM_LAYERS),
            "kept": (KEPT, NUM_LAYERS),
            "sent": (SENT, NUM_LAYERS),
            "both": (BOTH, 2 * NUM_LAYERS - 3),
        },
        "both",
    ),
)
def test_attention_is_computed_once_per_layer_that_keeps_or_sends_it(
    options: EngineOptions, num: int
) -> None:
    engine = Engine(tiny("qwen3"), device=torch.device("cpu"), options=options)
    engine.forward_backward(micro_batches())  # the first step also inspects
    with Counted() as counted:
        engine.forward_backward(micro_batches())
    engine.detach()
    assert counted.num == num * len(micro_batches())


@pytest.mark.thorough
def test_attention_without_a_fused_kernel_is_computed_again() -> None:
    model = tiny("gpt_oss")  # its attention has sinks
    expected, _ = steps(model, OPTIONS)
    found, kinds = steps(model, SENT)
    assert_equal(found, expected)
    assert Kind.SEND not in kinds


@pytest.mark.thorough
def test_a_layer_that_calls_attention_otherwise_in_its_recompute_is_computed_again() -> None:
    """Above six tokens, so that the inspection does not see it."""

    def adding(call: Callable[..., Any]) -> Callable[..., Any]:
        def forward(hidden_BTD: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            if torch.is_grad_enabled() and hidden_BTD.shape[1] > 6:
                x = hidden_BTD[:, None]
                torch.nn.functional.scaled_dot_product_attention(x, x, x)
            return call(hidden_BTD, *args, **kwargs)

        return forward

    model: Any = tiny("qwen3")
    expected, _ = steps(model, OPTIONS)
    for options in (KEPT, SENT):
        changed = copy.deepcopy(model)
        for layer in changed.get_base_model().model.layers:
            layer.forward = adding(layer.forward)
        engine = Engine(changed, device=torch.device("cpu"), options=options)
        results = [engine.forward_backward(micro_batches(), dropout_seed=s) for s in range(2)]
        assert_equal((results[-1].loss, gradients(changed)), expected)
        engine.detach()


@pytest.mark.thorough
def test_an_output_that_is_lost_on_the_host_gives_other_gradients() -> None:
    """So these tests would see a copy that is lost."""
    model = tiny("qwen3")
    expected, _ = steps(model, OPTIONS, num=1)
    changed = copy.deepcopy(model)
    engine = Engine(changed, device=torch.device("cpu"), options=SENT)
    sent = engine._bound.places.sent
    place = sent.place

    def lost(layer: int, micro_batch: int) -> torch.Tensor:
        return place(layer, micro_batch).zero_()

    sent.place = lost  # type: ignore[method-assign]
    engine.forward_backward(micro_batches(), dropout_seed=0)
    found = gradients(changed)
    engine.detach()
    assert any(not torch.equal(found[name], expected[1][name]) for name in found)


@pytest.mark.thorough
@pytest.mark.parametrize(
    "options",
    mostly_slow(
        {"outputs": SENT, "graphs": replace(OPTIONS, num_sent_graphs=NUM_LAYERS)}, "graphs"
    ),
)
def test_after_a_send_that_fails_the_next_step_has_the_same_gradients(
    options: EngineOptions,
) -> None:
    model = tiny("qwen3")
    expected, _ = steps(model, OPTIONS, num=1)
    is_failing = True

    def failing(number: int, lane: Lane, body: Callable[[], None]) -> None:
        if is_failing and lane is Lane.D2H:
            raise RuntimeError("unplugged")
        body()

    changed = copy.deepcopy(model)
    engine = Engine(changed, device=HookedDevice(failing), options=options)
    with pytest.raises((TransferError, RuntimeError), match="unplugged"):
        engine.forward_backward(micro_batches(), dropout_seed=0)
    is_failing = False
    changed.zero_grad(set_to_none=True)
    result = engine.forward_backward(micro_batches(), dropout_seed=0)
    assert_equal((result.loss, gradients(changed)), expected)
    engine.detach()
