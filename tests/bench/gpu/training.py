"""Steps of a model of real shape through a smaller card: what `moe30b` and `dense` run."""

import gc
import math
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from typing import Any, Literal

import torch

from offload.engine.experts.autotune import CANDIDATES, fastest, find_experts, try_all
from offload.engine.streams import Device, release_cached
from offload.errors import SluiceError
from offload.plan.facts.facts import AdapterSpec
from offload.plan.machine.machine import Machine, Rate
from offload.plan.plan import Plan
from offload.plan.time.costs import with_measured_experts
from tests.bench.bench_engine import SlowLink
from tests.bench.gpu import models
from tests.bench.gpu.card import Card
from tests.bench.gpu.ceiling import Ceiling, ceiling_of, once_flops
from tests.bench.gpu.journal import Journal
from tests.bench.gpu.parts import (
    Model,
    Part,
    Planned,
    best_optimizer,
    capped,
    layers_within,
    planned,
    workload_of,
)
from tests.bench.gpu.rates import setup_s
from tests.bench.gpu.rig import (
    NUM_STEPS,
    Batches,
    Rig,
    Work,
    batches_of,
    measure,
    measure_resident,
)
from tests.bench.gpu.settings import Settings
from tests.bench.record import quantiles

FAILURES = (SluiceError, torch.OutOfMemoryError, ImportError, MemoryError)
SHARE_OF_LIMIT = 0.6  # of a case's time is planned for; predictions may be wrong
REHEARSED_TOKENS = 64  # break-even of a rehearsal, whose link is slowed down to it
TINY: Mapping[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "num_hidden_layers": 4,
    "vocab_size": 512,
}
TINY_EXPERTS: Mapping[str, Any] = {"moe_intermediate_size": 32, "num_experts": 8}


def model_of(shape: str, adapter: AdapterSpec, *, is_rehearsal: bool) -> Model:
    """Return a model of a shipped shape; in a rehearsal a tiny one of that kind."""
    config = models.fields(shape)
    if is_rehearsal:
        config |= {**TINY, **{k: v for k, v in TINY_EXPERTS.items() if k in config}}
        if "num_experts" in config:
            config["num_experts_per_tok"] = 2
    return Model(
        shape=shape,
        config=config,
        adapter=adapter,
        dtype="float32" if is_rehearsal else "bfloat16",
        optimizer="adamw" if is_rehearsal else best_optimizer(),
    )


_TRIED: dict[tuple[str, str, AdapterSpec, int], Machine] = {}
"""Machines as their ways to multiply experts were tried once, by model and tokens."""


class Session:
    """A model in one form of its weights, on this machine: made once, measured in many parts."""

    def __init__(
        self, model: Model, machine: Machine, codec: str, *, num_layers: int, card: Card
    ) -> None:
        """Make the layers that are run; nothing is on the device yet."""
        self.device = torch.device(machine.device)
        self._model, self._machine, self._card = model, machine, card
        self.num_layers = num_layers
        self._made = models.make(
            model.with_layers(num_layers).config,
            dtype=getattr(torch, model.dtype),
            codec=codec,
            device=self.device,
            adapter=model.adapter,
            experts_implementation=(
                machine.experts_implementation.value if model.has_experts else None
            ),
        )
        self.made = {"init": models.INIT, "init_s": round(self._made.seconds, 2)}
        self.made["init_bytes_per_s"] = self._made.slab.num_bytes / self._made.seconds
        self._rig: Rig | None = None
        self._ceilings: dict[int, Ceiling] = {}
        self._link = SlowLink() if machine.device == "cpu" else None
        if self._link is not None:
            self._link.bytes_per_s = machine.h2d_bytes_per_s.value

    @property
    def shape(self) -> str:
        """The model's name."""
        return self._model.shape

    def planned(self, part: Part) -> Planned:
        """Plan a part for the layers that are here.

        Raises:
            DoesNotFitError: There is no room for it.
        """
        return planned(self._model, capped(self._machine, part), part, num_layers=self.num_layers)

    def run(self, part: Part, *, wants_resident: bool) -> dict[str, Any]:
        """Measure one part; return what its row says.

        Raises:
            DoesNotFitError: The plan has no room for it.
            OutOfMemoryError: The card has not.
        """
        plan_of, rig, batches = self.ready(part)
        found = measure(rig, plan_of.run, batches, self.device, self.work(plan_of))
        found |= plan_of.said | self.made | {"num_trained": rig.num_trained}
        found["ballast_bytes"] = self._card.ballast_bytes
        found["shape"], found["machine"] = self.shape, self._machine.name
        found |= self._against_resident(rig, plan_of.run, batches, found, wanted=wants_resident)
        return found

    def work(self, plan_of: Planned) -> Work:
        """Return what a part's steps are held against; the products are timed once per length."""
        facts, part = plan_of.run.facts, plan_of.part
        if part.seq_len not in self._ceilings:
            dtype = getattr(torch, self._model.dtype)
            found = ceiling_of(facts, part.seq_len, device=self.device, dtype=dtype)
            release_cached(self.device)
            self._ceilings[part.seq_len] = found
        once = once_flops(
            facts,
            self._model.adapter,
            num_tokens=plan_of.run.tokens_per_step,
            seq_len=part.seq_len,
        )
        return Work(ceiling=self._ceilings[part.seq_len], once_flops=once)

    def ready(self, part: Part) -> tuple[Planned, Rig, Batches]:
        """Make the card as large as a part has it, and attach the model as its plan has it.

        Raises:
            DoesNotFitError: The plan has no room for it.
        """
        plan_of = self.planned(part)
        if self._rig is not None:  # no more than two slots while the card changes its size
            self._rig.rebind(num_slots=2, stash="device")
        self._card.lift()
        self.work(plan_of)  # its products have no room on a card whose slots fill it
        release_cached(self.device)
        self._card.cap(part.vram_gib)
        vocab_size = int(self._model.config["vocab_size"])
        batches = batches_of(plan_of.num_micro_batches, part.seq_len, vocab_size)
        return plan_of, self._attached(plan_of.run), batches

    def close(self) -> None:
        """End the engine and let go of the model."""
        if self._rig is not None:
            self._rig.close()
        self._rig = None

    def _attached(self, plan: Plan) -> Rig:
        if self._rig is None:
            device: torch.device | Device = self._link or self.device
            self._rig = Rig(self._made, device, plan=plan, optimizer=self._model.optimizer)
        else:
            stash: Literal["device", "host"] = "host" if plan.request.is_stashed else "device"
            self._rig.rebind(num_slots=plan.num_slots, stash=stash)
        return self._rig

    def _against_resident(
        self, rig: Rig, plan: Plan, batches: Batches, found: Mapping[str, Any], *, wanted: bool
    ) -> dict[str, Any]:
        """Compare with the same kernels and no loads: resident where the card can hold it."""
        step_s, floor_s = found["step_s"]["p50"], found["floor_step_s"]["p50"]
        other = {"resident_share": floor_s / step_s, "resident_is": "the step without its loads"}
        if not wanted:
            return other
        self._card.lift()
        try:
            resident_s = measure_resident(rig, plan, batches)
        except torch.OutOfMemoryError:
            return other | {"resident_is": "the step without its loads: not all layers fit"}
        resident = quantiles(resident_s)
        return {
            "resident_step_s": resident,
            "resident_share": resident["p50"] / step_s,
            "resident_is": "all layers on the card, its memory not capped",
        }


