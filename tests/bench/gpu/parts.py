"""What a model is trained with in each part of a case, planned from the rates of this run.

M* is the number of micro-batches at which the plan says that streaming starts to be free, by the
slots that such a step leaves room for: more micro-batches keep more inputs, and leave fewer slots.

A fast card on a slow link needs over 100 k tokens for that. Where all layers would take longer than
the case has, fewer are run, with as many fewer slots: the share of layers that stream is kept, and
with it M*. The row says so.
"""

import math
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from importlib.util import find_spec
from typing import Any

from offload.errors import DoesNotFitError
from offload.plan.facts.facts import AdapterSpec, ModelFacts
from offload.plan.facts.workload import LayerCode, Workload
from offload.plan.fit import MemoryNeeds
from offload.plan.machine.machine import GIB, Machine
from offload.plan.memory.memory import total_bytes
from offload.plan.plan import Plan, plan
from offload.plan.refusal import refusal
from offload.plan.request import HEAD_CHUNK_TOKENS, PlanRequest
from offload.plan.search import Candidate
from offload.plan.split import Split
from offload.plan.step import MOST_TOKENS, Drafts, break_even_tokens
from offload.plan.time.costs import price
from tests.bench.gpu.rig import NUM_STEPS
from tests.builders import model_facts

MIN_LAYERS = 6  # with fewer, the first and last visits of a sweep are most of it
DIVISORS = (1, 2, 3, 4, 6, 8)
MAX_TRIES = 12
RESIDENT_TOKENS = 16384  # of a step in which nothing streams, so that there is no M*
ENOUGH_BYTES = 2**42
RAM_SHARE = 0.9
NOMINAL_SHARE = 0.9  # a card of 24 GiB has less for a process


@dataclass(frozen=True, kw_only=True, slots=True)
class Model:
    """A model and what trains of it.

    Attributes:
        shape: Its name among recipes/shapes.
        config: Its fields.
        adapter: What trains.
        dtype: Of its weights as they compute.
        optimizer: What updates the adapter.
        layer_code: What computes norms, rotations and gates.
    """

    shape: str
    config: Mapping[str, Any]
    adapter: AdapterSpec
    dtype: str
    optimizer: str
    layer_code: LayerCode = "auto"

    @property
    def facts(self) -> ModelFacts:
        """Its shapes."""
        return model_facts(self.config)

    @property
    def has_experts(self) -> bool:
        """Whether its layers are mixtures."""
        return any(layer.num_experts for layer in self.facts.layers)

    def with_layers(self, num_layers: int) -> "Model":
        """Return the same model with fewer layers."""
        return replace(self, config={**self.config, "num_hidden_layers": num_layers})


@dataclass(frozen=True, kw_only=True, slots=True)
class Part:
    """One measurement: a form of the weights, a budget, a length, and how many tokens.

    Attributes:
        codec: Form in which layers wait.
        vram_gib: Memory that the card has; None for all of it.
        seq_len: Tokens of a micro-batch.
        of_m_star: Micro-batches, as a multiple of M*; as near as whole ones come.
        num_slots: Where it is not for the plan to say.
    """

    codec: str
    vram_gib: float | None
    seq_len: int
    of_m_star: float
    num_slots: int | None = None

    @property
    def name(self) -> str:
        """What its row is called."""
        form = "plain" if self.codec == "native" else self.codec
        card = "" if self.vram_gib is None else f"{self.vram_gib:g}GiB-"
        return f"{form}-{card}{self.seq_len}-{self.of_m_star:g}"


