"""A run's model on its engine: loaded, adapted, attached, and timed before its first step."""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from finetune.adapter.linear_lora import computed_by_peft
from finetune.adapter.lora import add_lora, base_eos, load_into, trained
from finetune.adapter.neftune import add_noise
from finetune.data.dataset import Rows
from finetune.data.steps import Steps
from finetune.data.stops import Stops
from finetune.full.chosen_weights import choose_weights
from finetune.full.update import FullUpdate
from finetune.model.load import load_model, set_router_loss
from finetune.recipe.recipe import Recipe
from finetune.report.format import shown_graphs
from finetune.run.references import References, read_references
from finetune.training.compile import FAILURES, compile_layers, refusal
from finetune.training.loop import Loop
from finetune.training.objectives import Evaluation, Objectives
from finetune.training.optimizer import AdapterUpdate, Update
from finetune.training.packing import shown_layers
from finetune.training.preflight import adapter_to_go_on_from
from finetune.training.prepare import Data
from finetune.training.ranks import Ranks
from finetune.training.run import Run
from offload.engine.bound import EngineOptions
from offload.engine.engine import Engine
from offload.engine.host.layer_layout import Record
from offload.engine.host.mempolicy import bind_memory
from offload.engine.host.numa import place_near, thread_on
from offload.engine.host.slab import Slab
from offload.engine.host.store import Backing
from offload.engine.memory_meter import reset_peak
from offload.engine.model.layers import LayeredModel
from offload.errors import DoesNotFitError
from offload.plan.machine.machine import GIB
from offload.plan.plan import Plan, calibrate, costs_of, with_costs
from offload.plan.schedule.schedule import MIN_SLOTS

if TYPE_CHECKING:
    from peft import PeftModel
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


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
    """

    run: Run
    tokenizer: "PreTrainedTokenizerBase"
    rows: Rows
    steps: Steps
    model: "PeftModel | PreTrainedModel"
    engine: Engine
    loop: Loop
    stops: Stops
    held_out: Steps | None = None
    references: References = field(default_factory=dict)

    def evaluation(self) -> Evaluation:
        """Return what held-out rows say, shared by the ranks."""
        if self.held_out is not None:
            return self.loop.validation(self.held_out)
        rows = self.rows.held_out
        assert rows is not None, "a rule of recipes"
        loss = self.loop.validation_loss(rows, pad_token_id=self.steps.pad_token_id)
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

    @property
    def rows_hash(self) -> str:
        """Digest of the rows that are trained on, and of those that are held out."""
        held_out = self.rows.held_out
        return f"{self.rows.data_hash} {held_out.digest() if held_out else None}"

    def calibrated(self, plan: Plan) -> Plan:
        """Return the plan at the prices of typical steps, timed once the longest has fitted.

        Raises:
            DoesNotFitError: The longest does not fit.
            ConfigError: The layers cannot be compiled.
        """
        doing = "Compiling the layers, trying" if self.run.recipe.train.compile else "Trying"
        self.run.screen.note(f"{doing} the longest batch, then timing typical steps ...")
        reset_peak(self.run.device)
        try:
            record = self.loop.rehearse(self.steps.longest(), self.steps.typical())
        except torch.OutOfMemoryError as error:
            raise too_large(plan, error) from error
        except FAILURES as error:
            raise refusal(error) from error
        if self.steps.sizes.packing is not None:
            num_together = len(self.engine.rows_together)
            num_layers = len(self.engine.layer_bytes)
            self.run.screen.note(shown_layers(num_together=num_together, num_layers=num_layers))
        plan, note = with_unread(plan, self.engine.unread)
        if note:
            self.run.screen.note(note)
        costs = calibrate(
            plan.costs,
            record.timeline,
            optimizer_s=record.optimizer_s,
            num_kept_graphs=plan.num_kept_graphs,
            saved=plan.saved,
        )
        return with_costs(plan, costs)


def with_unread(plan: Plan, found: Sequence[Collection[str]]) -> tuple[Plan, str]:
    """Return the plan priced by what recomputes really leave out, and a note if that differs.

    Args:
        plan: As it was priced.
        found: By layer, the names of the linears whose products are left out.
    """
    typical, layers = plan.request.typical, plan.facts.layers
    names = [{name.removesuffix(BASE).rpartition(".")[2] for name in one} for one in found]
    counted_on = [{linear.name for linear in typical.left_out(layer)} for layer in layers]
    if names == counted_on:
        return plan, ""
    as_found = tuple(
        replace(
            layer,
            linears=tuple(
                replace(linear, is_unread=linear.is_module and linear.name in left_out)
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


def load_adapted(run: Run, plan: Plan) -> Adapted:
    """Load the model to where its weights wait, and add the adapter, or let its weights train."""
    recipe = run.recipe
    place = place_near(run.device)
    # memory that cannot be bound to a NUMA node is allocated near the thread that fills it
    with thread_on(place.cpus), run.screen.loading() as on_put:
        loaded = load_model(
            recipe.model,
            codec=plan.request.typical.codec,
            device=run.device.type,
            seed=recipe.train.seed,
            tier=recipe.offload.load_tier,
            experts_implementation=plan.experts_implementation,
            make_slab=_shared_slab(run.ranks, run.device, place.node),
            on_put=on_put,
        )
    set_router_loss(loaded.model, recipe.train.router_loss_coef)
    run.ranks.exchange(None)  # from here on the slab is filled
    model: PeftModel | PreTrainedModel = loaded.model
    if recipe.train.what == "adapter":
        seed = recipe.train.seed
        model = add_lora(loaded.model, recipe.adapter, seed=seed, backing=loaded.backing)
        if recipe.adapter.init_from is not None:
            folder, _ = adapter_to_go_on_from(
                Path(recipe.adapter.init_from), model=recipe.model.path
            )
            load_into(model, folder)
    else:
        choose_weights(loaded.model, recipe.train.what)
    if recipe.train.neftune_alpha is not None:
        add_noise(loaded.model, alpha=recipe.train.neftune_alpha)
    model.train()
    notes = (*loaded.notes, *_precision_notes(model, recipe))
    return Adapted(model=model, backing=loaded.backing, notes=notes)


def _precision_notes(model: "PeftModel | PreTrainedModel", recipe: Recipe) -> list[str]:
    """Name the kinds of layers whose adapters are computed in another precision than planned."""
    if recipe.train.is_full:
        return []
    if recipe.adapter.compute_dtype == "float32" or recipe.adapter.dora:
        return []
    kinds = computed_by_peft(model) if recipe.model.dtype != "float32" else ()
    return [f"adapters of {kind} layers are computed in float32, by peft" for kind in kinds]


def attached(run: Run, plan: Plan, adapted: Adapted, data: Data, steps: Steps) -> Session:
    """Put the model on an engine that runs the plan, with a fresh optimizer."""
    recipe, model = run.recipe, adapted.model
    if recipe.train.compile:
        compile_layers(LayeredModel(model).layers)
    engine = Engine(
        model,
        device=run.device,
        options=EngineOptions.planned(plan),
        backing=adapted.backing,
    )
    loop = Loop(
        model=model,
        engine=engine,
        update=_update(recipe, model, engine, run.ranks),
        train=recipe.train,
        is_masked=plan.request.is_masked,
        num_steps=steps.num,
        ranks=run.ranks,
        objectives=None
        if recipe.objective.is_sft
        else Objectives(section=recipe.objective, seq_len=recipe.train.seq_len, ranks=run.ranks),
    )
    session = Session(
        run=run,
        tokenizer=data.tokenizer,
        rows=data.rows,
        steps=steps,
        model=model,
        engine=engine,
        loop=loop,
        stops=Stops(trained=data.rows.train.answer_ends, base=base_eos(model)),
        held_out=_held_out(steps, data),
    )
    try:
        return session.with_references()
    except BaseException:
        engine.close()
        raise


def _held_out(steps: Steps, data: Data) -> Steps | None:
    """Return steps of the held-out rows, cut as those that are trained on."""
    rows = data.rows.held_out
    if steps.comparison is None or rows is None:
        return None
    return steps.held_out(rows, steps.comparison.of_same_kind(rows))


def _all_of(steps: Steps) -> Steps:
    """Return steps all of which are this rank's."""
    assert steps.comparison is not None
    return steps.held_out(steps.rows, steps.comparison)


