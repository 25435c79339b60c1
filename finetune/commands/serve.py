"""What `serve` does: plan a base for several clients, and serve it to them."""

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from finetune.files.atomic import expanded
from finetune.model.config import fetch_model
from finetune.planning.request import find_machine
from finetune.planning.subject import subject_of
from finetune.report.rows import as_text
from finetune.report.screen import Working
from finetune.scoring.scorer import base_to_score, machine_here
from finetune.serve.planned import Capacity, ServePlan, plan_serving, serve_parts

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rich.console import RenderableType

Note = Callable[[str], None]


def planned(
    model: str,
    overrides: "Sequence[str]",
    capacity: Capacity,
    *,
    machine: str | None,
    ram_gib: float | None,
    note: Note,
    working: Working,
) -> tuple[ServePlan, bool]:
    """Return the plan, and whether it is for this machine.

    Args:
        model: A recipe or a model.
        overrides: Settings over the recipe's.
        capacity: The most that is served.
        machine: A card by name, or a file of a machine that was measured; None measures this one.
        ram_gib: Host memory of a card by name.
        note: Reports what takes time.
        working: Shows the progress of a download.

    Raises:
        DoesNotFitError: It does not fit.
    """
    file = None if machine is None else expanded(machine)
    if machine is not None and file is not None and not file.is_file():
        subject = subject_of(model, overrides)
        ram_bytes = None if ram_gib is None else int(ram_gib * 2**30)
        found = find_machine(machine, dtype=subject.recipe.model.dtype, ram_bytes=ram_bytes)
        return plan_serving(subject, found, capacity), False
    subject = base_to_score(model, overrides)
    for one in subject.notes:
        note(one)
    fetch_model(subject.recipe.model, working=working, note=note)
    if file is None:
        note("Measuring this machine ...")
    return plan_serving(subject, machine_here(subject, file), capacity), True


def shown(plan: ServePlan) -> "RenderableType":
    """Return what is printed before a base is served."""
    return as_text(serve_parts(plan))


def serve_planned(
    plan: ServePlan, *, names: "Sequence[str]", port: int, folder: Path, note: Note
) -> None:
    """Serve what was planned until Ctrl-C.

    Args:
        plan: For this machine.
        names: Names that clients call the base by; without any, its name here.
        port: Port to listen at.
        folder: Folder of the key and the checkpoints.
        note: Reports the address, and what becomes of clients.

    Raises:
        CheckpointError: Another server has the folder.
    """
    from finetune.run.run_lock import locked
    from finetune.serve.base import opened
    from finetune.serve.checkpoints import Checkpoints
    from finetune.serve.limits import Limits
    from finetune.serve.server import KEY_FILE, key_in, serve
    from finetune.serve.sessions import Sessions

    capacity = plan.capacity
    limits = Limits(
        num_clients=capacity.num_clients,
        num_samplers=capacity.num_samplers,
        max_rank=capacity.max_rank,
        row_tokens=capacity.row_tokens,
        pass_tokens=plan.pass_tokens,
    )
    with locked(folder) as unlocked:
        key, checkpoints = key_in(folder), Checkpoints(folder / "checkpoints")
        for one in (*unlocked, *checkpoints.problems):
            note(one)
        note("Loading the base ...")
        with opened(plan, names=names or [plan.subject.name]) as base:

            def announce(address: str) -> None:
                note(
                    f"Serving {base.name}; Ctrl-C saves all clients and ends. For each of them:\n"
                    f"  export TINKER_BASE_URL={address} TINKER_API_KEY=$(cat {folder / KEY_FILE})"
                )

            sessions = Sessions(base, checkpoints, limits, note=note)
            serve(sessions, key=key, port=port, folder=folder, announce=announce)
