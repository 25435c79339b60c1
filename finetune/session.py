"""The model on its engine: built, and rehearsed before its first step."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

import offload
from finetune import adapters
from finetune.compiling import FAILURES, compile_layers, refusal
from finetune.figures import shown_graphs
from finetune.loop import Loop
from finetune.model import load_model, set_router_loss
from finetune.neftune import add_noise
from finetune.prepare import Work
from finetune.ranks import Ranks
from finetune.recipe import Recipe
from finetune.screen import Screen
from finetune.traced import traced_plan
from offload.engine import meter
from offload.engine.engine import Engine
from offload.engine.host.mempolicy import bind_memory
from offload.engine.host.numa import place_near, thread_on
from offload.engine.host.record import Record
from offload.engine.host.side import Tier
from offload.engine.host.slab import Slab
from offload.engine.host.store import Hold
from offload.engine.model.layers import LayeredModel
from offload.errors import DoesNotFitError
from offload.plan.machine import GIB
from offload.plan.plan import Plan, calibrate, with_costs
from offload.plan.schedule import MIN_SLOTS

if TYPE_CHECKING:
    from peft import PeftModel


@dataclass(frozen=True, kw_only=True, slots=True)
class Session:
    """The model on its engine, its loop, the plan, and what the user should be told of both."""

    model: "PeftModel"
    engine: Engine
    loop: Loop
    plan: Plan
    notes: tuple[str, ...]


def build(recipe: Recipe, work: Work, ranks: Ranks, screen: Screen) -> Session:
    """Load the model, add the adapter, and put both on the engine."""
    place = place_near(work.device)
    # where memory cannot be bound, it is near the thread that fills it
    with thread_on(place.cpus), screen.loading() as on_put:
        loaded = load_model(
            path=recipe.model.path,
            config=recipe.model.config,
            init=recipe.model.init,
            dtype=recipe.model.dtype,
            codec=work.plan.request.typical.codec,
            device=work.device.type,
            seed=recipe.train.seed,
            tier=recipe.offload.load_tier,
            experts_implementation=work.experts_implementation,
            make_slab=_shared_slab(ranks, work.device, place.node),
            on_put=on_put,
        )
    set_router_loss(loaded.model, recipe.train.router_loss_coef)
    ranks.exchange(None)  # from here on the slab is filled
    model = adapters.add_lora(
        loaded.model,
        rank=recipe.adapter.rank,
        alpha=recipe.adapter.alpha,
        dropout=recipe.adapter.dropout,
        targets=recipe.adapter.targets,
        has_experts=recipe.adapter.experts,
        seed=recipe.train.seed,
        options=adapters.Options(
            rank_pattern=recipe.adapter.rank_pattern,
            alpha_pattern=recipe.adapter.alpha_pattern,
            is_rslora=recipe.adapter.rslora,
            is_dora=recipe.adapter.dora,
            modules_to_save=recipe.adapter.modules_to_save,
        ),
        hold=loaded.hold,
    )
    if recipe.train.neftune_alpha is not None:
        add_noise(loaded.model, alpha=recipe.train.neftune_alpha)
    model.train()
    plan, traced = traced_plan(model, work.plan, ways=work.ways, device=work.device, ranks=ranks)
    if recipe.train.compile:
        compile_layers(LayeredModel(model).layers)
    engine = _attached(model, plan, tier=recipe.offload.load_tier, hold=loaded.hold, at=work.device)
    loop = Loop(
        model=model,
        engine=engine,
        trained=adapters.trained(model),
        train=recipe.train,
        loraplus_ratio=recipe.adapter.loraplus_ratio,
        is_masked=plan.request.is_masked,
        num_steps=work.order.num_steps,
        ranks=ranks,
    )
    notes = (*loaded.notes, traced, *engine.notes)
    return Session(model=model, engine=engine, loop=loop, plan=plan, notes=notes)


def _attached(
    model: "PeftModel", plan: Plan, *, tier: Tier, hold: Hold | None, at: torch.device
) -> Engine:
    return offload.attach(
        model,
        num_slots=plan.num_slots,
        codec=plan.request.typical.codec,
        tier=tier,
        device=str(at),
        stash="host" if plan.request.is_stashed else "device",
        head_chunk_tokens=plan.request.typical.head_chunk_tokens,
        kept_graphs=plan.num_kept_graphs,
        hold=hold,
    )


def _shared_slab(
    ranks: Ranks, device: torch.device, node: int | None
) -> Callable[[Sequence[Record]], Slab]:
    """Return what makes a rank's slab: the main rank's is filled, and mapped by the others.

    CUDA page-locks no mapping that is only read, so for a GPU it is one that could be written.
    """

    def near_device(address: int, num_bytes: int) -> str:
        return bind_memory(address, num_bytes, node)

    def make(records: Sequence[Record]) -> Slab:
        own = Slab(records, before_touch=near_device) if ranks.is_main else None
        handle = ranks.from_main(lambda: own.handle if own and not own.reason else None)
        if own is not None:
            return own
        if handle is None:  # there is no memfd in this container: each has a slab of its own
            return Slab(records, before_touch=near_device)
        return Slab.open(handle, records, is_writable=device.type == "cuda")

    return make


def rehearse(work: Work, session: Session, screen: Screen) -> Plan:
    """Find out whether the longest batch fits, and how long a typical step takes here."""
    doing = "Compiling the layers, trying" if work.recipe.train.compile else "Trying"
    screen.note(f"{doing} the longest batch, then timing typical steps ...")
    meter.reset_peak(work.device)
    try:
        record = session.loop.rehearse(
            work.share(work.order.longest_step()),
            [work.share(work.order.step(step)) for step in work.sizes.typical_steps],
        )
    except torch.OutOfMemoryError as error:
        raise too_large(session.plan, error) from error
    except FAILURES as error:
        raise refusal(error) from error
    costs = calibrate(
        session.plan.costs,
        record.timeline,
        optimizer_s=record.optimizer_s,
        num_kept_graphs=session.plan.num_kept_graphs,
    )
    return with_costs(session.plan, costs)


def too_large(plan: Plan, error: torch.OutOfMemoryError) -> DoesNotFitError:
    """Return the error for a rehearsal that ran out of memory, with what to set."""
    num_slots, num_graphs = plan.num_slots, plan.num_kept_graphs
    fix = f"offload.num_slots: {num_slots - 1}" if num_slots > MIN_SLOTS else "train.seq_len"
    if num_graphs:
        fix = "offload.kept_graphs: 0"
    return DoesNotFitError(
        f"the longest batch ran out of device memory with {num_slots} slots"
        + (f" and {shown_graphs(num_graphs)}" if num_graphs else "")
        + f": {str(error).splitlines()[0]}",
        limit=f"the plan had counted on {plan.peak_bytes / GIB:.2f} GiB",
        hint=f"`{fix}`, or close what else uses the card",
    )
