"""What goes wrong inside a step: a named error, no lane that hangs, and a model that is whole."""

import _thread
import copy
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace

import pytest
import torch
from torch import nn

import offload
from offload.engine.engine import Engine
from offload.engine.host.pagelock import aligned_empty
from offload.plan.schedule.op import Lane
from tests.doubles import HookedDevice
from tests.parity import steps
from tests.parity.steps import assert_equal, gradients, micro_batches, resident, streamed, tiny
from tests.tiers import diagonal

pytestmark = pytest.mark.timeout(60)

OPTIONS = replace(steps.OPTIONS, stash="host")


class Fault:
    """Raises once, in the first op of a lane that comes after some others."""

    def __init__(self, lane: Lane, after: int, error: BaseException) -> None:
        self._lane, self._after, self._error = lane, after, [error]

    def __call__(self, number: int, lane: Lane, body: Callable[[], None]) -> None:
        if lane is self._lane and number >= self._after and self._error:
            raise self._error.pop()
        body()


def check_recovery(engine: Engine, model: nn.Module, before: Mapping[str, torch.Tensor]) -> None:
    """Check that the next step is right, that the lanes end, and that no weight was lost."""
    num_threads = threading.active_count()
    model.zero_grad()
    result = engine.forward_backward(micro_batches(), dropout_seed=0)
    found = result.loss, gradients(model)  # type: ignore[arg-type]
    assert_equal(found, resident("qwen3"))
    engine.detach()
    assert threading.active_count() == num_threads - (len(Lane) - 1)
    assert all(torch.equal(p, before[name]) for name, p in model.named_parameters())


@pytest.mark.parametrize(
    ("lane", "after"), diagonal([Lane.H2D, Lane.D2H, Lane.COMPUTE], [0, 10, 20])
)
def test_an_error_in_any_lane_ends_the_step_and_not_the_engine(lane: Lane, after: int) -> None:
    model = tiny("qwen3")
    before = copy.deepcopy(dict(model.named_parameters()))
    out_of_memory = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB")
    error = out_of_memory if lane is Lane.COMPUTE else OSError("the link is down")
    expected = torch.OutOfMemoryError if lane is Lane.COMPUTE else offload.TransferError
    engine = Engine(model, device=HookedDevice(Fault(lane, after, error)), options=OPTIONS)
    with pytest.raises(expected, match=r"out of memory|the link is down"):
        engine.forward_backward(micro_batches(), dropout_seed=0)
    check_recovery(engine, model, before)


@pytest.mark.thorough
def test_an_error_of_the_projects_own_is_raised_as_it_is_from_any_lane() -> None:
    error = offload.UnsupportedModelError("a", limit="b", hint="c")
    engine = Engine(tiny("qwen3"), device=HookedDevice(Fault(Lane.D2H, 0, error)), options=OPTIONS)
    with pytest.raises(offload.UnsupportedModelError, match="a; b"):
        engine.forward_backward(micro_batches())
    engine.detach()


@pytest.fixture
def heeds_ctrl_c() -> Iterator[None]:
    """Take Ctrl-C as Python does, where a shell started this in the background to ignore it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.thorough
@pytest.mark.usefixtures("heeds_ctrl_c")
def test_ctrl_c_while_the_step_waits_for_a_copy_ends_it() -> None:
    model = tiny("qwen3")
    before = copy.deepcopy(dict(model.named_parameters()))
    interrupts = [True]

    def around(number: int, lane: Lane, body: Callable[[], None]) -> None:
        if lane is Lane.H2D and interrupts:
            interrupts.pop()
            time.sleep(0.5)  # until the main thread waits for this copy
            _thread.interrupt_main()
            time.sleep(0.2)
        body()

    engine = Engine(model, device=HookedDevice(around), options=OPTIONS)
    with pytest.raises(KeyboardInterrupt):
        engine.forward_backward(micro_batches(), dropout_seed=0)
    check_recovery(engine, model, before)


@pytest.mark.thorough
def test_an_evaluation_that_fails_leaves_the_next_step_right() -> None:
    model = tiny("qwen3")
    before = copy.deepcopy(dict(model.named_parameters()))
    fault = Fault(Lane.H2D, 0, OSError("the link is down"))
    engine = Engine(model, device=HookedDevice(fault), options=OPTIONS)
    with pytest.raises(offload.TransferError, match="h2d lane failed"):
        engine.forward(micro_batches()[0])
    check_recovery(engine, model, before)


@pytest.mark.thorough
def test_an_attachment_that_fails_half_way_gives_the_model_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = tiny("qwen3")
    before = copy.deepcopy(dict(model.named_parameters()))
    num_threads = threading.active_count()

    def empty(num_bytes: int) -> torch.Tensor:
        if num_bytes > 10_000:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return aligned_empty(num_bytes)

    monkeypatch.setattr("offload.engine.bound.aligned_empty", empty)
    with pytest.raises(torch.OutOfMemoryError):
        offload.attach(model, num_slots=2, device="cpu")
    monkeypatch.undo()
    assert threading.active_count() == num_threads
    assert all(torch.equal(p, before[name]) for name, p in model.named_parameters())
    assert_equal(streamed(model, num_slots=2), resident("qwen3"))
