"""A run's model on its engine: loaded, adapted, attached, and timed before its first step."""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import torch

from finetune.adapter.linear_lora import computed_by_peft, is_trained_whole
from finetune.adapter.lora import (
    ALONE,
    NewAdapter,
    add_loras,
    add_noise,
    base_eos,
    load_into,
    trained,
)
from finetune.adapter.virtual_tokens import add_prefix, add_virtual_tokens
from finetune.data.chat_template import Stops
from finetune.data.dataset import Rows
from finetune.data.steps import Steps
from finetune.errors import FinetuneError, TrialDoesNotFitError
from finetune.full.weights import choose_weights
from finetune.model.download import download_weights
from finetune.model.load import Loaded, load_model, set_router_loss
from finetune.model.store import weights_digest
from finetune.objective.features import PassThrough
from finetune.recipe.recipe import Recipe
from finetune.report.format import shown_graphs
from finetune.run.checkpoint import LossScale
from finetune.run.references import References, read_references
from finetune.training.compile import FAILURES, compile_layers, refusal
from finetune.training.full.update import FullUpdate
from finetune.training.loop import Loop, StepEngine, StepRecord
from finetune.training.objectives import Evaluation, Objectives, parts_of
from finetune.training.optimizer import AdapterUpdate, Update
from finetune.training.packing import shown_layers
from finetune.training.preflight import adapter_to_go_on_from
from finetune.training.prepare import Data
from finetune.training.ranks import Ranks
from finetune.training.run import Run
from finetune.training.shared.together import together
from offload.engine.bound import EngineOptions
from offload.engine.engine import Engine
from offload.engine.host.numa import bind_memory, place_near, thread_on
from offload.engine.host.slab import Record, Slab, lay_out
from offload.engine.host.store import Backing
from offload.engine.memory_meter import reset_peak
from offload.engine.model.layers import LayeredModel
from offload.plan.facts.linears import Linear
from offload.plan.facts.trainable import SCORE
from offload.plan.machine.machine import GIB
from offload.plan.plan import Plan, calibrate, costs_of, with_costs
from offload.plan.schedule.schedule import MIN_SLOTS

if TYPE_CHECKING:
    from peft import PeftModel
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from finetune.training.shared.head_alone import HeadAlone


BASE = ".base_layer"  # of the linear layer in peft's, where peft computes it


@dataclass(frozen=True, kw_only=True, slots=True)
class Adapted:
    """A model on the host: with its adapter, or with its own weights to be trained.

    Attributes:
        model: The model.
        backing: Where its layers' weights are; None if each parameter has its own memory.
        notes: What the user should know about it.
    """

    model: "PeftModel | PreTrainedModel"
    backing: Backing | None
    notes: tuple[str, ...]

    @property
    def streamed(self) -> "PeftModel | PreTrainedModel":
        """What an engine runs: with virtual tokens in its rows the model without peft's wrapper."""
        config = getattr(self.model, "active_peft_config", None)
        if config is None or not config.is_prompt_learning:
            return self.model
        return cast("PreTrainedModel", cast("PeftModel", self.model).get_base_model())


