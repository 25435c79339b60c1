"""Gradients that are added up while a step runs: each once, when it is final, and never before."""

import copy
import threading
import time
from collections.abc import Callable

import torch
from peft import PeftModel

from offload.engine.engine import Engine
from offload.engine.passes.part import RunStep
from offload.plan.schedule.op import Lane
from offload.plan.schedule.schedule import Reduced
from tests.doubles import HookedDevice
from tests.parity.steps import NUM_LAYERS, OPTIONS, gradients, micro_batches, plain, tiny

SHARED = "layers.{}.self_attn.q_proj.lora_A.default.weight"


class Doubling:
    """Adds up the gradients of two equal ranks."""

    def __init__(self, engine: Engine, model: PeftModel) -> None:
        trained = [p for p in model.parameters() if p.requires_grad]
        self.own: list[list[torch.nn.Parameter]] = [[] for _ in range(NUM_LAYERS)]
        self.rest: list[torch.nn.Parameter] = []
        for parameter in trained:
            layer = engine.own_layers.get(id(parameter))
            (self.rest if layer is None else self.own[layer]).append(parameter)
        self.done: list[int | None] = []
        self.threads: set[str] = set()

    @property
    def reduced(self) -> Reduced:
        return Reduced(layers=(1,) * NUM_LAYERS, rest=len(self.rest))

    def reduce(self, layer: int | None) -> None:
        self.done.append(layer)
        self.threads.add(threading.current_thread().name)
        for parameter in self.rest if layer is None else self.own[layer]:
            assert parameter.grad is not None
            parameter.grad *= 2


def late_compute(number: int, lane: Lane, body: Callable[[], None]) -> None:
    time.sleep(0.002 + 0.001 * (number % 2) if lane is Lane.COMPUTE else 0)
    body()


def sharing() -> PeftModel:
    """Return a model whose first two layers share a trained parameter."""
    model = tiny("qwen3")
    first, second = (f"base_model.model.model.{SHARED.format(layer)}" for layer in (0, 1))
    owner = model.get_submodule(second.removesuffix(".weight"))
    owner.register_parameter("weight", model.get_parameter(first))
    return model


def test_move_each_gradient_is_added_up_once_after_its_last_visit() -> None:
    for model in (tiny("qwen3"), sharing()):
        loss, expected = plain(model)
        model = copy.deepcopy(model)
        engine = Engine(model, device=HookedDevice(late_compute), options=OPTIONS)
        doubling = Doubling(engine, model)
        run = RunStep(micro_batches=micro_batches(), dropout_seed=0, reducer=doubling)
        (result,) = engine.forward_backward_runs([run])
        last = [None] if doubling.rest else []
        assert doubling.done == [*reversed(range(NUM_LAYERS)), *last]
        assert doubling.threads == {"sluice-network"}
        sums = [s.layer for s in result.timeline.spans if s.lane is Lane.NETWORK]
        assert sums == doubling.done
        assert abs(result.loss - loss) < 1e-5
        found = gradients(model)
        for name, gradient in expected.items():
            assert torch.allclose(found[name], 2 * gradient, rtol=1e-4, atol=1e-6)
        engine.detach()


def test_a_parameter_of_two_layers_is_no_layers_own() -> None:
    model = sharing()
    engine = Engine(model, device=torch.device("cpu"), options=OPTIONS)
    own = engine.own_layers
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            is_shared = name.endswith(SHARED.format(0))
            layer = int(name.split(".layers.")[1].split(".")[0])
            assert own.get(id(parameter)) == (None if is_shared else layer)
    engine.detach()