def machine_for(model: Model, settings: Settings, part: Part) -> Machine:
    """Return the rates of this run, experts in the way that is the fastest here."""
    machine = settings.machine(model.dtype)
    if machine.device == "cpu":
        return _slowed(model, machine)
    if not model.has_experts:
        return machine
    key = (model.shape, model.dtype, model.adapter, part.seq_len)
    if key not in _TRIED:
        _TRIED[key] = _with_experts(model, machine, part)
    return _TRIED[key]


def _with_experts(model: Model, machine: Machine, part: Part) -> Machine:
    """Try the ways to multiply experts as the start of a run does."""
    experts = find_experts(models.empty(model.with_layers(1).config, getattr(torch, model.dtype)))
    assert experts is not None
    layer, rank = model.facts.layers[0], model.adapter.rank
    trials = try_all(
        experts,
        candidates=CANDIDATES,
        device=torch.device("cuda"),
        num_tokens=part.seq_len,
        experts_per_token=layer.experts_per_token,
        ranks=dict.fromkeys(("gate_up_proj", "down_proj"), rank) if model.adapter.experts else {},
    )
    best = fastest(trials)
    assert best.seconds is not None
    return with_measured_experts(
        machine,
        model.facts,
        workload_of(model, part),
        implementation=best.implementation,
        seconds=best.seconds,
    )


def _slowed(model: Model, machine: Machine) -> Machine:
    """Return a CPU with a link on which streaming is free from a few micro-batches on."""
    layers = model.facts.layers
    kappa = sum(x.num_parameters for x in layers) / sum(x.num_active_parameters for x in layers)
    rate = Rate(
        value=2 * kappa * machine.gemm_flops_per_s.value / REHEARSED_TOKENS, source="measured"
    )
    return replace(machine, h2d_bytes_per_s=rate, h2d_duplex_bytes_per_s=rate)


def run_parts(
    settings: Settings, journal: Journal, model: Model, parts: Sequence[Part], *, reserve_s: float
) -> None:
    """Measure all parts of one form of the weights that have no row yet.

    Args:
        settings: Of the run.
        journal: Where rows go.
        model: What trains.
        parts: Of one codec, in the order of their worth.
        reserve_s: What is to be left of the case's time.
    """
    left = [part for part in parts if not journal.has(row_name(model, part))]
    if not left:
        return
    machine = machine_for(model, settings, left[0])
    num_bytes = sum(workload_of(model, left[0]).cargo_bytes(x) for x in model.facts.layers)
    num_layers = settings.num_layers or layers_within(
        model,
        machine,
        left,
        limit_s=SHARE_OF_LIMIT * (settings.left_s - reserve_s),
        setup_s=setup_s(journal, num_bytes),
    )
    with Card(machine.device) as card:
        try:
            session = Session(model, machine, left[0].codec, num_layers=num_layers, card=card)
        except FAILURES as error:
            for part in left:
                journal.fail(row_name(model, part), error)
            return
        with closing(session):
            for part in left:
                left_s = math.inf if part is left[0] else settings.left_s - reserve_s
                _run_part(journal, session, part, left_s=left_s)
        del session
        gc.collect()  # engine and model are in cycles, with slots on the card
        release_cached(torch.device(machine.device))


def row_name(model: Model, part: Part) -> str:
    """Return what a part's row is called."""
    return f"{model.shape}-{part.name}"


def _run_part(journal: Journal, session: Session, part: Part, *, left_s: float) -> None:
    """Measure a part, unless there is no time for it."""
    name = f"{session.shape}-{part.name}"
    try:
        needed_s = NUM_STEPS * session.planned(part).run.step_s
        if needed_s < left_s:
            journal.add(name, **session.run(part, wants_resident=part.of_m_star > 1))
    except FAILURES as error:
        journal.fail(name, error)