FAR_REFERENCE = 0.2
"""Nats per token that a reference of the rows may be from the model before a note says so."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Session:
    """A run whose model is on its engine.

    Attributes:
        run: The run.
        tokenizer: The model's.
        rows: What is trained on and held out.
        steps: Of the run.
        model: With its adapter, if it has one.
        engine: Runs it.
        loop: Its optimizer steps.
        stops: Tokens that end an answer.
        held_out: Steps of the held-out rows, where rows are compared.
        references: Log-probabilities that were taken before step 1; empty if none were.
        head_alone: Its steps, where a head trains alone; None until features are taken.
    """

    run: Run
    tokenizer: "PreTrainedTokenizerBase"
    rows: Rows
    steps: Steps
    model: "PeftModel | PreTrainedModel"
    engine: StepEngine
    loop: Loop
    stops: Stops
    held_out: Steps | None = None
    references: References = field(default_factory=dict)
    head_alone: "HeadAlone | None" = None

    def evaluation(self) -> Evaluation:
        """Return what held-out rows say, shared by the ranks."""
        if self.head_alone is not None:
            return self.head_alone.evaluation()
        with self.run.working("Evaluating", "rows") as progress:
            if self.held_out is not None:
                return self.loop.validation(self.held_out, progress=progress)
            rows = self.rows.held_out
            assert rows is not None, "a rule of recipes"
            loss = self.loop.validation_loss(rows, steps=self.steps, progress=progress)
            return Evaluation(loss=loss, metrics={})

    def with_references(self) -> "Session":
        """Return the session with the reference's log-probabilities, where they are taken first.

        The model has not been trained yet: it is the base, or what `adapter.init_from` names.
        """
        if self.run.recipe.objective.reference != "precomputed":
            return self
        every = {"train": self.steps} | ({"held_out": self.held_out} if self.held_out else {})
        open_ones = {
            name: steps
            for name, steps in every.items()
            if steps.comparison is not None and not len(steps.comparison.groups.references)
        }
        if "train" not in open_ones:
            self._compare_references()
        if not open_ones:
            return self
        found = self.run.ranks.from_main(
            lambda: read_references(self.run.dir.path, rows=self.rows_hash)
        )
        if found is None:
            self.run.screen.note("Taking the reference's log-probabilities of all rows ...")
            found = {name: self.loop.row_logps(_all_of(s)) for name, s in open_ones.items()}
        done = {name: steps.with_references(found[name]) for name, steps in open_ones.items()}
        return replace(
            self,
            steps=done.get("train", self.steps),
            held_out=done.get("held_out", self.held_out),
            references=found,
        )

    def _compare_references(self) -> None:
        """Say how far the rows' own log-probabilities are from the model's, on about a step.

        The model has not been trained yet. Rounding and a codec of the layers make some hundredths
        of a nat for a token; rows of another reference are known by more.
        """
        steps = _all_of(self.steps)
        assert steps.comparison is not None
        rows = list(next(parts_of(steps))[1])
        known = steps.comparison.groups.references[rows]
        apart = np.abs(self.loop.row_logps(steps, max_parts=1)[rows] - known).sum()
        per_token = apart / self.rows.train.loss_tokens[rows].sum()
        end = "."
        if per_token > FAR_REFERENCE:
            end = ": they are of another model or template, or of other tokens."
        self.run.screen.note(
            f"The rows' log-probabilities of the reference are {per_token:.3f} nats per token from"
            " those of the model as the run begins, in"
            f" {len(rows):,} of {len(steps.rows):,} answers{end}"
        )

    @property
    def rows_hash(self) -> str:
        """Digest of the rows that are trained on, and of those that are held out."""
        held_out = self.rows.held_out
        return f"{self.rows.data_hash} {held_out.digest() if held_out else None}"


def calibrated(sessions: Sequence[Session], plan: Plan) -> Plan:
    """Return the plan at the prices of typical steps, timed once the longest has fitted.

    Args:
        sessions: Runs that share an engine.
        plan: Of the steps that they share.

    Raises:
        TrialDoesNotFitError: The longest does not fit.
        ConfigError: The layers cannot be compiled.
    """
    run, engine = sessions[0].run, sessions[0].engine
    doing = "Compiling the layers, trying" if run.recipe.train.compile else "Trying"
    run.screen.note(f"{doing} the longest batch, then timing typical steps ...")
    reset_peak(run.device)
    try:
        records = _rehearsed(sessions)
    except torch.OutOfMemoryError as error:
        raise too_large(plan, error) from error
    except FAILURES as error:
        raise refusal(error) from error
    if isinstance(engine, Engine):
        plan = _as_inspected(sessions, engine, plan)
    costs = calibrate(
        plan.costs,
        records[0].timeline,
        optimizer_s=sum(record.optimizer_s for record in records),
        num_kept_graphs=plan.num_kept_graphs,
        saved=plan.saved,
    )
    return with_costs(plan, costs)


def _as_inspected(sessions: Sequence[Session], engine: Engine, plan: Plan) -> Plan:
    """Say what the first steps have shown of the layers, and return the plan priced by it."""
    run = sessions[0].run
    if any(one.steps.sizes.packing is not None for one in sessions):
        num_together, num_joined = len(engine.rows_together), len(engine.rows_joined)
        num_layers = len(engine.layer_bytes)
        run.screen.note(
            shown_layers(num_together=num_together, num_joined=num_joined, num_layers=num_layers)
        )
    with sessions[0].loop.using():
        unread = engine.unread
    plan, note = with_unread(plan, unread)
    if note:
        run.screen.note(note)
    return plan


def _rehearsed(sessions: Sequence[Session]) -> list[StepRecord]:
    """Rehearse runs together; return the record of each."""
    tasks = [one.loop.rehearsal(one.steps.longest(), one.steps.typical()) for one in sessions]
    records: dict[int, StepRecord] = {}
    for end in together(sessions[0].engine, tasks, ranks=sessions[0].run.ranks):
        if isinstance(end.error, FinetuneError) and len(sessions) > 1:
            raise FinetuneError(
                f"{sessions[end.number].run.dir.path.name}: {end.error.what}",
                limit=end.error.limit,
                hint=f"{end.error.hint}; or leave this run out",
            ) from end.error
        records[end.number] = end.value()
    return [records[number] for number in range(len(sessions))]


def with_unread(plan: Plan, found: Sequence[Collection[str]]) -> tuple[Plan, str]:
    """Return the plan priced by what recomputes really leave out, and a note if that differs.

    Args:
        plan: As it was priced.
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


