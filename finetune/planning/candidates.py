"""What a recipe leaves open, as requests for the planner to choose from.

Only settings that do not change the training may be left open: the exact forms of the layers, where
their inputs wait, the number of slots, how many logits exist and how many tokens an MLP computes at
a time, and how a step's sequences are cut into micro-batches. The loss is a mean over the label
tokens of the whole step, so it does not depend on the cut, except for a router's auxiliary loss, a
product of means over a micro-batch.
"""

import difflib
import gc
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from finetune.errors import ConfigError
from finetune.planning.request import full_request, has_router_loss, request_for
from finetune.recipe.capabilities import NEVER_ENCODED, STREAMED, broken_with
from finetune.recipe.recipe import Recipe, with_settings
from offload.plan.facts.codec import CODECS, NATIVE, automatic_codecs, codecs_that
from offload.plan.facts.facts import ModelFacts
from offload.plan.facts.workload import why_head_on_device, why_on_device
from offload.plan.fit import fits as has_plan
from offload.plan.machine.machine import Machine
from offload.plan.plan import Plan
from offload.plan.request import (
    FEWEST_CHUNK_TOKENS,
    HEAD_CHUNK_TOKENS,
    MLP_CHUNKS,
    PlanRequest,
    may_go_round,
    sharing,
    with_workload,
)
from offload.plan.schedule.schedule import Order
from offload.plan.search import Choice, search
from offload.plan.search import nearest_request as nearest

if TYPE_CHECKING:
    from finetune.data.order import StepSizes


