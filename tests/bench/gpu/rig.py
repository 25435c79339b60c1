"""A model on an engine, measured step by step: streamed, with its loads left out, resident."""

import gc
import statistics
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch

from finetune.training.loop import gc_frozen
from finetune.training.optimizer import clip, make_optimizer, update
from offload.engine import memory_meter as meter
from offload.engine.engine import Engine, EngineOptions, bind
from offload.engine.host.slab import Slab
from offload.engine.streams import Device, release_cached
from offload.plan.memory.memory import CONTEXT, FRAGMENTATION
from offload.plan.plan import Plan, calibrate, with_costs
from offload.plan.schedule.op import Kind
from offload.plan.schedule.schedule import Order, cold_ring
from offload.plan.schedule.timeline import Timeline
from offload.plan.time.costs import layer_work
from offload.plan.time.pricer import Pricer
from tests.bench.gpu.ceiling import Ceiling
from tests.bench.gpu.models import Made
from tests.bench.record import quantiles

Batches = list[dict[str, torch.Tensor]]
LR, MAX_GRAD_NORM = 1e-4, 1.0
NUM_WARM, NUM_ROUNDS, NUM_RESIDENT = 2, 5, 2
EVERY = 2  # rounds: one with a step without loads, which tells only what is exposed
NUM_STEPS = NUM_WARM + 1 + NUM_ROUNDS + -(-NUM_ROUNDS // EVERY) + 1 + NUM_RESIDENT


@dataclass(frozen=True, kw_only=True, slots=True)
class Step:
    """One optimizer step.

    Attributes:
        seconds: All of it.
        optimizer_s: Clipping and update.
        loss: Mean over its label tokens.
        num_loads: Layers that crossed the link.
        timeline: Of the pass.
    """

    seconds: float
    optimizer_s: float
    loss: float
    num_loads: int
    timeline: Timeline


@dataclass(frozen=True, kw_only=True, slots=True)
class Work:
    """What steps are held against.

    Attributes:
        ceiling: The best product of the model's layers.
        once_flops: Of a step, each product counted once.
    """

    ceiling: Ceiling
    once_flops: float


class Rig:
    """A model with its engine and optimizer."""

    def __init__(
        self, made: Made, device: torch.device | Device, *, plan: Plan, optimizer: str
    ) -> None:
        """Attach the engine as a plan has it."""
        request, typical = plan.request, plan.request.typical
        self._slab: Slab = made.slab
        self._model = made.model
        self.engine = Engine(
            made.model,
            device=device,
            options=EngineOptions(
                num_slots=plan.num_slots,
                num_kept_graphs=plan.num_kept_graphs,
                codec=typical.codec,
                tier="ram",
                store_dir=None,
                stash="host" if request.is_stashed else "device",
                trained_weights="device",
                head_chunk_tokens=typical.head_chunk_tokens,
                layer_kernels="fused"
                if typical.code_on(plan.machine.device) == "fused"
                else "plain",
            ),
            backing=made.slab,
        )
        trained = {n: p for n, p in made.model.named_parameters() if p.requires_grad}
        self._parameters = list(trained.values())
        self._optimizer = make_optimizer(
            trained, name=optimizer, lr=LR, weight_decay=0.0, loraplus_ratio=None
        )
        self.num_trained = sum(p.numel() for p in self._parameters)

    def step(self, batches: Batches, *, order: Order = Order.LAYER_MAJOR) -> Step:
        """Run one optimizer step, as a training loop does."""
        self.engine.wait()
        start_s = time.perf_counter()
        result = self.engine.forward_backward(batches, dropout_seed=0, order=order)
        timeline = result.timeline  # waits for the device
        update_s = time.perf_counter()
        clip(self._parameters, MAX_GRAD_NORM)
        update(self._optimizer, self._parameters, lr=LR, loraplus_ratio=None)
        self.engine.wait()
        end_s = time.perf_counter()
        return Step(
            seconds=end_s - start_s,
            optimizer_s=end_s - update_s,
            loss=result.loss,
            num_loads=result.num_loads,
            timeline=timeline,
        )

    def rebind(self, *, num_slots: int, stash: Literal["device", "host"]) -> None:
        """Take other slots over the slab that is there."""
        rebind(self.engine, self._slab, num_slots=num_slots, stash=stash)

    @contextmanager
    def without_loads(self) -> Iterator[None]:
        """Leave out what moves weights: same ops, same waits, wrong numbers."""
        transfers: Any = self.engine._bound.executor._transfers
        transfers._load = transfers._read = _nothing
        try:
            yield
        finally:
            del transfers._load, transfers._read

    def close(self) -> None:
        """End the engine."""
        self.engine.close()


def rebind(engine: Any, slab: Slab, *, num_slots: int, stash: Literal["device", "host"]) -> None:
    """Take other slots over the slab that is there, as `attach` would, without locking it anew.

    1. Let the layers show the slab and let go of slots, decoded layer and stashed inputs.
    2. Give their memory back, and bind the layers to new slots.
    """
    engine.wait()
    with engine._seal.opened():
        for layer in range(len(slab.records)):
            slab.alias(layer)
    engine._host.blocks.free(engine._bound.places.stash._host)
    engine._bound = None
    gc.collect()
    release_cached(engine._device.torch_device)
    engine._options = replace(engine._options, num_slots=num_slots, stash=stash)
    with engine._seal.opened():
        engine._bound = bind(
            engine._model,
            engine._layered,
            engine._host,
            device=engine._device,
            options=engine._options,
        )
    engine.slot_bytes = engine._bound.places.slots.num_bytes
    engine._ring = cold_ring(engine._options.num_slots)


def _nothing(_op: object) -> None:
    pass


def batches_of(
    num: int, seq_len: int, vocab_size: int, *, num_sequences: int = 1, seed: int = 0
) -> Batches:
    """Return micro-batches of random tokens, all with a label."""
    generator = torch.Generator().manual_seed(seed)
    drawn = torch.randint(0, vocab_size, (num, num_sequences, seq_len), generator=generator)
    return [{"input_ids": rows, "labels": rows} for rows in drawn]


def measure(
    rig: Rig, plan: Plan, batches: Batches, device: torch.device, work: Work
) -> dict[str, Any]:
    """Run steps as planned and with their loads left out, in turn; return what a row says of them.

    The step behind the warm-up is what the calibrated prediction rests on; R3 is that of each
    step's own visits and loads.
    """
    meter.reset_peak(device)
    for _ in range(NUM_WARM):
        rig.step(batches)
    with gc_frozen():
        return _measured(rig, plan, batches, device, work)


def _measured(
    rig: Rig, plan: Plan, batches: Batches, device: torch.device, work: Work
) -> dict[str, Any]:
    first = rig.step(batches)
    peak_bytes, reserved_bytes = meter.peak_bytes(device), meter.peak_reserved_bytes(device)
    costs = calibrate(plan.costs, first.timeline, optimizer_s=first.optimizer_s, saved=plan.saved)
    steps: list[Step] = []
    floors: list[Step] = []
    for number in range(NUM_ROUNDS):
        steps.append(rig.step(batches))
        if number % EVERY == 0:
            with rig.without_loads():
                floors.append(rig.step(batches))
    step_s = [step.seconds for step in steps]
    predicted_s = with_costs(plan, costs).step_s
    return {
        "step_s": quantiles(step_s),
        "each_step_s": [round(seconds, 4) for seconds in (first.seconds, *step_s)],
        "tokens_per_s": quantiles([plan.tokens_per_step / s for s in step_s]),
        "n": len(steps),
        "loss": first.loss,
        "num_loads": steps[-1].num_loads,
        "floor_step_s": quantiles([step.seconds for step in floors]),
        "r3_share": quantiles([own_bound_s(plan, step) / step.seconds for step in steps]),
        "exposed_frac": quantiles(
            [
                1 - floor.seconds / step.seconds
                for step, floor in zip(steps[::EVERY], floors, strict=True)
            ]
        ),
        "predicted_probed_s": plan.step_s,
        "predicted_s": predicted_s,
        "calibrated_error": predicted_s / statistics.median(step_s) - 1,
        "peak_reserved_bytes": reserved_bytes,
        **rates_of(plan, steps, work),
        **memory_of(rig, plan, device, peak_bytes),
    }


def own_bound_s(plan: Plan, step: Step) -> float:
    """Return R3 at the durations of a step's own visits and the rate of its own loads."""
    costs = calibrate(plan.costs, step.timeline, optimizer_s=step.optimizer_s, saved=plan.saved)
    return with_costs(plan, costs).bound_s


def rates_of(plan: Plan, steps: Sequence[Step], work: Work) -> dict[str, Any]:
    """Return what is computed a second: by the layers' visits and by the whole step.

    FLOPs of the visits are those that the plan counts, recompute included, and their share is of
    the best product of the layers' own shapes. Those of the step count each product once.
    """
    at = Pricer(machine=plan.machine, facts=plan.facts, workload=plan.request.typical)
    visits = [layer_work(at, layer).visits for layer in plan.facts.layers]
    flops = plan.request.num_micro_batches * sum(
        (one.forward + one.recompute + one.backward).flops for one in visits
    )
    found = []
    for step in steps:
        visits_s = step.timeline.busy_s(Kind.FORWARD, Kind.DECODE, Kind.BACKWARD)
        found.append(flops / visits_s)
    best = work.ceiling.flops_per_s
    return {
        "layer_flops": flops,
        "layer_flops_per_s": quantiles(found),
        **work.ceiling.said,
        "lane_share": quantiles([rate / best for rate in found]),
        "once_flops": work.once_flops,
        "once_flops_per_s": quantiles([work.once_flops / step.seconds for step in steps]),
        "probe_flops_per_s": plan.machine.gemm_flops_per_s.value,
    }


def memory_of(rig: Rig, plan: Plan, device: torch.device, peak_bytes: int) -> dict[str, Any]:
    """Return predicted and measured memory; of a CPU that of the arenas, which have names there."""
    apart = (CONTEXT, FRAGMENTATION)
    planned = sum(term.num_bytes for term in plan.device_memory if term.name not in apart)
    found: dict[str, Any] = {
        "peak_bytes": peak_bytes,
        "predicted_peak_bytes": planned,
        "peak_host_bytes": meter.peak_host_bytes(),
        "slab_bytes": rig.engine.slab_bytes,
        "pinned_bytes": rig.engine.pinned_bytes,
    }
    if device.type == "cuda":
        found["memory_error"] = planned / peak_bytes - 1
    return found


def measure_resident(rig: Rig, plan: Plan, batches: Batches) -> list[float]:
    """Hold all layers on the device and return the seconds of some steps; same kernels, no loads.

    Raises:
        OutOfMemoryError: It cannot hold them.
    """
    rig.rebind(num_slots=len(plan.costs.layers), stash="device")
    rig.step(batches)
    return [rig.step(batches).seconds for _ in range(NUM_RESIDENT)]
