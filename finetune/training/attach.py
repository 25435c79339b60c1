"""A run's model on its engine: loaded, attached, timed, and begun or restored."""

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

import torch

from finetune.adapter.lora import add_noise, base_eos
from finetune.data.chat_template import Stops
from finetune.errors import TrialDoesNotFitError
from finetune.report.choice import choice_json, inventory_table
from finetune.report.format import shown_graphs
from finetune.report.plan import plan_json
from finetune.report.rows import as_text
from finetune.training.checkpoints import begin
from finetune.training.compile import FAILURES, refusal
from finetune.training.layer_kernels import shown_fused
from finetune.training.load import load_base
from finetune.training.loop import Loop, StepEngine, gc_frozen, rehearsed
from finetune.training.packing import shown_layers
from finetune.training.prepare import Data, Planned, Prepared
from finetune.training.ranks import with_others
from finetune.training.run import Run
from finetune.training.session import (
    Adapted,
    Kind,
    Session,
    kind_of,
    objectives_of,
    take_references,
)
from finetune.training.trace_memory import trace_memory
from offload.engine.engine import Engine
from offload.engine.memory_meter import reset_peak
from offload.plan.facts.linears import Linear
from offload.plan.machine.machine import GIB
from offload.plan.plan import Plan, calibrate, costs_of, with_costs
from offload.plan.schedule.schedule import MIN_SLOTS
from offload.probe.load import Watch, shown_load
from offload.probe.machine import installed_version
from offload.probe.versions import untested

if TYPE_CHECKING:
    from peft import PeftModel
    from transformers import PreTrainedModel

BASE = ".base_layer"  # of the linear layer in peft's, where peft computes it


@contextmanager
def on_engine(
    prepared: Sequence[Prepared], shared: Planned
) -> Iterator[tuple[list[Session], Plan]]:
    """Load the model, attach it, time it, and begin or restore the runs on it, in this context.

    Args:
        prepared: The runs that share the model.
        shared: The plan by which their steps are run together.

    Raises:
        SluiceError: The model cannot be loaded, or a step does not fit.
    """
    runs, plan = [one.run for one in prepared], shared.choice.plan
    first, ranks = runs[0], runs[0].ranks
    # of several runs some may have a probe; that kind trains the others as adapters too
    kind = kind_of(next((r.recipe for r in runs if r.recipe.train.takes_features), first.recipe))
    add_images, write_images = _with_features([one.data for one in prepared], first, plan)
    loaded = load_base(first, plan)
    add_images(loaded.model)
    model = kind.load(loaded, runs)
    if first.recipe.train.neftune_alpha is not None:
        add_noise(loaded.model, alpha=first.recipe.train.neftune_alpha)
    model.train()
    adapted = Adapted(model=model, backing=loaded.backing)
    warning = untested(installed_version("transformers"))
    notes = [*filter(None, [warning]), *loaded.notes, *kind.notes(model, first.recipe)]
    if not plan.request.is_sharded:
        plan, traced = trace_memory(
            adapted.streamed,
            plan,
            open_requests=shared.open_requests,
            device=first.device,
            ranks=ranks,
        )
        first.screen.detail(traced)
    engine = kind.engine(first, plan, adapted)
    del loaded, adapted  # of a sharded model nothing else may hold the memory it was loaded to
    with closing(engine), gc_frozen():
        sessions = [_attached(one, plan, model, engine, kind) for one in prepared]
        for note in notes:
            first.screen.note(note)
        if isinstance(engine, Engine):
            for note in engine.notes:
                first.screen.note(note)
            for note in shown_fused(engine.fused, fuses_loss=engine.fuses_loss):
                first.screen.detail(note)
            first.screen.detail(as_text(inventory_table(engine.weights)))
        for session in sessions:
            session.run.screen.note(session.stops.shown(session.tokenizer))
        plan = with_others(plan, ranks)  # as traced
        priced, plan = plan_json(plan), with_others(calibrated(sessions, plan), ranks)
        for session in sessions:
            plan = kind.timed(session, plan)
        choice = choice_json(shared.choice)
        for session in sessions:
            begin(session, plan, priced=priced, choice=choice)
        write_images(runs)
        yield sessions, plan


def _with_features(
    rows: Sequence[Data], first: Run, plan: Plan
) -> "tuple[Callable[[PreTrainedModel], None], Callable[[Sequence[Run]], None]]":
    """Compute features of the images of rows.

    Returns:
        What puts them into a model's front, and what writes their figures into runs once begun.
    """
    if all(one.images is None for one in rows):
        return lambda _model: None, lambda _runs: None
    from finetune.training.images import put_in_front, take, write_figures

    return partial(put_in_front, rows), partial(write_figures, take(rows, first, plan))


