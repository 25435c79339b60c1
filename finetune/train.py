"""The main path: run directory, data and plan, model on its engine, steps, adapter and report.

One run, or several that share one stream of their base. All ranks run it together; only the main
rank writes files and samples from the model.
"""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path

from finetune import interrupts
from finetune.env import launch_notes
from finetune.errors import ApartError
from finetune.planning.ranks import (
    require_micro_batch_per_rank,
    require_ranks_for,
    require_shares,
)
from finetune.planning.request import facts_of
from finetune.recipe.recipe import Recipe, with_layer_kernels, with_packing
from finetune.report.choice import choice_json, choice_tables, inventory_table
from finetune.report.plan import plan_json, plan_tables, ranks_table
from finetune.report.prediction import require_unchanged
from finetune.report.screen import Screen
from finetune.report.summary import plan_summary
from finetune.run.run_dir import RunDir, as_begun
from finetune.run.run_lock import locked
from finetune.training import preflight
from finetune.training.layer_kernels import settled_layer_kernels, shown_fused
from finetune.training.loop import StepEngine, gc_frozen
from finetune.training.packing import settled_packing
from finetune.training.prepare import (
    Data,
    Planned,
    load_data,
    measured_everywhere,
    plan_steps,
    with_chosen,
    with_way,
)
from finetune.training.ranks import Ranks
from finetune.training.run import Run
from finetune.training.shared.member import (
    Begun,
    Outcome,
    begin,
    finished,
    look_before,
    outcome_of,
    train,
)
from finetune.training.shared.plan_wave import plan_wave, plan_waves
from finetune.training.shared.probe import probe
from finetune.training.shared.together import Judge, judged_alone, together
from finetune.training.world.other_ranks import with_others
from finetune.training.world.same_settings import require_same_settings
from finetune.training.world.shortage import shortage_named
from offload.engine.engine import Engine
from offload.plan.plan import Plan


@dataclass(frozen=True, kw_only=True, slots=True)
class Start:
    """A run before it is started.

    Attributes:
        recipe: What to do.
        screen: Where to show it.
        is_resume: Continue the run in the recipe's directory.
        may_overwrite: Replace a run that is there.
    """

    recipe: Recipe
    screen: Screen
    is_resume: bool
    may_overwrite: bool


def finetune(
    recipe: Recipe,
    *,
    ranks: Ranks,
    screen: Screen,
    machine_file: Path | None,
    is_resume: bool,
    may_overwrite: bool,
) -> Outcome:
    """Run a recipe from its rows to its adapter.

    Args:
        recipe: What to do.
        ranks: The processes that do it together.
        screen: Where to show it.
        machine_file: A machine that was measured before; None measures this one.
        is_resume: Continue the run in the recipe's directory.
        may_overwrite: Replace a run that is there.

    Raises:
        SluiceError: Anything a user or the machine can cause.
    """
    if ranks.is_restart:
        screen.note("The launcher has started the processes again: the run goes on")
    start = Start(
        recipe=recipe,
        screen=screen,
        is_resume=is_resume or ranks.is_restart,
        may_overwrite=may_overwrite,
    )
    (outcome,) = finetune_together(
        [start], ranks=ranks, screen=screen, machine_file=machine_file, judge=judged_alone
    )
    if outcome.error is not None:
        raise outcome.error
    return outcome


def finetune_together(
    starts: Sequence[Start],
    *,
    ranks: Ranks,
    screen: Screen,
    machine_file: Path | None,
    judge: Judge,
) -> list[Outcome]:
    """Run recipes over one stream of their base, each as if it were alone.

    Args:
        starts: The runs; their recipes agree in what they share.
        ranks: The processes that do it together.
        screen: Where to show what they share.
        machine_file: A machine that was measured before; None measures this one.
        judge: Which runs are to stop after an evaluation.

    Returns:
        How each ended. One that fails between two steps leaves alone.

    Raises:
        SluiceError: Anything that a user or the machine can cause, but for such failures.
    """
    for note in launch_notes():
        screen.note(note)
    with ExitStack() as held:
        runs = _opened_all(starts, ranks, held)
        prepared = _prepared(runs, machine_file)
        screen.show(plan_summary(prepared.shared.choice, starts[0].recipe.report))
        if prepared.shared.choice.plan.others:
            screen.show(ranks_table(prepared.shared.choice.plan))
        screen.detail(plan_tables(prepared.shared.choice.plan))
        screen.detail(choice_tables(prepared.shared.choice))
        with _on_engine(prepared, screen) as (begun, plan, engine):
            for one, request in zip(begun, plan.request.runs, strict=True):
                look_before(one)
                probe(one, plan, request)
            with shortage_named(ranks):
                return _trained(begun, plan, engine, judge)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Prepared:
    """Runs before their model is loaded.

    Attributes:
        runs: With the settings that were chosen.
        data: Of each.
        planned: As each would be run alone.
        shared: As they are run together.
    """

    runs: Sequence[Run]
    data: Sequence[Data]
    planned: Sequence[Planned]
    shared: Planned