def _update(
    recipe: Recipe, model: "PeftModel | PreTrainedModel", engine: Engine, ranks: Ranks
) -> Update:
    """Return the update of what trains, with a fresh optimizer."""
    if recipe.train.is_full:
        return FullUpdate(engine, train=recipe.train)
    return AdapterUpdate(
        trained(model),
        train=recipe.train,
        loraplus_ratio=recipe.adapter.loraplus_ratio,
        ranks=ranks,
    )


def _shared_slab(
    ranks: Ranks, device: torch.device, node: int | None
) -> Callable[[Sequence[Record]], Slab]:
    """Return what makes a rank's slab: the main rank's is filled, and mapped by the others.

    CUDA does not page-lock read-only mappings, so for a GPU the mapping is writable.
    """

    def near_device(address: int, num_bytes: int) -> str:
        return bind_memory(address, num_bytes, node)

    def make(records: Sequence[Record]) -> Slab:
        own = Slab(records, before_touch=near_device) if ranks.is_main else None
        handle = ranks.from_main(lambda: own.handle if own and not own.reason else None)
        if own is not None:
            return own
        if handle is None:  # there is no memfd in this container: each rank has its own slab
            return Slab(records, before_touch=near_device)
        return Slab.open(handle, records, is_writable=device.type == "cuda")

    return make


def too_large(plan: Plan, error: torch.OutOfMemoryError) -> DoesNotFitError:
    """Return the error for a rehearsal that ran out of memory, with the settings to change."""
    num_slots, num_graphs = plan.num_slots, plan.num_kept_graphs
    fix = f"offload.num_slots: {num_slots - 1}" if num_slots > MIN_SLOTS else "train.seq_len"
    if plan.residency.has_outputs:
        fix = "offload.attention_outputs: none"
    if plan.residency.num_sent_graphs:
        fix = "offload.sent_graphs: none"
    if num_graphs:
        fix = "offload.kept_graphs: 0"
    return DoesNotFitError(
        f"the longest batch ran out of device memory with {num_slots} slots"
        + (f" and {shown_graphs(num_graphs)}" if num_graphs else "")
        + f": {str(error).splitlines()[0]}",
        limit=f"the plan had counted on {plan.peak_bytes / GIB:.2f} GiB",
        hint=f"`{fix}`, or close what else uses the card",
    )
