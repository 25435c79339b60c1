"""What each part of the engine is worth: the same step with one of them taken out.

    the engine          as it is, measured first and last
    usual order         each micro-batch walks all layers
    two slots           no more than the ring needs: nothing is resident
    decoded each time   encoded layers are decoded for each micro-batch, not once per visit
    pinned by tensor    each tensor page-locked and copied by itself, as loaders of others do
    a wait per layer    the host waits for the device before each visit
    whole copies        a layer is one copy, so what shares its lane waits for all of it
    compiled layers     nothing taken out: torch compiles each kind of layer

All are taken out here, around the engine, and are exact but for rounding. The number of tokens is
that at which loads just hide behind the visits, where every part shows.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, closing, contextmanager, nullcontext
from dataclasses import replace
from typing import Any

import torch

from finetune.training.compile import FAILURES as COMPILER_FAILURES
from finetune.training.compile import compile_layers, refusal
from offload.engine.memory_meter import torch_pinned_bytes
from offload.plan.schedule.op import Op
from offload.plan.schedule.schedule import Order
from tests.bench.gpu.card import Card
from tests.bench.gpu.dense import adapter_of
from tests.bench.gpu.journal import Journal
from tests.bench.gpu.parts import MIN_LAYERS, Part
from tests.bench.gpu.rig import Batches, Rig
from tests.bench.gpu.settings import Settings
from tests.bench.gpu.training import FAILURES, Session, machine_for, model_of
from tests.bench.record import quantiles

SHAPE, SEQ_LEN = "qwen3-8b", 2048
NUM_LAYERS, NUM_SLOTS, NUM_STEPS = 2 * MIN_LAYERS, 6, 5
ENGINE, AGAIN, COMPILED = "the engine", "the engine, again", "compiled layers"
CODECS: tuple[str, ...] = ("native", "nf4")
REHEARSED_CODECS: tuple[str, ...] = ("native", "int8")
REHEARSED_OF_M_STAR = 4.0  # some micro-batches
Ablation = Callable[[Any], AbstractContextManager[None]]


# --------------------------------------------------------------------------- what is taken out


@contextmanager
def decoded_each_time(engine: Any) -> Iterator[None]:
    """Decode a layer for each micro-batch, from a copy of what its slot held."""
    executor, kept = engine._bound.executor, {}
    transfers, slots = executor._transfers, executor._transfers._slots
    decode, forward, backward = transfers._decode, executor._forward, executor._backward

    def decode_and_keep(op: Op) -> None:
        kept["encoded"] = slots._buffers[op.slot].clone()
        decode(op)

    def again(layer: int | None, m: int) -> None:
        with torch.no_grad():
            for field in slots._records[layer].fields if m else ():
                field.decode(kept["encoded"], slots._decoded)

    def forward_decoded(state: Any, op: Op, part: Any, **how: Any) -> None:
        again(op.layer, op.micro_batch_index)
        forward(state, op, part, **how)

    def backward_decoded(state: Any, op: Op, part: Any, **how: Any) -> None:
        again(op.layer, op.micro_batch_index)
        backward(state, op, part, **how)

    transfers._decode = decode_and_keep
    executor._forward, executor._backward = forward_decoded, backward_decoded
    try:
        yield
    finally:
        del transfers._decode, executor._forward, executor._backward


@contextmanager
def pinned_by_tensor(engine: Any) -> Iterator[None]:
    """Copy each tensor of a layer by itself, from memory that torch has page-locked for it."""
    transfers, slots, source = (
        engine._bound.executor._transfers,
        engine._bound.executor._transfers._slots,
        engine._host._backing,
    )
    is_cuda = engine._device.torch_device.type == "cuda"
    pinned = [
        [
            field.written(source.layer(layer)).clone().pin_memory()
            if is_cuda
            else field.written(source.layer(layer)).clone()
            for field in record.fields
        ]
        for layer, record in enumerate(engine._host.records)
    ]

    def load(op: Op) -> None:
        if op.offset or op.layer is None:
            return
        for field, tensor in zip(slots._records[op.layer].fields, pinned[op.layer], strict=True):
            engine._device.copy(slots.target(op.slot, field.offset, field.num_bytes), tensor)

    transfers._load = load
    try:
        yield
    finally:
        del transfers._load


@contextmanager
def a_wait_per_layer(engine: Any) -> Iterator[None]:
    """Let the host wait for all that was issued before it issues a layer's visit."""
    executor = engine._bound.executor
    forward, backward = executor._forward, executor._backward
    is_cuda = engine._device.torch_device.type == "cuda"

    def wait(m: int) -> None:
        if m == 0 and is_cuda:
            torch.cuda.current_stream().synchronize()

    def forward_waited(state: Any, op: Op, part: Any, **how: Any) -> None:
        wait(op.micro_batch_index)
        forward(state, op, part, **how)

    def backward_waited(state: Any, op: Op, part: Any, **how: Any) -> None:
        wait(op.micro_batch_index)
        backward(state, op, part, **how)

    executor._forward, executor._backward = forward_waited, backward_waited
    try:
        yield
    finally:
        del executor._forward, executor._backward


