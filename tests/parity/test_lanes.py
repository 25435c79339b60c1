"""Lanes that run apart: any delay gives the same bits, and a missing wait gives others.

The whole list is issued before the first visit runs, so a transfer starts as soon as its waits let
it, as on a GPU.
"""

import random
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Literal

import pytest
import torch

from offload.engine.batch import with_labels
from offload.engine.engine import Engine
from offload.engine.host.slab import by_place
from offload.engine.passes.part import Part, RunStep
from offload.engine.passes.reference import SwitchedModel
from offload.engine.streams import CpuDevice
from offload.errors import OffloadError
from offload.plan.facts.codec import CodecName
from offload.plan.schedule.op import Lane
from offload.plan.schedule.schedule import (
    Order,
    Passes,
    Schedule,
    TransferSizes,
    cold_ring,
)
from tests.doubles import HookedDevice
from tests.parity.steps import NUM_LAYERS, OPTIONS, assert_equal, micro_batches, tiny
from tests.schedules import training_schedule
from tests.tiers import mostly_slow

NUM_SLOTS = 2
HOLD_S = 5.0
Place = Literal["device", "host"]
Found = tuple[float, dict[str, torch.Tensor]]


@dataclass(frozen=True, kw_only=True)
class Setting:
    """What travels besides frozen weights."""

    stash: Place
    trained_weights: Place
    codec: CodecName = "native"
    piece_bytes: int = 2**26


SETTINGS = {
    "weights only": Setting(stash="device", trained_weights="device"),
    "weights in pieces": Setting(stash="device", trained_weights="device", piece_bytes=7_000),
    "encoded weights": Setting(stash="device", trained_weights="device", codec="nf4"),
    "weights and inputs": Setting(stash="host", trained_weights="device"),
    "weights, inputs and gradients": Setting(stash="host", trained_weights="host"),
}


def engine_of(setting: Setting, device: CpuDevice, *, num_slots: int = NUM_SLOTS) -> Engine:
    model = tiny("qwen3")
    if setting.trained_weights == "host":
        model.requires_grad_(True)
    options = replace(
        OPTIONS,
        codec=setting.codec,
        num_slots=num_slots,
        stash=setting.stash,
        trained_weights=setting.trained_weights,
    )
    return Engine(model, device=device, options=options)


def run(
    setting: Setting, device: CpuDevice, *, num_slots: int = NUM_SLOTS, without: Any = None
) -> Found:
    """Run one step, perhaps with one wait left out; return its loss and its gradients."""
    engine = engine_of(setting, device, num_slots=num_slots)
    torch.manual_seed(0)
    try:
        batches = [with_labels(batch, device.torch_device) for batch in micro_batches(2)]
        schedule = drop(schedule_of(engine, setting), without)
        num_label_tokens = sum(batch.num_label_tokens for batch in batches)
        if setting.stash == "host":
            engine._bound.places.stash.prepare(
                by_place(
                    range(len(engine.layer_bytes) - 1), lambda _: engine._input_bytes(batches)
                ),
                num_buffers=schedule.num_fetch_buffers,
            )
        poison(engine)
        with engine._consistent(schedule.ring_after):
            part = Part(
                run=RunStep(micro_batches=()),
                passes=Passes(num_trained=len(batches), has_objective=False),
                batches=batches,
                model=SwitchedModel(engine._layered),
                num_label_tokens=num_label_tokens,
                ids=range(len(batches)),
            )
            engine._bound.executor.step(schedule, [part], is_stashed=setting.stash == "host")
            engine._bound.places.host_gradients.publish()
        trained = engine.trained_parameters.items()
        found = {name: p.grad.clone() for name, p in trained if p.grad is not None}
        assert len(found) == len(trained)
        return float(torch.stack(part.state.losses).sum()), found
    finally:
        engine.close()


def poison(engine: Engine) -> None:
    """Fill what a step reads with NaN: else it may hold the right values of the run before."""
    slots, stash = engine._bound.executor._transfers._slots, engine._bound.places.stash
    for buffer in (*slots._buffers, slots._decoded, *stash._buffers, stash._host):
        buffer.fill_(0xFF)


def schedule_of(engine: Engine, setting: Setting) -> Schedule:
    batches = [with_labels(batch, torch.device("cpu")) for batch in micro_batches(2)]
    return training_schedule(
        replace(engine._bound.sizes, piece_bytes=setting.piece_bytes),
        ring=cold_ring(len(engine._ring)),
        num_micro_batches=len(batches),
        order=Order.LAYER_MAJOR,
        trains_front=engine._trains_front,
        input_bytes=engine._input_bytes(batches) if setting.stash == "host" else (),
    )


