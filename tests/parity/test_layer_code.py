"""What the code of layers, hooks, and the code around them keep and do: exact, or refused."""

import collections
import contextvars
import itertools
import random
import types
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint
from transformers import Qwen3Config, Qwen3ForCausalLM

import offload
from tests.parity.custom_model import CustomLayer, CustomModel
from tests.parity.custom_steps import (
    assert_equal,
    assert_refused,
    batches,
    built,
    gradients,
    of,
    plain,
)

pytestmark = pytest.mark.usefixtures("one_thread")


# --------------------------------------------------------------------------------- what layers keep


def _endless() -> Iterator[int]:
    number = 0
    while True:
        number += 1
        yield number


def _by_queue(queue: Any) -> int:
    queue.append(queue.popleft() + 1)
    return int(queue[0])


def _by_namespace(space: Any) -> int:
    space.number += 1
    return int(space.number)


def _by_array(array: Any) -> int:
    array[0] += 1
    return int(array[0])


def _by_variable(variable: Any) -> int:
    variable.set(variable.get() + 1)
    return int(variable.get())


COUNTERS: dict[str, tuple[Callable[[], Any], Callable[[Any], int]]] = {
    "namespace": (lambda: types.SimpleNamespace(number=0), _by_namespace),
    "numpy": (lambda: np.zeros(1), _by_array),
    "count": (itertools.count, next),
    "generator": (_endless, next),
    "deque": (lambda: collections.deque([0]), _by_queue),
    "context variable": (lambda: contextvars.ContextVar("number", default=0), _by_variable),
}


@pytest.mark.parametrize("name", COUNTERS)
def test_a_layer_that_counts_in_any_object_is_refused(name: str) -> None:
    make, count = COUNTERS[name]

    class Counts(CustomLayer):
        def __init__(self, index: int) -> None:
            super().__init__(index)
            self.counter = make()

        def forward(self, hidden: torch.Tensor, **arguments: Any) -> Any:
            return super().forward(hidden) * (1 + count(self.counter) % 2)

    assert_refused(built(of(Counts)), "has a layer 0 that changes `.*counter.*` when it is called")


class CountsInClass(CustomLayer):
    num_calls = 0

    def forward(self, hidden: torch.Tensor, **arguments: Any) -> Any:
        type(self).num_calls += 1
        return super().forward(hidden) * (1 + type(self).num_calls % 2)


NUM_CALLS = [0]


def bump() -> int:
    NUM_CALLS[0] += 1
    return NUM_CALLS[0]


class CountsInHelper(CustomLayer):
    def forward(self, hidden: torch.Tensor, **arguments: Any) -> Any:
        return super().forward(hidden) * (1 + self.number() % 2)

    def number(self) -> int:
        return bump()


@pytest.mark.parametrize(
    ("layer", "what"),
    [(CountsInClass, r"num_calls \(of CountsInClass\)"), (CountsInHelper, "NUM_CALLS .*")],
)
def test_a_layer_that_counts_in_its_class_or_in_a_helper_is_refused(
    layer: type[CustomLayer], what: str
) -> None:
    assert_refused(built(of(layer)), f"has a layer 0 that changes `{what}`")


@pytest.mark.parametrize("draw", [random.random, np.random.rand])
def test_a_layer_that_draws_elsewhere_than_in_torch_is_refused(draw: Callable[[], float]) -> None:
    class Skips(CustomLayer):
        def forward(self, hidden: torch.Tensor, **arguments: Any) -> Any:
            return hidden if draw() < 0.01 else super().forward(hidden)

    assert_refused(built(of(Skips)), "has a layer 0 that changes `.* random numbers`")