@dataclass(frozen=True, kw_only=True, slots=True)
class Planned:
    """A part, weighed for the whole model, and planned for the layers that are run.

    Attributes:
        part: What is measured.
        num_micro_batches: Of a step.
        n_star_tokens: Tokens of a step from which streaming is free; 0 where all layers fit.
        whole: The whole model, with as much host memory as it takes.
        run: For the layers that are run here.
    """

    part: Part
    num_micro_batches: int
    n_star_tokens: int
    whole: Candidate
    run: Plan

    @property
    def of_m_star(self) -> float | None:
        """The step's tokens as a multiple of N*; whole micro-batches do not meet it exactly."""
        if not self.n_star_tokens:
            return None
        return self.num_micro_batches * self.part.seq_len / self.n_star_tokens

    @property
    def said(self) -> dict[str, Any]:
        """What a row says of it."""
        whole, run = self.whole, self.run
        num_layers, num_all = run.facts.num_layers, whole.needs.facts.num_layers
        num_slots = whole.residency.num_slots
        note = "all layers fit, nothing streams" if num_slots == num_all else ""
        if num_layers < num_all:
            fewer = f"{num_layers} of {num_all} layers, {run.num_slots} slots for {num_slots}"
            note = ", ".join(filter(None, (fewer, note)))
        return {
            "codec": self.part.codec,
            "budget_gib": self.part.vram_gib,
            "seq_len": self.part.seq_len,
            "of_m_star": self.of_m_star,
            "num_micro_batches": self.num_micro_batches,
            "tokens_per_step": run.tokens_per_step,
            "n_star_tokens": self.n_star_tokens,
            "num_layers": num_layers,
            "of_layers": num_all,
            "num_slots": run.num_slots,
            "is_stashed": run.request.is_stashed,
            "optimizer": run.request.typical.optimizer,
            "rank": run.request.typical.adapter.rank,
            "experts_implementation": run.machine.experts_implementation.value,
            "path": path_of(run),
            "whole_model": {
                "bound_s": whole.bound_s,
                "num_slots": num_slots,
                "device_bytes": total_bytes(whole.needs.device(whole.residency)),
                "host_bytes": total_bytes(whole.needs.host(whole.residency)),
            },
            "note": note,
        }


def path_of(run: Plan) -> str:
    """Say which code path a plan takes: figures of different ones are not compared as one."""
    typical = run.request.typical
    branches = "the base's dtype" if typical.adapter.is_in_base_dtype else "fp32 by peft"
    layers = "fused" if typical.code_on(run.machine.device) == "fused" else "the model's own"
    said = f"branches in {branches}, {layers} norms, rotations, gates and loss"
    if any(layer.num_experts for layer in run.facts.layers):
        said += f", experts by {run.machine.experts_implementation.value}"
    return said


def best_optimizer() -> str:
    """Return what the shipped recipes take, if it is installed."""
    return "adamw_8bit" if find_spec("bitsandbytes") else "adamw"


def planned(model: Model, machine: Machine, part: Part, *, num_layers: int) -> Planned:
    """Plan a part.

    Raises:
        DoesNotFitError: It takes more memory than there is.
    """
    num, whole = weighed(model, machine, part)
    num_all, num_slots = model.facts.num_layers, whole.residency.num_slots
    if num_slots < num_all:
        num_slots = max(2, min(num_layers - 1, round(num_slots * num_layers / num_all)))
    request = replace(whole.request, num_slots=min(num_slots, num_layers))
    return Planned(
        part=part,
        num_micro_batches=num,
        n_star_tokens=_n_star(whole),
        whole=whole,
        run=plan(model.with_layers(num_layers).facts, machine, request),
    )


def weighed(model: Model, machine: Machine, part: Part) -> tuple[int, Candidate]:
    """Return the micro-batches of a part at the slots that these leave, and how it is run.

    Of the numbers tried, the one that comes nearest: slots change with it, and M* with them.

    Raises:
        DoesNotFitError: It takes more device memory than there is.
    """
    machine = replace(machine, ram_bytes=ENOUGH_BYTES, pinned_bytes=ENOUGH_BYTES)
    num, seen = 1, {1: _best(model, machine, part, 1)}

    def wanted(num: int) -> float:
        return part.of_m_star * (_n_star(seen[num]) or RESIDENT_TOKENS) / part.seq_len

    for _ in range(MAX_TRIES):
        aim = wanted(num)
        next_num = max(1, math.ceil(aim) if part.of_m_star >= 1 else round(aim))
        num = next_num if next_num not in seen else (num + next_num) // 2
        if num in seen:
            break
        seen[num] = _best(model, machine, part, num)
    num = min(seen, key=lambda one: abs(math.log(one / wanted(one))))
    return num, seen[num]