def load_adapted(runs: Sequence[Run], plan: Plan) -> Adapted:
    """Load the model to where its weights wait, and add adapters, or let its weights train.

    Args:
        runs: Those that share it, each with an adapter of its own.
        plan: Of their steps.
    """
    run = runs[0]
    recipe, ranks = run.recipe, run.ranks
    if recipe.model.init == "pretrained" and recipe.model.path is not None:
        with ranks.first_here_first():
            download_weights(recipe.model.path, working=run.working, note=run.screen.note)
    if ranks.num_machines > 1:
        codec = plan.request.typical.codec
        digest = ranks.from_first_here(
            lambda: weights_digest(recipe.model, codec, on_file=ranks.mark)
        )
        ranks.require_same("files of the base model", lambda: digest)
    place = place_near(run.device)
    # memory that cannot be bound to a NUMA node is allocated near the thread that fills it
    with thread_on(place.cpus), run.working("Loading weights", "bytes") as on_put:
        loaded = load_model(
            recipe.model,
            codec=plan.request.typical.codec,
            device=run.device.type,
            seed=recipe.train.seed,
            tier=recipe.offload.load_tier,
            experts_implementation=plan.experts_implementation,
            make_slab=_shared_slab(ranks, run.device, place.node),
            on_put=on_put,
            on_wait=ranks.mark,
        )
    set_router_loss(loaded.model, recipe.train.router_loss_coef)
    shared = None
    is_tied = plan.facts.tie_word_embeddings  # each rank has a head's weight by itself
    if plan.request.typical.embeddings == "host" and ranks.num > 1 and not is_tied:
        make_slab = _shared_slab(ranks, run.device, place.node)
        shared = _shared_embedding(loaded.model, make_slab)
    ranks.exchange(None)  # from here on the slab is filled
    if shared is not None:
        shared.close()  # all ranks have mapped it
    model: PeftModel | PreTrainedModel = loaded.model
    if not recipe.train.is_full:
        model = _with_adapters(loaded, runs)
    else:
        choose_weights(loaded.model, recipe.train.what)
    if recipe.train.neftune_alpha is not None:
        add_noise(loaded.model, alpha=recipe.train.neftune_alpha)
    model.train()
    notes = (*loaded.notes, *_precision_notes(model, recipe))
    return Adapted(model=model, backing=loaded.backing, notes=notes)


def _with_adapters(loaded: Loaded, runs: Sequence[Run]) -> "PeftModel":
    """Return the model with the adapter of each run, new or as an earlier run has left it."""
    section = runs[0].recipe.adapter
    if section.is_virtual:  # by a rule of recipes that share a stream there is one run
        add = add_prefix if section.is_prefix else add_virtual_tokens
        return add(loaded.model, section, seed=runs[0].recipe.train.seed)
    new = {
        run.adapter or ALONE: NewAdapter(section=run.recipe.adapter, seed=run.recipe.train.seed)
        for run in runs
    }
    model = add_loras(loaded.model, new, backing=loaded.backing)
    for run in runs:
        if run.recipe.adapter.init_from is not None:
            folder, _ = adapter_to_go_on_from(
                Path(run.recipe.adapter.init_from), model=run.recipe.model.path
            )
            load_into(model, folder, adapter=run.adapter or ALONE)
    return model


def _precision_notes(model: "PeftModel | PreTrainedModel", recipe: Recipe) -> list[str]:
    """Name the kinds of layers whose adapters are computed in another precision than planned."""
    if recipe.train.is_full:
        return []
    adapter = recipe.adapter
    if adapter.compute_dtype == "float32" or (adapter.dora and adapter.dropout):
        return []
    kinds = computed_by_peft(model) if recipe.model.dtype != "float32" else ()
    return [f"adapters of {kind} layers are computed in float32, by peft" for kind in kinds]


def engine_of(run: Run, plan: Plan, adapted: Adapted) -> StepEngine:
    """Put the model on an engine that runs the plan."""
    if run.recipe.train.is_sharded:
        from finetune.training.sharded.engine import ShardedEngine

        if adapted.backing is not None:  # freed with the layers' weights, as they are cut
            adapted.backing.close()
        return ShardedEngine(adapted.model, device=run.device, ranks=run.ranks)
    if run.recipe.train.compile:
        compile_layers(LayeredModel(adapted.model).layers)
    options = EngineOptions.planned(plan)
    return Engine(adapted.streamed, device=run.device, options=options, backing=adapted.backing)