class OwnNoise(CustomLayer):
    """Draws from a generator of its own, before weights that begin at zero."""

    def __init__(self, index: int) -> None:
        super().__init__(index)
        self.generator = torch.Generator().manual_seed(0)
        self.gain = nn.Parameter(torch.zeros(()))

    def forward(self, hidden: torch.Tensor, **arguments: Any) -> Any:
        noise = torch.rand(hidden.shape, generator=self.generator)
        return super().forward(hidden) + self.gain * noise


def test_a_generator_of_a_layers_own_is_refused() -> None:
    assert_refused(built(of(OwnNoise)), "has a layer 0 that changes `generator` when it is called")


class WritesArgument(CustomLayer):
    def forward(self, hidden: torch.Tensor, scale: Any = None, **arguments: Any) -> Any:
        output = super().forward(hidden) * scale
        scale.data.mul_(0.5)
        return output


class PassesScale(CustomModel):
    layer = WritesArgument
    scale: torch.Tensor

    def call(self, layer: Any, hidden: torch.Tensor, index: int) -> torch.Tensor:
        self.scale = torch.ones(()) if index == 0 else self.scale
        return layer(hidden, scale=self.scale)


def test_an_argument_that_is_written_to_unseen_is_refused() -> None:
    assert_refused(built(PassesScale), "has a layer 0 that writes to what it is passed")


class ByMode(CustomLayer):
    def forward(self, hidden: torch.Tensor, **arguments: Any) -> Any:
        return super().forward(hidden) * (1.0 if torch.is_grad_enabled() else 0.9)


def test_a_layer_that_minds_whether_gradients_are_recorded_is_refused() -> None:
    assert_refused(built(of(ByMode)), "has a layer 0 that gives another output for the same input")


class Checkpoints(CustomLayer):
    """Computes again in its backward, with a dropout after another one."""

    is_reentrant = False

    def forward(self, hidden: torch.Tensor, **arguments: Any) -> Any:
        hidden = nn.functional.dropout(hidden, 0.1)

        def inner(x: torch.Tensor) -> torch.Tensor:
            return nn.functional.dropout(CustomLayer.forward(self, x), 0.5)

        return checkpoint(inner, hidden, use_reentrant=type(self).is_reentrant)


class CheckpointsReentrantly(Checkpoints):
    is_reentrant = True


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")
@pytest.mark.parametrize("layer", [Checkpoints, CheckpointsReentrantly])
def test_a_checkpoint_with_dropout_inside_a_layer_is_refused(layer: type[CustomLayer]) -> None:
    assert_refused(built(of(layer)), "has a layer 0 that draws random numbers")


# -------------------------------------------------------------------------------------------- hooks


class Hook:
    def __init__(self) -> None:
        self.number = 0

    def __call__(self, _module: nn.Module, _inputs: Any, output: torch.Tensor) -> torch.Tensor:
        self.number += 1
        return output * (1.0 if self.number % 2 else 0.9)

    def method(self, module: nn.Module, inputs: Any, output: torch.Tensor) -> torch.Tensor:
        return self(module, inputs, output)


def _with_state(state: dict[str, int], _m: nn.Module, _i: Any, output: torch.Tensor) -> Any:
    state["number"] += 1
    return output * (1.0 if state["number"] % 2 else 0.9)


def _in_place() -> Callable[..., None]:
    numbers = [0]

    def hook(_module: nn.Module, _inputs: Any, output: torch.Tensor) -> None:
        numbers[0] += 1
        output.mul_(1.0 if numbers[0] % 2 else 0.9)

    return hook


def _later() -> Callable[..., Any]:
    numbers = [0]

    def hook(_module: nn.Module, _inputs: Any, output: torch.Tensor) -> Any:
        numbers[0] += 1
        if numbers[0] > 1000:
            return output * 0.9
        return None

    return hook


HOOKS: dict[str, Callable[[], Any]] = {
    "object": Hook,
    "method": lambda: Hook().method,
    "partial": lambda: partial(_with_state, {"number": 0}),
    "in place": _in_place,
    "later": _later,
}


