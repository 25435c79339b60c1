"""Streamed equals resident to the bit, where copies are slower than computing and where faster.

Lanes are made late in turn: a visit that did not wait for its weights, or a load that did not wait
for its slot, would compute with another layer's. Algorithms are deterministic; experts are
multiplied by a loop, which every card can repeat to the bit.
"""

import itertools
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch

from offload.engine.engine import Engine, EngineOptions
from offload.engine.streams import CpuDevice, CudaDevice, Device, Event
from offload.plan.facts import AdapterSpec
from offload.plan.op import Kind, Lane
from tests.bench.gpu.journal import Journal
from tests.bench.gpu.models import ATTENTION, fields, make
from tests.bench.gpu.rig import Batches, batches_of
from tests.bench.gpu.settings import Settings

LATE_CYCLES, LATE_S = 4_000_000, 0.002
LATE: tuple[tuple[Lane, ...], ...] = ((), (Lane.H2D,), (Lane.D2H,), (Lane.COMPUTE,))
NUM_LAYERS, NUM_STEPS = 5, 3
Found = tuple[float, dict[str, torch.Tensor]]


@dataclass(frozen=True, kw_only=True, slots=True)
class Size:
    """What is computed: a model's widths, and how many tokens of it.

    Attributes:
        name: What is the slower of both, as intended; the row has what was measured.
        hidden: Features.
        seq_len: Tokens of a micro-batch.
        num_micro_batches: Of a step.
    """

    name: str
    hidden: int
    seq_len: int
    num_micro_batches: int


SIZES = (
    Size(name="slow copies", hidden=4096, seq_len=64, num_micro_batches=2),
    Size(name="fast copies", hidden=1024, seq_len=2048, num_micro_batches=4),
)
TINY = (
    Size(name="slow copies", hidden=64, seq_len=8, num_micro_batches=2),
    Size(name="fast copies", hidden=32, seq_len=32, num_micro_batches=3),
)


def late(lanes: Collection[Lane], device: str) -> Device:
    """Return a device whose ops come late on some lanes."""
    if device == "cpu":
        return _LateCpu(lanes)
    return _LateCuda(lanes)


class _LateCpu(CpuDevice):
    def __init__(self, lanes: Collection[Lane]) -> None:
        super().__init__()
        self._late = lanes

    def submit(self, lane: Lane, waits: Sequence[Event], body: Callable[[], None]) -> Event:
        def run() -> None:
            time.sleep(LATE_S if lane in self._late else 0.0)
            body()

        return super().submit(lane, waits, run)


class _LateCuda(CudaDevice):
    def __init__(self, lanes: Collection[Lane]) -> None:
        super().__init__(torch.empty(0, device="cuda").device, is_staged=False)
        self._late = lanes

    def submit(self, lane: Lane, waits: Sequence[Event], body: Callable[[], None]) -> Event:
        def run() -> None:
            if lane in self._late:
                torch.cuda._sleep(LATE_CYCLES)
            body()

        return super().submit(lane, waits, run)


def run(settings: Settings, journal: Journal) -> None:
    """Compare each size of each kind of model, with each lane late."""
    torch.use_deterministic_algorithms(mode=True)
    sizes = TINY if settings.is_rehearsal else SIZES
    work = list(itertools.product(sizes, ("qwen3-8b", "qwen3-30b-a3b"), ("device", "host")))
    journal.expect([_name(*one) for one in work])
    for size, shape, stash in work:
        name = _name(size, shape, stash)
        if journal.has(name) or settings.left_s < 0:
            continue
        batches = batches_of(size.num_micro_batches, size.seq_len, 512)
        config = config_of(shape, size)
        resident, _ = steps(config, (), settings, batches, num_slots=NUM_LAYERS, stash="device")
        unequal: dict[str, list[str]] = {}
        ratio = 0.0
        for lanes in LATE:
            found, timeline = steps(config, lanes, settings, batches, num_slots=2, stash=stash)
            if not lanes:
                loads_s = timeline.busy_s(Kind.LOAD)
                ratio = loads_s / timeline.busy_s(Kind.FORWARD, Kind.BACKWARD)
            if names := differing(found, resident):
                unequal["+".join(lanes) or "none"] = names
        journal.add(
            name,
            is_equal=not unequal,
            unequal=unequal,
            num_tensors=len(resident[1]),
            loss=resident[0],
            late=["+".join(lanes) or "none" for lanes in LATE],
            loads_of_visits=ratio,
            hidden=size.hidden,
            tokens_per_step=size.seq_len * size.num_micro_batches,
            dtype="float32" if settings.is_rehearsal else "bfloat16",
        )


def _name(size: Size, shape: str, stash: str) -> str:
    return f"{size.name}, {shape}, inputs on the {stash}"


def config_of(shape: str, size: Size) -> dict[str, Any]:
    """Return a model of a shape's kind, of few layers and another width."""
    config = fields(shape, num_layers=NUM_LAYERS, vocab_size=512)
    config |= {
        "hidden_size": size.hidden,
        "intermediate_size": 3 * size.hidden,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": size.hidden // 4 if size.hidden < 512 else 128,
    }
    if "num_experts" in config:
        config |= {"num_experts": 8, "num_experts_per_tok": 2}
        config["moe_intermediate_size"] = size.hidden // 2
    return config


def steps(
    config: dict[str, Any],
    lanes: Collection[Lane],
    settings: Settings,
    batches: Batches,
    *,
    num_slots: int,
    stash: Literal["device", "host"] | str,
) -> tuple[Found, Any]:
    """Run some steps on the same batches; return the last one's loss, gradients and times."""
    made = make(
        config,
        dtype=torch.float32 if settings.is_rehearsal else torch.bfloat16,
        codec="native",
        device=torch.device(settings.device),
        adapter=AdapterSpec(rank=8, targets=ATTENTION, experts="num_experts" in config),
        experts_implementation="eager" if "num_experts" in config else None,
    )
    options = EngineOptions(
        num_slots=num_slots,
        codec="native",
        tier="ram",
        store_dir=None,
        stash="host" if stash == "host" else "device",
        trained_weights="device",
        head_chunk_tokens=1024,
    )
    engine = Engine(
        made.model, device=late(lanes, settings.device), options=options, hold=made.slab
    )
    try:
        for _ in range(NUM_STEPS - 1):
            engine.forward_backward(batches, dropout_seed=0)
            made.model.zero_grad()
        result = engine.forward_backward(batches, dropout_seed=0)
        found = {n: p.grad for n, p in made.model.named_parameters() if p.grad is not None}
        return (result.loss, found), result.timeline
    finally:
        engine.close()


def differing(found: Found, expected: Found) -> list[str]:
    """Return the names of what is not equal to the bit."""
    names = [] if found[0] == expected[0] else ["loss"]
    if found[1].keys() != expected[1].keys() or not expected[1]:
        return [*names, "other gradients"]
    return names + [n for n, g in expected[1].items() if not torch.equal(found[1][n], g)]