def _best(model: Model, machine: Machine, part: Part, num_micro_batches: int) -> Candidate:
    """Return the way with the lower bound of those that fit: inputs on the device, or in RAM."""
    workload, candidates = workload_of(model, part), []
    facts = model.facts
    for is_stashed in (False, True):
        request = PlanRequest(
            typical=workload,
            largest=workload,
            num_micro_batches=num_micro_batches,
            num_slots=part.num_slots,
            num_kept_graphs=0,  # the goals count a recompute of every layer
            vram_budget_bytes=None,
            num_workers=0,
            is_stashed=is_stashed,
            is_on_disk=False,
            num_ranks=1,
            is_slab_shared=False,
        )
        costs = price(facts, machine, workload, is_duplex=is_stashed)
        needs = MemoryNeeds.of(facts, machine, request)
        candidates.append(Candidate.weighed(Split(needs=needs, costs=costs)))
    fitting = [candidate for candidate in candidates if not candidate.shortages]
    if not fitting:
        raise refusal(candidates[-1].needs)
    return min(fitting, key=lambda candidate: candidate.bound_s)


def _n_star(found: Candidate) -> int:
    """Return N* at the slots that a candidate has."""
    needs = found.needs
    drafts = Drafts(
        facts=needs.facts, request=found.request, costs=found.costs, is_staged=needs.is_staged
    )
    tokens = break_even_tokens(drafts, found.residency)
    return MOST_TOKENS if tokens is None else tokens


def worth_running(model: Model, machine: Machine, parts: Sequence[Part]) -> list[Part]:
    """Leave out parts whose steps are those of an earlier one, as where nearly all layers fit."""
    found: dict[tuple[object, ...], Part] = {}
    for part in parts:
        steps: tuple[object, ...] = ("does not fit",)
        with suppress(DoesNotFitError):
            num, best = weighed(model, capped(machine, part), part)
            steps = (num, best.residency.num_slots, best.request.is_stashed)
        found.setdefault((part.codec, part.vram_gib, part.seq_len, *steps), part)
    return list(found.values())


def capped(machine: Machine, part: Part) -> Machine:
    """Return the machine with no more device memory than a part has.

    Raises:
        DoesNotFitError: The card is smaller than that.
    """
    if part.vram_gib is None or machine.device == "cpu":
        return machine
    if machine.vram_bytes < NOMINAL_SHARE * part.vram_gib * GIB:
        raise DoesNotFitError(
            f"{machine.name} has {machine.vram_bytes / GIB:.1f} GiB",
            limit=f"this part is for a card of {part.vram_gib:g} GiB",
            hint="a larger card, or another `--vram`",
        )
    return replace(machine, vram_bytes=min(machine.vram_bytes, int(part.vram_gib * GIB)))


def layers_within(
    model: Model, machine: Machine, parts: Sequence[Part], *, limit_s: float, setup_s: float
) -> int:
    """Return how many layers fit the time and the RAM with all parts; at least `MIN_LAYERS`.

    Args:
        model: All of it.
        machine: Its rates.
        parts: What is to be run; those that do not fit the card take no time.
        limit_s: For all of it.
        setup_s: What it takes to make all layers and to lock their memory.
    """
    num_all, total_s, host_bytes = model.facts.num_layers, setup_s, 0
    for part in parts:
        with suppress(DoesNotFitError):
            _, found = weighed(model, capped(machine, part), part)
            total_s += NUM_STEPS * found.bound_s
            host_bytes = max(host_bytes, total_bytes(found.needs.host(found.residency)))
    most = max(total_s / max(1.0, limit_s), host_bytes / (RAM_SHARE * machine.ram_bytes))
    fitting = (num_all // divisor for divisor in DIVISORS if most <= divisor)
    return max(min(MIN_LAYERS, num_all), next(fitting, 0))


def workload_of(model: Model, part: Part) -> Workload:
    """Return one micro-batch: a sequence whose tokens all have a label but the first."""
    return Workload(
        micro_batch_size=1,
        seq_len=part.seq_len,
        label_tokens=part.seq_len - 1,
        head_chunk_tokens=HEAD_CHUNK_TOKENS,
        adapter=model.adapter,
        optimizer=model.optimizer,
        dtype_bytes=2 if model.dtype == "bfloat16" else 4,
        codec=part.codec,
        layer_code=model.layer_code,
    )