@pytest.mark.parametrize("name", HOOKS)
@pytest.mark.parametrize("is_global", [False, True], ids=["of a module", "of all"])
def test_a_hook_that_changes_values_by_what_it_keeps_is_refused(name: str, is_global: bool) -> None:
    model, hook = built(CustomModel), HOOKS[name]()
    mlp = model.get_base_model().model.layers[1].mlp
    handle = (
        nn.modules.module.register_module_forward_hook(
            lambda module, inputs, output: hook(module, inputs, output) if module is mlp else None
        )
        if is_global
        else mlp.register_forward_hook(hook)
    )
    try:
        assert_refused(model, "has a layer 1 that changes `.*a hook.*` when it is called")
    finally:
        handle.remove()


def test_hooks_that_record_in_tensors_and_lists_are_exact() -> None:
    model, seen = built(CustomModel), list[torch.Tensor]()
    total = torch.zeros(())
    mlp = model.get_base_model().model.layers[1].mlp
    mlp.register_forward_hook(lambda _m, _i, output: seen.append(output))

    def record(_module: nn.Module, _inputs: Any, output: torch.Tensor) -> None:
        total.add_(output.detach().sum())

    mlp.register_forward_hook(record)
    assert_equal(model)
    assert seen
    assert total != 0


# --------------------------------------------------------------------------- around the layers


class SetsAttribute(CustomModel):
    def call(self, layer: Any, hidden: torch.Tensor, index: int) -> torch.Tensor:
        layer.factor = 0.5
        return layer(hidden)


class CallsInAutocast(CustomModel):
    def call(self, layer: Any, hidden: torch.Tensor, index: int) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return layer(hidden)


class CallsWithoutGradient(CustomModel):
    def call(self, layer: Any, hidden: torch.Tensor, index: int) -> torch.Tensor:
        with torch.no_grad():
            return layer(hidden)


MEANS = types.SimpleNamespace(value=1.0)


class ReadsMean(CustomLayer):
    def forward(self, hidden: torch.Tensor, **arguments: Any) -> Any:
        return super().forward(hidden) * MEANS.value


class LeavesMean(CustomModel):
    layer = ReadsMean

    def call(self, layer: Any, hidden: torch.Tensor, index: int) -> torch.Tensor:
        if index == 0:
            MEANS.value = 1.0 + float(self.tokens[0, 0]) / 100
        return layer(hidden)


class MixesPositive(CustomModel):
    """Mixes tokens after the layers, where random hidden states give no number."""

    def call(self, layer: Any, hidden: torch.Tensor, index: int) -> torch.Tensor:
        return layer(hidden)

    def after(self, hidden: torch.Tensor, embedded: torch.Tensor) -> torch.Tensor:
        logarithm = hidden.log()
        return logarithm + logarithm.mean(1, keepdim=True)


class Positive(CustomLayer):
    def forward(self, hidden: torch.Tensor, **arguments: Any) -> Any:
        return super().forward(hidden).exp().clamp(max=5) + 0.1


MixesPositive.layer = Positive


@pytest.mark.parametrize(
    ("kind", "what"),
    [
        (SetsAttribute, "sets `factor` of a layer from outside"),
        (CallsInAutocast, "calls layer 0 in a mode of torch's of its own"),
        (CallsWithoutGradient, "calls layer 0 in a mode of torch's of its own"),
        (LeavesMean, "changes `value .*`, which its layers can read, before its layers"),
        (MixesPositive, "does not compute a token's logits from the last layer's output"),
    ],
)
def test_what_is_done_around_the_layers_is_refused(kind: type[CustomModel], what: str) -> None:
    assert_refused(built(kind), what)


