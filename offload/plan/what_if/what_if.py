"""The effect of other options for storing and moving a model on a step, compared with the plan.

Training a large model on a small card is logistics, and the options are few: recompute instead of
keeping, send, shard, split, stage, store in fewer bits. Each is priced by the functions that make
the plan itself. An option that is a setting is planned again with that setting and everything else
unchanged, including the number of slots: memory that an option frees is not spent. An option that
this tool does not offer is priced at its best: transfers that can overlap with compute cost no
time.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

from offload.plan.facts.codec import CodecName
from offload.plan.facts.optimizer import Optimizer
from offload.plan.facts.workload import WeightPlace, why_head_on_device, why_on_device
from offload.plan.plan import Plan
from offload.plan.request import PlanRequest, with_codec, with_embeddings, with_head, with_tied
from offload.plan.schedule.schedule import MIN_SLOTS
from offload.plan.what_if.cards import (
    Figures,
    Option,
    figures_of,
    offload_optimizer,
    one_kernel_each,
    recompute_all,
    recompute_cheap,
    replanned,
    second_cards,
    train_all,
    unfused_attention,
)

NUM_CARDS = 2  # what fits a workstation


_Move = Callable[[PlanRequest, WeightPlace], PlanRequest]


@dataclass(frozen=True, kw_only=True, slots=True)
class OtherWays:
    """A plan's figures, and those of the other options."""

    plan: Figures
    options: tuple[Option, ...]


def what_if(plan: Plan, *, num_cards: int) -> OtherWays:
    """Price every option against a plan.

    Args:
        plan: Of one process, at the planner's own costs.
        num_cards: Cards of the options that use several.
    """
    assert plan.request.num_ranks == 1
    if plan.request.typical.adapter.whole is not None:
        return _of_whole_weights(plan)
    return OtherWays(
        plan=figures_of(plan),
        options=(
            recompute_all(plan),
            recompute_cheap(plan),
            _send_activations(plan),
            _offload_weights(plan),
            *_move_embeddings(plan),
            *_move_head(plan),
            offload_optimizer(plan),
            _codec(plan, "fp8 weights", "fp8", "arXiv:2209.05433"),
            _codec(plan, "4-bit weights", "nf4", "arXiv:2305.14314"),
            _optimizer(plan, "8-bit optimizer", "adamw_8bit", "arXiv:2110.02861"),
            _optimizer(plan, "factored optimizer", "adafactor", "arXiv:1804.04235"),
            one_kernel_each(plan),
            unfused_attention(plan),
            train_all(plan),
            *second_cards(plan, num_cards=num_cards),
        ),
    )


def _of_whole_weights(plan: Plan) -> OtherWays:
    """Price the options that are one too where the model's own weights train, on one card."""
    return OtherWays(
        plan=figures_of(plan),
        options=(
            recompute_cheap(plan),
            _send_activations(plan),
            _offload_weights(plan),
            unfused_attention(plan),
        ),
    )


def _held(plan: Plan) -> PlanRequest:
    """Return the plan's request with the number of slots that it chose."""
    return replace(plan.request, num_slots=plan.num_slots)


def _send_activations(plan: Plan) -> Option:
    is_done = plan.request.is_stashed
    return replanned(
        "send activations",
        f"`offload.stash: {'device' if is_done else 'host'}`",
        "arXiv:1602.08124",
        plan=plan,
        request=replace(_held(plan), is_stashed=not is_done),
        is_in_plan=is_done,
    )


def _offload_weights(plan: Plan) -> Option:
    is_done = plan.num_slots < plan.facts.num_layers
    return replanned(
        "offload weights",
        f"`offload.num_slots: {'all' if is_done else MIN_SLOTS}`",
        "arXiv:2104.07857",
        plan=plan,
        request=replace(plan.request, num_slots=plan.facts.num_layers if is_done else MIN_SLOTS),
        is_in_plan=is_done,
    )


def _move_embeddings(plan: Plan) -> tuple[Option, ...]:
    """Price the input embedding in the other place."""
    typical = plan.request.typical
    if why_on_device(plan.facts, typical.adapter):
        return ()
    now, what = typical.embeddings, "rows of a step's tokens are gathered in RAM"
    if plan.facts.tie_word_embeddings:
        what += ", and all are copied over slots once per step"
        name, both = "offload embeddings and head", ("embeddings", "head")
        return _move(plan, name, both, what, now=now, move=with_tied)
    one = ("embeddings",)
    return _move(plan, "offload embeddings", one, what, now=now, move=with_embeddings)


def _move_head(plan: Plan) -> tuple[Option, ...]:
    """Price the output head in the other place."""
    typical = plan.request.typical
    is_tied = plan.facts.tie_word_embeddings
    if is_tied or why_head_on_device(plan.facts, typical.adapter):
        return ()
    what = "it is copied over slots once per step"
    return _move(plan, "offload the head", ("head",), what, now=typical.head, move=with_head)


def _move(
    plan: Plan,
    name: str,
    settings: tuple[str, ...],
    source: str,
    *,
    now: WeightPlace,
    move: _Move,
) -> tuple[Option, ...]:
    """Price something in the other place, where a device has memory of its own."""
    if plan.machine.device == "cpu":
        return ()
    wanted: WeightPlace = "device" if now == "host" else "host"
    option = replanned(
        name,
        " and ".join(f"`offload.{setting}: {wanted}`" for setting in settings),
        source,
        plan=plan,
        request=move(_held(plan), wanted),
        is_in_plan=now == "host",
    )
    return (option,)


def _codec(plan: Plan, name: str, codec: CodecName, source: str) -> Option:
    held, is_done = _held(plan), plan.request.typical.codec == codec
    wanted: CodecName = "native" if is_done else codec
    return replanned(
        name,
        f"`offload.codec: {wanted}`",
        source,
        plan=plan,
        request=with_codec(held, wanted),
        is_in_plan=is_done,
    )


def _optimizer(plan: Plan, name: str, optimizer: Optimizer, source: str) -> Option:
    held, is_done = _held(plan), plan.request.typical.optimizer == optimizer
    wanted: Optimizer = "adamw" if is_done else optimizer
    return replanned(
        name,
        f"`train.optimizer: {wanted}`",
        source,
        plan=plan,
        request=replace(
            held,
            typical=replace(held.typical, optimizer=wanted),
            largest=replace(held.largest, optimizer=wanted),
        ),
        is_in_plan=is_done,
    )