def attached(
    run: Run, plan: Plan, adapted: Adapted, engine: StepEngine, data: Data, steps: Steps
) -> Session:
    """Return a run on the engine of its model, with a fresh optimizer."""
    recipe, model = run.recipe, adapted.model
    steps = replace(steps, is_masked=plan.request.is_masked)
    loop = Loop(
        model=model,
        engine=engine,
        update=_update(run, model, engine),
        train=recipe.train,
        num_steps=steps.num,
        ranks=run.ranks,
        objectives=None
        if recipe.objective.is_sft
        else Objectives(section=recipe.objective, seq_len=recipe.train.seq_len, ranks=run.ranks),
        adapter=run.adapter,
        scaling=LossScale()
        if recipe.model.dtype == "float16" and not recipe.train.is_head_alone
        else None,
        head=PassThrough(getattr(cast("PeftModel", model).get_base_model(), SCORE))
        if recipe.train.takes_features
        else None,
    )
    session = Session(
        run=run,
        tokenizer=data.tokenizer,
        rows=data.rows,
        steps=steps,
        model=model,
        engine=engine,
        loop=loop,
        stops=Stops(
            trained=data.rows.train.answer_ends,
            base=base_eos(model),
            template_kwargs=data.rows.prompted.template_kwargs,
        ),
        held_out=data.held_out(steps),
    )
    return session.with_references()


def _all_of(steps: Steps) -> Steps:
    """Return steps all of which are this rank's."""
    assert steps.comparison is not None
    return steps.held_out(steps.rows, steps.comparison)


def _update(run: Run, model: "PeftModel | PreTrainedModel", engine: StepEngine) -> Update:
    """Return the update of what trains, with a fresh optimizer."""
    recipe = run.recipe
    if not isinstance(engine, Engine):
        from finetune.training.sharded.update import ShardedFullUpdate, ShardedUpdate

        if recipe.train.is_full:
            dtype: torch.dtype = getattr(torch, recipe.model.dtype)
            return ShardedFullUpdate(
                {n: p for n, p in model.named_parameters() if p.requires_grad},
                train=recipe.train,
                dtype=dtype,
                ranks=run.ranks,
            )
        return ShardedUpdate(
            trained(model, run.adapter),
            train=recipe.train,
            loraplus_ratio=recipe.adapter.loraplus_ratio,
            ranks=run.ranks,
        )
    if recipe.train.is_full:
        return FullUpdate(engine, train=recipe.train)
    tensors, own_layers = trained(model, run.adapter), engine.own_layers
    is_rounded = recipe.adapter.dtype == "bfloat16"
    layers: list[set[str]] = [set() for _ in engine.layer_bytes]
    for name, tensor in tensors.items():
        if id(tensor) in own_layers:
            layers[own_layers[id(tensor)]].add(name)
    return AdapterUpdate(
        tensors,
        train=recipe.train,
        loraplus_ratio=recipe.adapter.loraplus_ratio,
        ranks=run.ranks,
        are_cards_alike=run.are_cards_alike,
        layers=layers,
        rounded={name for name in tensors if is_rounded and not is_trained_whole(name)},
    )


def _shared_slab(
    ranks: Ranks, device: torch.device, node: int | None
) -> Callable[[Sequence[Record]], Slab]:
    """Return what makes a rank's slab: the first of a machine fills one, the others map it.

    CUDA does not page-lock read-only mappings, so for a GPU the mapping is writable.
    """

    def near_device(address: int, num_bytes: int) -> str:
        return bind_memory(address, num_bytes, node)

    def make(records: Sequence[Record]) -> Slab:
        own = Slab(records, before_touch=near_device) if ranks.is_first_here else None
        handle = ranks.from_first_here(lambda: own.handle if own and not own.reason else None)
        if own is not None:
            return own
        if handle is None:  # there is no memfd in this container: each rank has its own slab
            return Slab(records, before_touch=near_device)
        return Slab.open(handle, records, is_writable=device.type == "cuda")

    return make


def _shared_embedding(
    model: "PreTrainedModel", make_slab: Callable[[Sequence[Record]], Slab]
) -> Slab:
    """Move the input embedding's weight to memory that the ranks of a machine share."""
    embedding: Any = model.get_input_embeddings()
    slab = make_slab([lay_out([embedding.weight])])
    slab.take(0)
    return slab


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
