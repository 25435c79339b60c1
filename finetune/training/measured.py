"""What was measured, written at each checkpoint: one step's ops, and the memory by term."""

import platform
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from finetune.files.atomic import write_atomically
from finetune.files.manifest import sealed_json
from finetune.report.prediction import SEAL, with_timeline
from finetune.training.loop import StepRecord
from finetune.training.run import Run
from finetune.training.session import MeasuredTerm, Session
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
from offload.plan.plan import Plan, calibrate, with_costs
from offload.probe.energy import LEAST_WINDOW_S, Counters, Meter, Taken, by_part, find_counters
from offload.probe.machine import device_name, installed_version

if TYPE_CHECKING:
    from finetune.training.session import Session

MEASURED = "measured.json"
PACKAGES = {
    "sluice": "sluice-finetune",
    **{name: name for name in ("torch", "transformers", "peft", "bitsandbytes")},
}


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
        num_tokens: Tokens of the step, of all ranks.
    """
    joules, window_s = by_part(taken), taken[0].window_s
    if not joules:
        return {}
    row: dict[str, Any] = {"energy_j": joules, "energy_window_s": window_s}
    if window_s >= LEAST_WINDOW_S:  # the counters are too coarse for less
        row["energy_per_token_j"] = sum(joules.values()) / num_tokens
    return row


def write_measured(
    session: Session,
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
        plan: The plan that it is compared with.
        record: The result of the step.
        step: The number of the step, counted from 1.
        seal: The seal of the file that the plan was written to.
        taken: Energy of the step, by each rank.
    """
    device = session.run.device
    costs = calibrate(
        plan.costs,
        record.timeline,
        optimizer_s=record.optimizer_s,
        saved=plan.saved,
    )
    content = {
        "step": step,
        SEAL: seal,
        "step_s": record.step_s,
        "optimizer_s": record.optimizer_s,
        "bound_s": with_costs(plan, costs).bound_s,
        "device": device.type,
        "device_name": device_name(device.type),
        "peak_bytes": peak_bytes(device),
        "peak_reserved_bytes": peak_reserved_bytes(device),
        "peak_host_bytes": peak_host_bytes(),
        "memory": [asdict(term) for term in session.kind.memory(session)],
        "versions": {
            name: installed_version(package) or "not installed"
            for name, package in PACKAGES.items()
        },
        "energy_missing": {part: why for one in taken for part, why in one.missing.items()},
    }
    text = sealed_json(with_timeline(content, record.timeline))
    write_atomically(session.run.dir.path / MEASURED, text)


def streamed_memory(engine: Engine) -> tuple[list[MeasuredTerm], list[torch.nn.Parameter]]:
    """Return the engine's memory, and the parameters on the device that are not in it."""
    arenas = engine.arenas
    spans = [(b.data_ptr(), b.data_ptr() + b.nbytes) for arena in arenas for b in arena.blocks]
    alone = [
        parameter
        for parameter in engine.resident_parameters.values()
        if not any(start <= parameter.data_ptr() < end for start, end in spans)
    ]
    return [_arena_term(arena) for arena in arenas if arena.num_bytes], alone


def tensor_terms(
    named: Mapping[str, Iterable[torch.Tensor]], *, on_host: Collection[str] = ()
) -> list[MeasuredTerm]:
    """Return the memory of tensors, those that share memory once; names without any are left out.

    On a CPU, what computes there is host memory too.
    """
    sizes = {
        name: sum({tensor.data_ptr(): tensor.nbytes for tensor in tensors}.values())
        for name, tensors in named.items()
    }
    return [
        MeasuredTerm(name=name, num_bytes=size, how="tensors", is_on_host=name in on_host)
        for name, size in sizes.items()
        if size
    ]


def _arena_term(arena: Arena) -> MeasuredTerm:
    resident_bytes = arena.resident_bytes
    is_known = arena.is_on_host and resident_bytes is not None
    return MeasuredTerm(
        name=arena.name,
        num_bytes=arena.num_bytes if resident_bytes is None else resident_bytes,
        how="resident pages" if is_known else "allocated",
        is_on_host=arena.is_on_host,
    )