def _attached(
    prepared: Prepared,
    plan: Plan,
    model: "PeftModel | PreTrainedModel",
    engine: StepEngine,
    kind: Kind,
) -> Session:
    """Return a run on the engine of its model, with a fresh optimizer."""
    run, rows = prepared.run, prepared.data.rows
    recipe = run.recipe
    steps = replace(prepared.planned.steps, is_masked=plan.request.is_masked)
    objectives = objectives_of(run)
    session = Session(
        run=run,
        kind=kind,
        tokenizer=prepared.data.tokenizer,
        rows=rows,
        steps=steps,
        model=model,
        engine=engine,
        loop=Loop(
            model=model,
            engine=engine,
            update=kind.update(run, model, engine),
            train=recipe.train,
            num_steps=steps.num,
            ranks=run.ranks,
            objective_of=None if objectives is None else objectives.of_step,
            adapter=run.adapter,
            scaling=kind.scaling(recipe),
        ),
        stops=Stops(
            trained=rows.train.answer_ends,
            base=base_eos(model),
            template_kwargs=rows.prompted.template_kwargs,
        ),
        images=prepared.data.images,
        held_out=prepared.data.held_out(steps),
        objectives=objectives,
    )
    take_references(session)
    return session


def calibrated(sessions: Sequence[Session], plan: Plan) -> Plan:
    """Return the plan at the prices of typical steps, timed once the longest has fitted.

    Args:
        sessions: Runs that share an engine.
        plan: The plan of the steps that they share.

    Raises:
        TrialDoesNotFitError: The longest does not fit.
        ConfigError: The layers cannot be compiled.
    """
    run, engine = sessions[0].run, sessions[0].engine
    doing = "Compiling the layers, trying" if run.recipe.train.compile else "Trying"
    run.screen.note(f"{doing} the longest batch, then timing typical steps ...")
    reset_peak(run.device)
    watch = Watch()
    rehearsals = {
        one.run.dir.path.name: one.loop.rehearsal(one.steps.longest(), one.steps.typical())
        for one in sessions
    }
    try:
        records = rehearsed(engine, rehearsals)
    except torch.OutOfMemoryError as error:
        raise too_large(plan, error) from error
    except FAILURES as error:
        raise refusal(error) from error
    # other ranks, and compilers, are no other programs
    others_frac = None if run.recipe.train.compile or run.ranks.num > 1 else watch.others_frac()
    if others_frac is not None and plan.machine.others_frac is None:
        run.screen.note(shown_load("Steps were timed", others_frac))
    if isinstance(engine, Engine):
        plan = _as_inspected(sessions, engine, plan)
    costs = calibrate(
        plan.costs,
        records[0].timeline,
        optimizer_s=sum(record.optimizer_s for record in records),
        saved=plan.saved,
    )
    return with_costs(plan, costs)


def _as_inspected(sessions: Sequence[Session], engine: Engine, plan: Plan) -> Plan:
    """Say what the first steps have shown of the layers, and return the plan priced by it."""
    run = sessions[0].run
    if any(one.steps.sizes.packing is not None for one in sessions):
        num_together, num_joined = len(engine.rows_together), len(engine.rows_joined)
        num_layers = len(engine.layer_bytes)
        run.screen.detail(
            shown_layers(num_together=num_together, num_joined=num_joined, num_layers=num_layers)
        )
    with sessions[0].loop.using():
        unread = engine.unread
    plan, note = with_unread(plan, unread)
    if note:
        run.screen.note(note)
    return plan


def with_unread(plan: Plan, found: Sequence[Collection[str]]) -> tuple[Plan, str]:
    """Return the plan priced by what recomputes really leave out, and a note if that differs.

    Args:
        plan: The plan as it was priced.
        found: By layer, the names of the linears whose products are left out.
    """
    typical, layers = plan.request.typical, plan.facts.layers
    names = [{name.removesuffix(BASE).rpartition(".")[2] for name in one} for one in found]
    counted_on = [set(map(_module_name, typical.left_out(layer))) for layer in layers]
    if names == counted_on:
        return plan, ""
    as_found = tuple(
        replace(
            layer,
            linears=tuple(
                replace(linear, is_unread=_module_name(linear) in left_out)
                for linear in layer.linears
            ),
        )
        for layer, left_out in zip(layers, names, strict=True)
    )
    facts = replace(plan.facts, layers=as_found)
    costs = costs_of(facts, plan.machine, plan.request).given(plan.residency)
    priced = replace(plan, facts=facts, costs=costs)
    return priced, (
        f"Recomputes leave out {sum(map(len, names))} products, and the plan counted on"
        f" {sum(map(len, counted_on))}: priced again"
    )


def _module_name(linear: Linear) -> str | None:
    """Return the last part of the name of the module that computes a product to the end."""
    if linear.group == "experts" and not linear.is_module:
        return "experts" if linear.is_down else None
    return linear.name if linear.is_module else None


def too_large(plan: Plan, error: torch.OutOfMemoryError) -> TrialDoesNotFitError:
    """Return the error for a rehearsal that ran out of memory, with the settings to change."""
    num_slots, num_graphs = plan.num_slots, plan.num_kept_graphs
    fix = f"offload.num_slots: {num_slots - 1}" if num_slots > MIN_SLOTS else "train.seq_len"
    if plan.residency.has_outputs:
        fix = "offload.attention_outputs: none"
    if plan.residency.num_sent_graphs:
        fix = "offload.sent_graphs: none"
    if num_graphs:
        fix = "offload.kept_graphs: 0"
    return TrialDoesNotFitError(
        f"the longest batch ran out of device memory with {num_slots} slots"
        + (f" and {shown_graphs(num_graphs)}" if num_graphs else "")
        + f": {str(error).splitlines()[0]}",
        limit=f"the plan had counted on {plan.peak_bytes / GIB:.2f} GiB",
        hint=f"`{fix}`, or close what else uses the card",
    )