@contextmanager
def uncollected() -> Iterator[None]:
    """Disable the cyclic garbage collector in this block.

    A plan makes tens of thousands of values without cycles; collection took a seventh of the time
    of a large plan.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


# ---------------------------------------------------------------------------------------------
# What a suggested recipe is to be best at.
#
# A rounded form of the layers is smaller, and so moves and fits better, but it is another base to
# train on. A goal says how much speed an exact form has to have for it to be preferred.


@dataclass(frozen=True, kw_only=True, slots=True)
class Goal:
    """How one of several forms of the layers is chosen."""

    name: str  # the word that is typed
    meaning: str  # what is chosen, in words that follow the name
    # Share of the best form's tokens per second that is enough; of the forms that have it, the one
    # that rounds least is chosen.
    least_frac: float
    # Whether this is of the longest sequence, and not of tokens per second.
    is_longest: bool = False


_GOALS = (
    Goal(
        name="balanced",
        meaning="what rounds least, of the forms with half of the fastest one's speed",
        least_frac=0.5,
    ),
    Goal(name="fastest", meaning="the most tokens per second, rounded or not", least_frac=1.0),
    Goal(name="quality", meaning="what rounds least, of the forms that fit", least_frac=0.0),
    Goal(
        name="context",
        meaning="what rounds least, of the forms with nine tenths of the longest sequence",
        least_frac=0.9,
        is_longest=True,
    ),
)
GOALS: Mapping[str, Goal] = {goal.name: goal for goal in _GOALS}
DEFAULT_GOAL = _GOALS[0].name


def goal_named(name: str) -> Goal:
    """Return a goal.

    Raises:
        ConfigError: There is none of this name.
    """
    plain = name.strip().lower()
    if plain in GOALS:
        return GOALS[plain]
    near = difflib.get_close_matches(plain, GOALS, n=1, cutoff=0.0)[0]
    raise ConfigError(
        f"{name!r} is not a goal", limit=f"goals are {', '.join(GOALS)}", hint=f"`--goal {near}`"
    )


HEAD_CHUNKS = (HEAD_CHUNK_TOKENS, 256, FEWEST_CHUNK_TOKENS)  # what `auto` may take


def with_each_size(recipe: Recipe, *, num_ranks: int) -> tuple[Recipe, ...]:
    """Return the recipe with each size of micro-batch that it allows, the smallest first.

    Each cuts the same sequences into equal micro-batches, at least one for each rank.
    """
    if recipe.train.micro_batch_size != "auto":
        return (recipe,)
    num_sequences = recipe.train.global_batch_size
    sizes = [n for n in range(1, num_sequences // num_ranks + 1) if num_sequences % n == 0]
    return tuple(with_settings(recipe, {"train.micro_batch_size": size}) for size in sizes)


def full_requests(recipe: Recipe, facts: ModelFacts, *, num_ranks: int) -> list[PlanRequest]:
    """Return the requests before the rows are known: all are full, every token has a loss."""
    return shared_requests([recipe], facts, num_ranks=num_ranks)


def shared_requests(
    recipes: Sequence[Recipe], facts: ModelFacts, *, num_ranks: int
) -> list[PlanRequest]:
    """Return the requests of a step that runs of these recipes share, before rows are known.

    Where sizes of micro-batches are open, each run takes its largest with at most so many tokens,
    or its smallest.

    Args:
        recipes: Of the runs, which share `model` and `offload`.
        facts: The model.
        num_ranks: Processes that share the step.
    """
    cuts = [
        [
            full_request(one, facts, num_ranks=num_ranks)
            for one in with_each_size(recipe, num_ranks=num_ranks)
        ]
        for recipe in recipes
    ]
    most = sorted({cut.typical.num_tokens for of_run in cuts for cut in of_run})
    shared = [sharing([_largest_within(of_run, tokens) for of_run in cuts]) for tokens in most]
    return _all_ways(recipes, facts, list(dict.fromkeys(shared)))


def _largest_within(cuts: Sequence[PlanRequest], num_tokens: int) -> PlanRequest:
    """Return the last of some cuts, the smallest first, with so many tokens; or the first."""
    within = [cut for cut in cuts if cut.typical.num_tokens <= num_tokens]
    return within[-1] if within else cuts[0]


def requests_for(
    recipe: Recipe,
    facts: ModelFacts,
    sized: Sequence[tuple[Recipe, "StepSizes"]],
    *,
    num_ranks: int,
) -> list[PlanRequest]:
    """Return the requests for rows of these sizes.

    Args:
        recipe: What is asked for.
        facts: The model.
        sized: The recipe with each choice made, and the sizes of its micro-batches.
        num_ranks: Processes that share the step.
    """
    cut = [request_for(one, facts, sizes, num_ranks=num_ranks) for one, sizes in sized]
    return _all_ways([recipe], facts, cut)


def choose(facts: ModelFacts, machine: Machine, requests: Sequence[PlanRequest]) -> Choice:
    """Return the fastest plan that fits, and the alternatives that were considered.

    Fewer logits exist at a time only where more would not fit, MLPs compute in tiles only
    where that does not fit either, the input embedding is in host memory only where nothing else
    fits, and the output head is there too where not even that does.

    Raises:
        DoesNotFitError: None fits.
    """
    adapter = requests[0].typical.adapter
    may_round = machine.device == "cuda" and adapter.whole is None
    may_round &= set(adapter.modules) <= set(NEVER_ENCODED)
    rounding = codecs_that(lambda codec: codec.is_suggested) if may_round else ()
    return search(facts, machine, _resort(facts, machine, requests), rounding=rounding)


def chooser(recipe: Recipe) -> Callable[[ModelFacts, Machine, Sequence[PlanRequest]], Choice]:
    """Return what chooses a recipe's plan among its requests.

    Raises:
        ConfigError: Processes are to hold parts of a model whose config asks for a router loss.
    """
    if not recipe.train.is_sharded:
        return choose
    if has_router_loss(recipe):
        raise ConfigError(
            "train.parallel: fsdp2, and the model's config asks for a router loss",
            limit="it counts the tokens of the whole step, and here each micro-batch passes through"
            " the model by itself",
            hint=f"`train.router_loss_coef: 0`, or {STREAMED}",
        )
    return choose_sharded


def choose_sharded(facts: ModelFacts, machine: Machine, requests: Sequence[PlanRequest]) -> Choice:
    """Return the fastest plan whose ranks each hold a part of the model.

    Raises:
        DoesNotFitError: None fits.
    """
    from offload.plan.sharded import as_sharded, sharded_choice  # of several cards alone

    return sharded_choice(facts, machine, list(dict.fromkeys(map(as_sharded, requests))))


def found_choice(
    facts: ModelFacts, machine: Machine, requests: Sequence[PlanRequest]
) -> Choice | None:
    """Return what `choose` picks, for tables of many plans; None if nothing fits."""
    if not fits(facts, machine, requests):
        return None
    return search(facts, machine, _resort(facts, machine, requests), rounding=())


def chosen_plan(
    facts: ModelFacts, machine: Machine, requests: Sequence[PlanRequest]
) -> Plan | None:
    """Return its plan."""
    found = found_choice(facts, machine, requests)
    return None if found is None else found.plan


def fits(facts: ModelFacts, machine: Machine, requests: Sequence[PlanRequest]) -> bool:
    """Return whether there is any plan for any of the requests."""
    return any(has_plan(facts, machine, request) for request in requests)


def nearest_request(
    facts: ModelFacts, machine: Machine, requests: Sequence[PlanRequest]
) -> PlanRequest:
    """Return the request that `choose` reports in its error if none fits."""
    return nearest(facts, machine, _last(in_forms(requests, machine)))


def _resort(
    facts: ModelFacts, machine: Machine, requests: Sequence[PlanRequest]
) -> list[PlanRequest]:
    """Return the first group in which any request fits; those of the last forms if none does."""
    forms = in_forms(requests, machine)
    if len(forms) == 1:
        return forms[0]
    return next((some for some in forms if fits(facts, machine, some)), _last(forms))


def _last(forms: Sequence[list[PlanRequest]]) -> list[PlanRequest]:
    """Return the last form of each place of embedding and head: one lacks VRAM, another RAM."""
    found = {(form[0].typical.embeddings, form[0].typical.head): form for form in forms}
    return [request for form in found.values() for request in form]


def in_forms(requests: Sequence[PlanRequest], machine: Machine) -> list[list[PlanRequest]]:
    """Return the requests by the form of a step, each to be tried where those before do not fit.

    Where layers compute in host memory, an embedding or a head that is there too saves nothing.
    """
    first = requests[0].typical
    groups: dict[tuple[str, str, int | None, int], list[PlanRequest]] = {}
    for request in requests:
        typical = request.typical
        places = typical.embeddings, typical.head
        if machine.device == "cpu" and places != (first.embeddings, first.head):
            continue
        sizes = typical.mlp_chunk_tokens, typical.head_chunk_tokens
        groups.setdefault((*places, *sizes), []).append(request)
    return list(groups.values())


def _all_ways(
    recipes: Sequence[Recipe], facts: ModelFacts, cut: Sequence[PlanRequest]
) -> list[PlanRequest]:
    """Return each cut of the step in each form and place, the plainest first.

    That is: the output head on the device, the input embedding too, whole MLPs,
    large head chunks, layer by layer, native weights, inputs on the device,
    small micro-batches, in this order.
    """
    may_tile = recipes[0].offload.mlp_chunk == "auto" and all(map(_may_tile, recipes))
    return with_forms(
        facts,
        _ways(recipes, facts, cut),
        may_tile=may_tile,
        may_move_embeddings=recipes[0].offload.embeddings == "auto",
        may_move_head=recipes[0].offload.head == "auto",
    )


def with_forms(
    facts: ModelFacts,
    ways: Sequence[PlanRequest],
    *,
    may_tile: bool,
    may_move_embeddings: bool,
    may_move_head: bool,
) -> list[PlanRequest]:
    """Return requests, and the same with MLPs in tiles and with embedding and head in RAM.

    The head is there only where the embedding is, if that may be there; one weight of both is there
    for both, or not at all.

    MLPs are computed in tiles where these cost no arithmetic, as nothing reads an MLP's output in a
    recompute, and where formulas of their memory are tested for the model's type.

    Args:
        facts: The model.
        ways: Alike in what trains.
        may_tile: Whether what trains allows tiles.
        may_move_embeddings: Whether an embedding that may be in RAM is tried there.
        may_move_head: Whether a head that may be in RAM is tried there.
    """
    found = list(ways)
    is_unread = all(
        linear.is_unread for layer in facts.layers for linear in layer.linears if linear.is_down
    )
    if may_tile and is_unread and facts.is_memory_tested and not facts.has_experts:
        found += [
            with_workload(request, mlp_chunk_tokens=num_tokens)
            for num_tokens in MLP_CHUNKS
            for request in ways
            if num_tokens < request.largest.num_tokens
        ]
    adapters = [run.typical.adapter for run in ways[0].runs]
    if facts.tie_word_embeddings:
        may_move = may_move_embeddings and may_move_head
        may_move &= not any(why_head_on_device(facts, adapter) for adapter in adapters)
        return [
            *found,
            *(with_workload(one, embeddings="host", head="host") for one in found if may_move),
        ]
    if may_move_embeddings and not any(why_on_device(facts, adapter) for adapter in adapters):
        found += [with_workload(request, embeddings="host") for request in found]
    if may_move_head and not any(why_head_on_device(facts, adapter) for adapter in adapters):
        last = found[-1].typical.embeddings
        found += [
            with_workload(one, head="host") for one in found if one.typical.embeddings == last
        ]
    return found


def _may_tile(recipe: Recipe) -> bool:
    """Return whether a run's MLPs may be computed in tiles without being asked to."""
    adapter = recipe.adapter
    is_lora = adapter.stated.kind == "lora" and adapter.as_lora.dropout == 0
    return is_lora and not recipe.train.compile


