"""A run's model on the host, loaded to where its weights wait: once for all ranks of a machine."""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch

from finetune.model.config import fetch_model
from finetune.model.load import Loaded, load_model, set_router_loss
from finetune.model.store import weights_digest
from finetune.training.ranks import Ranks
from finetune.training.run import Run
from offload.engine.host.numa import bind_memory, place_near, thread_on
from offload.engine.host.slab import Record, Slab, lay_out
from offload.plan.plan import Plan

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def load_base(run: Run, plan: Plan) -> Loaded:
    """Load the model to where its weights wait, on all ranks.

    Args:
        run: The run, or the first of those that share it.
        plan: The plan of its steps.
    """
    recipe, ranks = run.recipe, run.ranks
    with ranks.first_here_first():
        fetch_model(recipe.model, working=run.screen.working, note=run.screen.note)
    if ranks.num_machines > 1:
        codec = plan.request.typical.codec
        digest = ranks.from_first_here(lambda: weights_digest(recipe.model, codec))
        ranks.require_same("files of the base model", lambda: digest)
    place = place_near(run.device)
    # memory that cannot be bound to a NUMA node is allocated near the thread that fills it
    with thread_on(place.cpus), run.screen.working("Loading weights", "bytes") as on_put:
        loaded = load_model(
            recipe.model,
            codec=plan.request.typical.codec,
            device=run.device.type,
            seed=recipe.train.seed,
            tier=recipe.offload.load_tier,
            experts_implementation=plan.experts_implementation,
            make_slab=_shared_slab(ranks, run.device, place.node),
            on_put=on_put,
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
    return loaded


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
