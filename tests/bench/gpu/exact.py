"""Streamed equals resident to the bit, where copies are slower than computing and where faster.

The defaults of a run are compared: branches in the base's dtype, fused norms, rotations, gates and
loss, and 128 experts by Triton's kernels; a CPU has neither, so a rehearsal takes the loop and the
model's own code. Lanes are made late in turn: a visit that did not wait for its weights, or a load
that did not wait for its slot, would compute with another layer's. Algorithms are deterministic.
"""

import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch

from offload.engine.engine import Engine, EngineOptions, LayerKernels
from offload.engine.streams import CudaDevice, Event
from offload.plan.facts.facts import AdapterSpec
from offload.plan.machine.machine import ExpertsImplementation
from offload.plan.schedule.op import Kind, Lane
from offload.plan.schedule.timeline import Timeline
from tests.bench.bench_engine import SlowLink
from tests.bench.gpu.journal import Journal
from tests.bench.gpu.models import ATTENTION, fields, make
from tests.bench.gpu.rig import batches_of, rebind
from tests.bench.gpu.settings import Settings

LATE_CYCLES, LATE_S = 4_000_000, 0.002
NUM_LAYERS, NUM_SLOTS, NUM_STEPS = 5, 2, 3
VISITS = (Kind.FORWARD, Kind.BACKWARD)
SHAPES = ("qwen3-8b", "qwen3-30b-a3b")
Stash = Literal["device", "host"]
Found = tuple[float, dict[str, torch.Tensor]]
WAYS: tuple[tuple[Stash, tuple[Lane, ...]], ...] = (
    ("device", ()),
    ("device", (Lane.H2D,)),
    ("device", (Lane.COMPUTE,)),
    ("host", ()),
    ("host", (Lane.D2H,)),
    ("host", (Lane.H2D, Lane.COMPUTE)),
)
"""Where layer inputs wait, and which lanes are late."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Size:
    """What is computed: a model's widths, and how many tokens of it.

    Attributes:
        name: Which of both takes longer.
        hidden: Features.
        seq_len: Tokens of a micro-batch.
        num_micro_batches: Of a step.
        link_bytes_per_s: Of a CPU's link; a card has its own.
        num_experts: Of a mixture's layer; None leaves all of them.
    """

    name: str
    hidden: int
    seq_len: int
    num_micro_batches: int
    link_bytes_per_s: float = float("inf")
    num_experts: int | None = None


SIZES = (
    Size(name="slow copies", hidden=2048, seq_len=64, num_micro_batches=2),
    Size(name="fast copies", hidden=512, seq_len=2048, num_micro_batches=4),
)
TINY = (
    Size(
        name="slow copies",
        hidden=64,
        seq_len=8,
        num_micro_batches=2,
        link_bytes_per_s=2e7,
        num_experts=8,
    ),
    Size(name="fast copies", hidden=32, seq_len=32, num_micro_batches=3, num_experts=8),
)


class LateCpu(SlowLink):
    """A CPU whose ops come late on some lanes."""

    late: Collection[Lane] = ()

    def submit(self, lane: Lane, waits: Sequence[Event], body: Callable[[], None]) -> Event:
        """Queue `body`, perhaps behind a pause."""

        def run() -> None:
            time.sleep(LATE_S if lane in self.late else 0.0)
            body()

        return super().submit(lane, waits, run)


class LateCuda(CudaDevice):
    """A card whose streams come late on some lanes."""

    late: Collection[Lane] = ()

    def submit(self, lane: Lane, waits: Sequence[Event], body: Callable[[], None]) -> Event:
        """Issue `body`, perhaps behind a kernel that waits."""

        def run() -> None:
            if lane in self.late:
                torch.cuda._sleep(LATE_CYCLES)
            body()

        return super().submit(lane, waits, run)


def run(settings: Settings, journal: Journal) -> None:
    """Compare each size of each kind of model."""
    torch.use_deterministic_algorithms(mode=True)
    sizes = TINY if settings.is_rehearsal else SIZES
    work = {f"defaults, {size.name}, {shape}": (size, shape) for size in sizes for shape in SHAPES}
    journal.expect(list(work))
    for name, (size, shape) in work.items():
        if not journal.has(name) and settings.left_s > 0:
            journal.add(name, **compared(size, shape, settings))


def compared(size: Size, shape: str, settings: Settings) -> dict[str, Any]:
    """Run a model resident, then streamed in each way; return what was not equal."""
    bench = Bench(size, shape, settings)
    try:
        resident, _ = bench.steps(num_slots=NUM_LAYERS, stash="device", late=())
        unequal, ratio = {}, 0.0
        for stash, late in WAYS:
            found, timeline = bench.steps(num_slots=NUM_SLOTS, stash=stash, late=late)
            ratio = ratio or timeline.busy_s(Kind.LOAD) / timeline.busy_s(*VISITS)
            if names := differing(found, resident):
                unequal[f"inputs on the {stash}, late {'+'.join(late) or 'none'}"] = names
    finally:
        bench.close()
    return {
        "is_equal": not unequal,
        "unequal": unequal,
        "num_ways": len(WAYS),
        "num_tensors": len(resident[1]),
        "loss": resident[0],
        "loads_of_visits": ratio,
        "hidden": size.hidden,
        "tokens_per_step": size.seq_len * size.num_micro_batches,
        "dtype": bench.dtype_name,
        "path": bench.path,
    }


class Bench:
    """A model on an engine whose slots, stash and late lanes can be changed."""

    def __init__(self, size: Size, shape: str, settings: Settings) -> None:
        """Make the model and attach it."""
        config = config_of(shape, size)
        self._batches = batches_of(size.num_micro_batches, size.seq_len, config["vocab_size"])
        self.dtype_name = "float32" if settings.is_rehearsal else "bfloat16"
        device: LateCpu | LateCuda
        if settings.is_rehearsal:
            device = LateCpu()
            device.bytes_per_s = size.link_bytes_per_s
        else:
            device = LateCuda(torch.empty(0, device="cuda").device, is_staged=False)
        self._device = device
        experts: ExpertsImplementation = "eager" if settings.is_rehearsal else "triton"
        self._made = make(
            config,
            dtype=getattr(torch, self.dtype_name),
            codec="native",
            device=torch.device(settings.device),
            adapter=AdapterSpec(
                rank=8,
                targets=ATTENTION,
                experts="num_experts" in config,
                is_in_base_dtype=True,
            ),
            experts_implementation=experts if "num_experts" in config else None,
        )
        layers: LayerKernels = "plain" if settings.is_rehearsal else "fused"
        self.path = f"branches in the base's dtype, {layers} norms, rotations, gates and loss"
        self.path += f", experts by {experts}" if "num_experts" in config else ""
        options = EngineOptions(
            num_slots=NUM_LAYERS,
            num_kept_graphs=0,
            codec="native",
            tier="ram",
            store_dir=None,
            stash="device",
            trained_weights="device",
            head_chunk_tokens=1024,
            layer_kernels=layers,
        )
        self._engine = Engine(
            self._made.model, device=device, options=options, backing=self._made.slab
        )

    def steps(
        self, *, num_slots: int, stash: Stash, late: Collection[Lane]
    ) -> tuple[Found, Timeline]:
        """Run steps on the same batches; return the last one's loss, gradients and times."""
        rebind(self._engine, self._made.slab, num_slots=num_slots, stash=stash)
        self._device.late = late
        model, result = self._made.model, None
        for _ in range(NUM_STEPS):
            model.zero_grad()
            result = self._engine.forward_backward(self._batches, dropout_seed=0)
        assert result is not None
        loss, timeline = result.loss, result.timeline
        return (
            loss,
            {n: p.grad for n, p in model.named_parameters() if p.grad is not None},
        ), timeline

    def close(self) -> None:
        """End the engine."""
        self._engine.close()


def config_of(shape: str, size: Size) -> dict[str, Any]:
    """Return a model of a shape's kind, of few layers and another width."""
    config = fields(shape, num_layers=NUM_LAYERS, vocab_size=512)
    config |= {
        "hidden_size": size.hidden,
        "intermediate_size": 3 * size.hidden,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": min(128, size.hidden // 4),
    }
    if "num_experts" in config:
        config["moe_intermediate_size"] = 3 * size.hidden // 8
        if size.num_experts is not None:
            config |= {"num_experts": size.num_experts, "num_experts_per_tok": 2}
    return config


def differing(found: Found, expected: Found) -> list[str]:
    """Return the names of what is not equal to the bit."""
    names = [] if found[0] == expected[0] else ["loss"]
    if found[1].keys() != expected[1].keys() or not expected[1]:
        return [*names, "other gradients"]
    return names + [n for n, g in expected[1].items() if not torch.equal(found[1][n], g)]
