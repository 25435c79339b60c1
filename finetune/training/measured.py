"""What was measured, written at each checkpoint: one step's ops, and the memory by term."""

import platform
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from finetune.files.atomic import write_atomically
from finetune.files.manifest import sealed_json
from finetune.full.optimizer import LOW
from finetune.report.prediction import SEAL, with_timeline
from finetune.training.loop import StepRecord
from finetune.training.run import Run
from offload.engine.engine import Engine
from offload.engine.host.limits import free_host_bytes
from offload.engine.host.numa import bus_id_of
from offload.engine.memory_meter import (
    Arena,
    held_bytes,
    peak_bytes,
    peak_host_bytes,
    peak_reserved_bytes,
)
from offload.plan.facts.optimizer import HOST_STATES, LOW_HALVES
from offload.plan.memory.memory import ADAPTERS, PAGED_STATES, STATES
from offload.plan.plan import Plan, calibrate, with_costs
from offload.plan.sharded import SHARDS
from offload.probe.doctor import installed_version
from offload.probe.energy import LEAST_WINDOW_S, Counters, Meter, Taken, by_part, find_counters

if TYPE_CHECKING:
    from finetune.training.session import Session

MEASURED = "measured.json"
PACKAGES = {
    "sluice": "sluice-finetune",
    **{name: name for name in ("torch", "transformers", "peft", "bitsandbytes")},
}


@dataclass(frozen=True, kw_only=True, slots=True)
class MeasuredTerm:
    """A measured amount of memory, under the plan's name for it.

    Attributes:
        name: The plan's name where it has one.
        num_bytes: Bytes that are held in memory.
        how: How they were measured.
        is_on_host: Whether it is host memory.
    """

    name: str
    num_bytes: int
    how: str
    is_on_host: bool


def memory_in_use(device: torch.device) -> dict[str, int]:
    """Return bytes in use now, of a GPU by all programs and of the host by this process."""
    used = {"ram_held": held_bytes(), "ram_free": free_host_bytes(Path("/"))}
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        used |= {"gpu_used": total - free, "gpu_total": total}
    return used


def open_meter(run: Run) -> Meter:
    """Look for this rank's counters of energy, once; a run that shares its steps has none."""
    if run.adapter is not None:
        why = "its steps are shared with those of other runs"
        return Meter(Counters(found=(), missing={"GPU": why, "CPU": why}))
    return Meter(find_counters(bus_id_of(run.device), host=platform.node()))


def energy_row(taken: Sequence[Taken], *, num_tokens: int) -> dict[str, Any]:
    """Return a step's energy, by the names in metrics.jsonl; nothing where none was counted.

    Args:
        taken: By each rank, since the step before.
        num_tokens: Of the step, of all ranks.
    """
    joules, window_s = by_part(taken), taken[0].window_s
    if not joules:
        return {}
    row: dict[str, Any] = {"energy_j": joules, "energy_window_s": window_s}
    if window_s >= LEAST_WINDOW_S:  # the counters are too coarse for less
        row["energy_per_token_j"] = sum(joules.values()) / num_tokens
    return row


def write_measured(
    session: "Session",
    plan: Plan,
    record: StepRecord,
    *,
    step: int,
    seal: str,
    taken: Sequence[Taken],
) -> None:
    """Write where a step's time went, R3 at its own rates, and the memory of the run so far.

    Args:
        session: The run.
        plan: What it is compared with.
        record: Of the step.
        step: Its number, counted from 1.
        seal: Of the file that the plan was written to.
        taken: Energy of the step, by each rank.
    """
    device = session.run.device
    costs = calibrate(
        plan.costs,
        record.timeline,
        optimizer_s=record.optimizer_s,
        num_kept_graphs=plan.num_kept_graphs,
        saved=plan.saved,
    )
    content = {
        "step": step,
        SEAL: seal,
        "step_s": record.step_s,
        "optimizer_s": record.optimizer_s,
        "bound_s": with_costs(plan, costs).bound_s,
        "device": device.type,
        "peak_bytes": peak_bytes(device),
        "peak_reserved_bytes": peak_reserved_bytes(device),
        "peak_host_bytes": peak_host_bytes(),
        "memory": [asdict(term) for term in memory_terms(session)],
        "versions": {
            name: installed_version(package) or "not installed"
            for name, package in PACKAGES.items()
        },
        "energy_missing": {part: why for one in taken for part, why in one.missing.items()},
    }
    text = sealed_json(with_timeline(content, record.timeline))
    write_atomically(session.run.dir.path / MEASURED, text)