def _ways(
    recipes: Sequence[Recipe], facts: ModelFacts, cut: Sequence[PlanRequest]
) -> list[PlanRequest]:
    recipe, published = recipes[0], facts.published
    stash = recipe.offload.stash
    places = (False, True) if stash == "auto" else (stash == "host",)
    chunk = recipe.offload.head_chunk
    ways = [
        replace(
            with_workload(request, codec=codec, head_chunk_tokens=num_tokens),
            is_stashed=is_stashed,
        )
        for num_tokens in (HEAD_CHUNKS if chunk == "auto" else (chunk,))
        for codec in _codecs(recipe, published)
        if all(codec in _codecs(other, published) for other in recipes)
        for is_stashed in places
        for request in cut
    ]
    return [*ways, *(replace(x, order=Order.MICRO_BATCH_MAJOR) for x in ways if may_go_round(x))]


def _codecs(recipe: Recipe, published: str) -> tuple[str, ...]:
    """Return the forms that layers may wait in; the forms of `auto` are lossless.

    Args:
        recipe: What is asked for.
        published: The `quant_method` of the model's weights.
    """
    if recipe.offload.codec != "auto":
        return (recipe.offload.codec,)
    if recipe.train.is_full:
        return (NATIVE,)
    dtype = recipe.model.dtype
    found = [name for name in automatic_codecs(published) if dtype in CODECS[name].dtypes]
    forms = (with_settings(recipe, {"offload.codec": name}) for name in found)
    return NATIVE, *(x.offload.codec for x in forms if not any(broken_with(x, "offload.codec")))