def _trained(begun: Sequence[Begun], plan: Plan, engine: StepEngine, judge: Judge) -> list[Outcome]:
    """Run all steps, and finish each run when it leaves; the last ones after their steps.

    While steps run, a signal waits for their checkpoints; afterwards it ends the program at once.
    """
    ended: dict[int, Outcome] = {}
    last: list[int] = []
    with interrupts.collected() as received:
        tasks = [train(one, plan, received) for one in begun]
        for end in together(engine, tasks, ranks=begun[0].session.run.ranks, judge=judge):
            number = end.number
            ended[number] = outcome = outcome_of(begun[number], end)
            if outcome.is_complete and end.num_left:
                ended[number] = finished(begun[number], outcome)
            elif outcome.is_complete:
                last.append(number)
    for number in last:
        ended[number] = finished(begun[number], ended[number])
    return [ended[number] for number in range(len(begun))]


# ---------------------------------------------------------------------------------------------
# Run directory


def _opened_all(starts: Sequence[Start], ranks: Ranks, held: ExitStack) -> list[Run]:
    """Return the runs, their directories locked until the stack is left."""
    runs = []
    for number, start in enumerate(starts, 1):
        run_dir = RunDir(start.recipe.output.run_dir)
        held.enter_context(_held(run_dir, ranks, start.screen))
        adapter = f"run_{number}" if len(starts) > 1 else None
        runs.append(_opened(start, run_dir, ranks, adapter=adapter))
    return runs


def _opened(start: Start, run_dir: RunDir, ranks: Ranks, *, adapter: str | None) -> Run:
    """Return the run, after all checks that need nothing measured or loaded."""
    screen, is_resume = start.screen, start.is_resume
    recipe = start.recipe
    require_same_settings(ranks, {"": recipe}, is_resume=is_resume)
    if is_resume:
        recipe = as_begun(recipe, ranks.from_main(run_dir.begun), num_ranks=ranks.num)
    require_micro_batch_per_rank(recipe.train, num_ranks=ranks.num)
    require_ranks_for(recipe.train, num_ranks=ranks.num)
    require_shares(recipe.train, num_ranks=ranks.num)
    preflight.require_loggers(recipe.report.log_to)
    if ranks.num == 1 and recipe.train.reduce_dtype != "fp32":
        screen.note(
            f"train.reduce_dtype: {recipe.train.reduce_dtype} has no effect: there is one process"
        )
    if recipe.adapter.init_from is not None:
        _, notes = preflight.adapter_to_go_on_from(
            Path(recipe.adapter.init_from), model=recipe.model.path
        )
        for note in notes:
            screen.note(note)
    if ranks.is_main and is_resume:
        _require_resumable(run_dir, recipe, screen)
    elif ranks.is_main:
        run_dir.require_startable(may_overwrite=start.may_overwrite)
    device = preflight.torch_device(recipe.offload, ranks)
    return Run(
        recipe=recipe,
        dir=run_dir,
        ranks=ranks,
        device=device,
        screen=screen,
        is_resumed=is_resume,
        adapter=adapter,
    )


@contextmanager
def _held(run_dir: RunDir, ranks: Ranks, screen: Screen) -> Iterator[None]:
    """Lock the run's directory against other processes; inside this context it is writable."""
    with locked(run_dir.path) if ranks.is_main else nullcontext(()) as notes:
        for note in notes:
            screen.note(note)
        ranks.exchange(None)
        yield


def _require_resumable(run_dir: RunDir, recipe: Recipe, screen: Screen) -> None:
    """Check all that a resume reads, before the machine is measured and the model loaded."""
    run_dir.require_same_recipe(recipe)
    require_unchanged(run_dir.path, run_dir.read_metrics())
    newest = run_dir.checkpoints.newest()
    if newest is None:
        screen.note("There is no checkpoint yet: the run begins with step 1 again")
        return
    note = run_dir.checkpoints.require_whole(newest)
    screen.note(note or f"Continuing from {run_dir.checkpoints.folder(newest)}")