def drop(schedule: Schedule, without: tuple[int, int] | None) -> Schedule:
    if without is None:
        return schedule
    number, wait = without
    ops = list(schedule.ops)
    kept = tuple(other for other in ops[number].waits if other != wait)
    ops[number] = ops[number]._replace(waits=kept)
    return replace(schedule, ops=tuple(ops))


@pytest.mark.thorough
@pytest.mark.parametrize(
    "setting",
    mostly_slow(SETTINGS, "weights, inputs and gradients"),
)
def test_move_any_delay_in_any_lane_gives_the_bits_of_the_resident_step(setting: Setting) -> None:
    resident = replace(setting, stash="device", piece_bytes=2**26)
    expected = run(resident, CpuDevice(), num_slots=NUM_LAYERS)
    for seed in range(4):
        chance = random.Random(seed)

        def around(number: int, lane: Lane, body: Callable[[], None]) -> None:
            time.sleep(chance.choice([0, 0, 0.003]))  # noqa: B023 - used within this turn
            body()
            time.sleep(chance.choice([0, 0, 0.003]))  # noqa: B023

        assert_equal(run(setting, HookedDevice(around)), expected)


def waits_of(setting: Setting) -> list[tuple[int, int]]:
    """Return (op, op that it waits for) of the step that `run` runs."""
    engine = engine_of(setting, CpuDevice())
    ops = schedule_of(engine, setting).ops
    engine.close()
    return [(number, wait) for number, op in enumerate(ops) for wait in op.waits]


MANY_WAITS = {
    "weights in pieces": pytest.mark.slow,
    "encoded weights": pytest.mark.slow,
    "weights and inputs": pytest.mark.exhaustive,
    "weights, inputs and gradients": pytest.mark.slow,
}


class Held:
    """Holds one op back until another has run."""

    def __init__(self, *, number: int, wait: int) -> None:
        self._number, self._wait = number, wait
        self._has_run = threading.Event()
        self._is_let_go = False
        self.was_overtaken = False

    def __call__(self, number: int, lane: Lane, body: Callable[[], None]) -> None:
        if number == self._number:
            self.was_overtaken = not self._is_let_go
        if number == self._wait:
            self._has_run.wait(HOLD_S)
            self._is_let_go = True
        try:
            body()
        finally:
            if number == self._number:
                self._has_run.set()


@pytest.mark.parametrize(
    "setting",
    [
        pytest.param(setting, id=name, marks=MANY_WAITS.get(name, ()))
        for name, setting in SETTINGS.items()
    ],
)
def test_a_step_without_any_one_of_its_waits_goes_wrong(setting: Setting) -> None:
    """What was to be waited for is held back until the op that should have waited has run."""
    expected = run(setting, CpuDevice())
    for number, wait in waits_of(setting):
        held = Held(number=number, wait=wait)
        try:
            found = run(setting, HookedDevice(held), without=(number, wait))
        except (OffloadError, KeyError):
            found = None  # what it needed was not there yet
        assert held.was_overtaken
        if found is not None:
            with pytest.raises(AssertionError):
                assert_equal(found, expected)


def test_no_wait_is_implied_by_the_others() -> None:
    """Else the test above could not hold an op back: `run` would wait for ever."""
    sizes = TransferSizes(
        layer_bytes=(3,) * 5,
        gradient_bytes=(3,) * 5,
        decoded_bytes=(9, 0, 9, 9, 9),
        piece_bytes=1,
        num_staging=2,
    )
    ops = training_schedule(
        sizes,
        ring=cold_ring(2),
        num_micro_batches=3,
        order=Order.LAYER_MAJOR,
        trains_front=True,
        input_bytes=(1, 1, 1),
    ).ops
    for number, op in enumerate(ops):
        for wait in op.waits:
            others = [other for other in op.waits if other != wait]
            lane = [i for i in range(number) if ops[i].lane is op.lane]
            reached, stack = set(), [*others, *lane[-1:]]
            while stack:
                i = stack.pop()
                if i not in reached:
                    reached.add(i)
                    before = [j for j in range(i) if ops[j].lane is ops[i].lane]
                    stack += [*ops[i].waits, *before[-1:]]
            assert wait not in reached