def test_what_is_changed_after_the_first_step_is_inspected_again() -> None:
    model = built(CustomModel)
    _, expected = plain(model)
    engine = offload.attach(model, num_slots=2, device="cpu")
    engine.forward_backward(batches(), dropout_seed=0)
    found = gradients(model)
    assert all(torch.allclose(found[n], expected[n], rtol=1e-4, atol=1e-6) for n in expected)
    model.zero_grad(set_to_none=True)
    norm = model.get_base_model().model.norm
    norm.register_forward_hook(lambda _m, _i, output: output + output.mean(1, keepdim=True))
    with pytest.raises(offload.UnsupportedModelError, match="does not compute a token's logits"):
        engine.forward_backward(batches(), dropout_seed=0)
    engine.detach()
    assert all(parameter.grad is None for parameter in model.parameters())


def test_a_loss_that_is_replaced_after_the_first_step_is_inspected_too() -> None:
    model = built(CustomModel)
    engine = offload.attach(model, num_slots=2, device="cpu")
    engine.forward_backward(batches(), dropout_seed=0)
    model.zero_grad(set_to_none=True)

    def smoothed(logits: torch.Tensor, labels: torch.Tensor, **_more: Any) -> torch.Tensor:
        rows, targets = logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten()
        return nn.functional.cross_entropy(rows, targets, label_smoothing=0.3)

    model.get_base_model().loss_function = smoothed
    with pytest.raises(offload.UnsupportedModelError, match="gives a loss of"):
        engine.forward_backward(batches(), dropout_seed=0)
    engine.detach()
    assert all(parameter.grad is None for parameter in model.parameters())


class MasksAfter(CustomModel):
    """Reads the padding after the layers, where it is given any."""

    kept: Any = None

    def forward(self, input_ids: torch.Tensor, *rest: Any, **more: Any) -> Any:
        self.kept = more.get("attention_mask")
        return super().forward(input_ids, *rest, **more)

    def after(self, hidden: torch.Tensor, embedded: torch.Tensor) -> torch.Tensor:
        return hidden if self.kept is None else hidden * self.kept[..., None]


def test_a_micro_batch_with_other_inputs_is_inspected_too() -> None:
    model = built(MasksAfter)
    first, second = batches()
    second["attention_mask"] = torch.ones_like(second["input_ids"])
    second["attention_mask"][0, 5:] = 0
    engine = offload.attach(model, num_slots=2, device="cpu")
    with pytest.raises(offload.UnsupportedModelError, match="does not compute a token's logits"):
        engine.forward_backward([first, second], dropout_seed=0)
    engine.detach()


def test_a_row_is_computed_as_alone_after_a_longer_one_grew_the_table() -> None:
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=64,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=3,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=8,
        max_position_embeddings=16,
        rope_parameters={"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10_000.0},
    )
    model: Any = Qwen3ForCausalLM(config)
    model.model.layers.requires_grad_(False)
    long = torch.randint(3, 64, (1, 40), generator=torch.Generator().manual_seed(0))
    short = {"input_ids": long[:, :20], "labels": long[:, :20]}
    loss = model(**short, use_cache=False).loss
    loss.backward()
    expected = gradients(model)
    model.zero_grad(set_to_none=True)
    model(input_ids=long)
    engine = offload.attach(model, num_slots=2, device="cpu")
    found_loss = engine.forward_backward([short], dropout_seed=0).loss
    engine.detach()
    assert found_loss == pytest.approx(loss.item(), rel=1e-5)
    found = gradients(model)
    assert all(torch.allclose(found[n], expected[n], rtol=1e-3, atol=1e-6) for n in expected)


def test_a_model_that_was_compiled_is_exact() -> None:
    model = built(CustomModel)
    loss, expected = plain(model)
    model.get_base_model().compile(backend="eager")
    engine = offload.attach(model, num_slots=2, device="cpu")
    assert engine.forward_backward(batches(), dropout_seed=0).loss == pytest.approx(loss, rel=1e-5)
    engine.detach()
    found = gradients(model)
    assert all(torch.allclose(found[n], expected[n], rtol=1e-4, atol=1e-6) for n in expected)