def memory_terms(session: "Session") -> list[MeasuredTerm]:
    """List memory that is held between two steps; temporary memory is only part of the peak."""
    if not isinstance(session.engine, Engine):
        return _sharded_terms(session)
    arenas = session.engine.arenas
    terms = [_arena_term(arena) for arena in arenas if arena.num_bytes]
    in_arenas = [(b.data_ptr(), b.data_ptr() + b.nbytes) for a in arenas for b in a.blocks]
    named = session.engine.resident_parameters
    alone = [
        parameter
        for parameter in named.values()
        if not any(start <= parameter.data_ptr() < end for start, end in in_arenas)
    ]
    frozen = [parameter for parameter in alone if not parameter.requires_grad]
    trained = [*session.loop.weights.items()]
    trained += [(name, p) for name, p in named.items() if p.requires_grad]
    if session.run.recipe.train.is_full:
        return [*terms, *_full_terms(session.loop.weights, alone)]
    states = [
        value
        for state in session.loop.optimizer.state_dict()["state"].values()
        for value in state.values()
        if isinstance(value, torch.Tensor)
    ]
    paged = [value for value in states if hasattr(value, "is_paged")]  # bitsandbytes marks them
    for name, tensors in (
        ("embeddings, norm and head", frozen),
        ("adapters", [p for name, p in trained if "lora_" in name]),
        ("trained modules", [p for name, p in trained if "lora_" not in name]),
        ("optimizer states", [value for value in states if not hasattr(value, "is_paged")]),
        (PAGED_STATES, paged),
    ):
        num_bytes = _tensor_bytes(tensors)
        if num_bytes:  # it is where it computes, which on a CPU is host memory too
            terms.append(
                MeasuredTerm(
                    name=name,
                    num_bytes=num_bytes,
                    how="tensors",
                    is_on_host=name == PAGED_STATES,
                )
            )
    return terms


def _sharded_terms(session: "Session") -> list[MeasuredTerm]:
    """List this rank's parts of the weights and of the optimizer's states."""
    from finetune.training.sharded.update import ShardedUpdate, own_part

    assert isinstance(session.loop.update, ShardedUpdate)
    is_adapter = not session.run.recipe.train.is_full
    named: dict[str, list[torch.Tensor]] = {SHARDS: [], ADAPTERS: []}
    for parameter in session.model.parameters():
        name = ADAPTERS if is_adapter and parameter.requires_grad else SHARDS
        named[name].append(own_part(parameter))
    named[STATES] = session.loop.update.states()
    return [
        MeasuredTerm(name=name, num_bytes=_tensor_bytes(tensors), how="tensors", is_on_host=False)
        for name, tensors in named.items()
        if tensors
    ]


def _full_terms(
    weights: Mapping[str, torch.Tensor], resident: Iterable[torch.Tensor]
) -> Iterator[MeasuredTerm]:
    """Yield memory of the model's own weights that train, and of those around the layers."""
    by_kind: dict[str, list[torch.Tensor]] = {}
    for name, tensor in weights.items():
        by_kind.setdefault(name.partition(":")[2], []).append(tensor)
    lows = by_kind.pop(LOW, [])
    states = [tensor for kind, tensors in by_kind.items() if kind for tensor in tensors]
    for name, tensors in ((LOW_HALVES, lows), (HOST_STATES, states)):
        if tensors:
            num_bytes = _tensor_bytes(tensors)
            yield MeasuredTerm(name=name, num_bytes=num_bytes, how="tensors", is_on_host=True)
    yield MeasuredTerm(
        name="embeddings, norm and head",
        num_bytes=_tensor_bytes(resident),
        how="tensors",
        is_on_host=False,
    )


def _arena_term(arena: Arena) -> MeasuredTerm:
    resident_bytes = arena.resident_bytes
    is_known = arena.is_on_host and resident_bytes is not None
    return MeasuredTerm(
        name=arena.name,
        num_bytes=arena.num_bytes if resident_bytes is None else resident_bytes,
        how="resident pages" if is_known else "allocated",
        is_on_host=arena.is_on_host,
    )


def _tensor_bytes(tensors: Iterable[torch.Tensor]) -> int:
    """Add up tensors, those that share memory once."""
    return sum({tensor.data_ptr(): tensor.nbytes for tensor in tensors}.values())