# ---------------------------------------------------------------------------------------------
# Data and plan


def _prepared(runs: Sequence[Run], machine_file: Path | None) -> _Prepared:
    """Measure the machine, read the rows of all runs, and plan their steps."""
    ranks, facts = runs[0].ranks, facts_of(runs[0].recipe.model)
    cards = measured_everywhere(runs[0], facts, machine_file)
    planned: list[Planned] = []
    data: list[Data] = []
    main, own = cards.machines[0], cards.machines[ranks.index]
    for run in _settled([replace(run, recipe=with_way(run, facts, main)) for run in runs]):
        preflight.require_ready(run.recipe, facts, own, num_ranks=ranks.num)
        data.append(load_data(run, facts))
        planned.append(plan_steps(run, facts, data[-1], cards))
        cards = planned[-1].cards  # expert kernels are timed once
    waves = ranks.from_main(lambda: plan_waves(planned))
    if len(waves) > 1:
        raise ApartError(waves)
    shared = plan_wave(planned)
    plan = with_others(shared.choice.plan, ranks)
    shared = replace(shared, choice=replace(shared.choice, plan=plan))
    if ranks.is_main:
        for run in runs:
            preflight.require_room(run.dir.path, plan)
    return _Prepared(
        runs=[
            replace(run, recipe=with_chosen(one.recipe, plan), are_cards_alike=cards.are_alike)
            for run, one in zip(runs, planned, strict=True)
        ],
        data=data,
        planned=planned,
        shared=shared,
    )


def _settled(runs: Sequence[Run]) -> list[Run]:
    """Return runs with what their recipes left open: the layers' kernels, and packing."""
    run = runs[0]
    kernels = run.ranks.from_main(lambda: settled_layer_kernels(run.recipe, run.device, run.screen))
    recipes = [with_layer_kernels(run.recipe, kernels) for run in runs]
    return [
        replace(run, recipe=with_packing(recipe, settled_packing(recipe, run.screen.note)))
        for run, recipe in zip(runs, recipes, strict=True)
    ]


# ---------------------------------------------------------------------------------------------
# Model on its engine


@contextmanager
def _on_engine(
    prepared: _Prepared, screen: Screen
) -> Iterator[tuple[list[Begun], Plan, StepEngine]]:
    """Load the model, attach it, time it, and begin or restore the runs on it."""
    # peft, transformers' model code and torch's compiler take seconds to import: they come last
    from finetune.training.session import attached, calibrated, engine_of, load_adapted
    from finetune.training.shared.head_alone import with_features
    from finetune.training.trace_memory import trace_memory

    runs, shared, ranks = prepared.runs, prepared.shared, prepared.runs[0].ranks
    adapted = load_adapted(runs, shared.choice.plan)
    plan, traced = shared.choice.plan, list[str]()
    if not plan.request.is_sharded:
        plan, note = trace_memory(
            adapted.streamed,
            plan,
            open_requests=shared.open_requests,
            device=runs[0].device,
            ranks=ranks,
        )
        traced.append(note)
    engine = engine_of(runs[0], plan, adapted)
    if plan.request.is_sharded:  # nothing else may hold the memory that the model was loaded to
        adapted = replace(adapted, backing=None)
    with closing(engine), ranks.following(lambda: engine.num_issued), gc_frozen():
        sessions = [
            attached(run, plan, adapted, engine, data, one.steps)
            for run, data, one in zip(runs, prepared.data, prepared.planned, strict=True)
        ]
        for note in (*adapted.notes, *traced):
            screen.note(note)
        if isinstance(engine, Engine):
            for note in (*engine.notes, *shown_fused(engine.fused, fuses_loss=engine.fuses_loss)):
                screen.note(note)
            screen.detail(inventory_table(engine.weights))
        for session in sessions:
            session.run.screen.note(session.stops.shown(session.tokenizer))
        plan = with_others(plan, ranks)  # as traced
        priced, plan = plan_json(plan), with_others(calibrated(sessions, plan), ranks)
        if runs[0].recipe.train.is_head_alone:
            (session,) = sessions  # a rule of recipes
            session, plan = with_features(session, plan)
            sessions = [session]
        choice = choice_json(shared.choice)
        begun = [begin(session, plan, priced=priced, choice=choice) for session in sessions]
        yield begun, plan, engine