@contextmanager
def whole_copies(engine: Any) -> Iterator[None]:
    """Copy a layer at once; of a staging ring, whose buffers are small, nothing changes."""
    before = engine._bound
    if not before.sizes.num_staging:
        whole = replace(before.sizes, piece_bytes=max(before.sizes.layer_bytes))
        engine._bound = replace(before, sizes=whole)
    try:
        yield
    finally:
        engine._bound = before


@contextmanager
def compiled_layers(engine: Any) -> Iterator[None]:
    """Let torch compile the layers, as `train.compile` does."""
    layers = engine._layered.layers
    compile_layers(layers)
    try:
        yield
    except COMPILER_FAILURES as error:
        raise refusal(error) from error
    finally:
        for layer in layers:
            layer._compiled_call_impl = None


def nothing(_engine: Any) -> AbstractContextManager[None]:
    """Take nothing out."""
    return nullcontext()


# ------------------------------------------------------------------------------------- measuring


def arms(codec: str) -> dict[str, tuple[Ablation, Order, bool]]:
    """Return each arm: what is taken out, the order, and whether there are two slots only."""
    major, usual = Order.LAYER_MAJOR, Order.MICRO_BATCH_MAJOR
    if codec != "native":
        return {
            ENGINE: (nothing, major, False),
            "decoded each time": (decoded_each_time, major, False),
            AGAIN: (nothing, major, False),
        }
    return {
        ENGINE: (nothing, major, False),
        "usual order": (nothing, usual, False),
        "pinned by tensor": (pinned_by_tensor, major, False),
        "a wait per layer": (a_wait_per_layer, major, False),
        "whole copies": (whole_copies, major, False),
        "two slots": (nothing, major, True),
        AGAIN: (nothing, major, False),
        COMPILED: (compiled_layers, major, False),
    }


def run(settings: Settings, journal: Journal) -> None:
    """Measure all arms of both forms of the weights, inputs in RAM so that both lanes are busy."""
    codecs = REHEARSED_CODECS if settings.is_rehearsal else CODECS
    journal.expect([f"{codec}: {name}" for codec in codecs for name in arms(codec)])
    model = model_of(SHAPE, adapter_of(SHAPE), is_rehearsal=settings.is_rehearsal)
    num_layers = min(settings.num_layers or NUM_LAYERS, model.facts.num_layers)
    model = replace(model.with_layers(num_layers), layer_code="plain")  # one arm compiles it
    for codec in codecs:
        left = [name for name in arms(codec) if not journal.has(f"{codec}: {name}")]
        if not left or settings.left_s < 0:
            continue
        part = Part(
            codec=codec,
            vram_gib=settings.vram_gib,
            seq_len=16 if settings.is_rehearsal else SEQ_LEN,
            of_m_star=REHEARSED_OF_M_STAR if settings.is_rehearsal else 1.0,
            num_slots=min(NUM_SLOTS, num_layers - 1),
        )
        machine = machine_for(model, settings, part)
        with Card(machine.device) as card:
            try:
                session = Session(model, machine, codec, num_layers=num_layers, card=card)
                with closing(session):
                    _measure(journal, session, part)
            except FAILURES as error:
                for name in (name for name in left if not journal.has(f"{codec}: {name}")):
                    journal.fail(f"{codec}: {name}", error)


def _measure(journal: Journal, session: Session, part: Part) -> None:
    planned, rig, batches = session.ready(part)
    num_slots, first_s = planned.run.num_slots, None
    for name, (ablation, order, has_two_slots) in arms(part.codec).items():
        wanted = 2 if has_two_slots else num_slots
        rig.rebind(num_slots=wanted, stash="host")
        with ablation(rig.engine):
            step_s, num_loads, loss = steps(rig, batches, order)
            pinned_bytes = torch_pinned_bytes() if session.device.type == "cuda" else 0
        first_s = first_s or step_s["p50"]
        journal.add(
            f"{part.codec}: {name}",
            step_s=step_s,
            tokens_per_s=planned.run.tokens_per_step / step_s["p50"],
            of_engine=first_s / step_s["p50"],
            n=NUM_STEPS,
            loss=loss,
            **planned.said | {"num_slots": wanted, "num_loads": num_loads},
            torch_pinned_bytes=pinned_bytes,
            slab_bytes=rig.engine.slab_bytes,
        )


def steps(rig: Rig, batches: Batches, order: Order) -> tuple[dict[str, float], int, float]:
    """Warm the ring, then run some steps; return their times, loads and the last loss."""
    rig.step(batches, order=order)
    found = [rig.step(batches, order=order) for _ in range(NUM_STEPS)]
    return quantiles([step.seconds for step in found]), found[-1].num_loads, found[-1].loss
