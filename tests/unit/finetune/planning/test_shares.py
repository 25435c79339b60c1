from dataclasses import replace

import pytest

from finetune.errors import ConfigError
from finetune.planning.candidates import full_requests
from finetune.planning.parallel import Wanted, own_choice, share_out
from finetune.planning.request import with_backend
from finetune.planning.subject import Subject, subject_of
from offload.errors import DoesNotFitError
from offload.plan.machine.machine import Machine, named_machine
from offload.plan.plan import plan
from offload.plan.request import PlanRequest

ROOMY = 128 * 2**30
SHAPE = ("qwen3-8b", ["train.tokens_per_step=16384"])


@pytest.fixture(scope="module")
def subject() -> Subject:
    return subject_of(*SHAPE)


def machines(subject: Subject, *names: str, ram_bytes: int = ROOMY) -> list[Machine]:
    named = (named_machine(name, ram_bytes=ram_bytes) for name in names)
    return [with_backend(subject.recipe, subject.facts, machine) for machine in named]


def asked(subject: Subject, num_ranks: int = 2) -> list[PlanRequest]:
    requests = full_requests(subject.recipe, subject.facts, num_ranks=num_ranks)
    return [replace(request, most_local_ranks=1) for request in requests]


def test_shares_are_those_of_the_shortest_step_of_all(subject: Subject) -> None:
    cards = machines(subject, "rtx3090", "rtx4060ti")
    requests = [one for one in asked(subject) if not one.is_stashed][:1]

    def slowest_s(first: int) -> float:
        counts = (first, requests[0].num_micro_batches - first)
        return max(
            plan(subject.facts, card, replace(requests[0], own_micro_batches=count)).step_s
            for card, count in zip(cards, counts, strict=True)
        )

    shares = share_out(subject.facts, cards, requests, wanted="auto")
    best_s = min(slowest_s(first) for first in range(1, requests[0].num_micro_batches))
    assert slowest_s(shares.micro_batches[0]) == pytest.approx(best_s)
    assert shares.micro_batches[0] > shares.micro_batches[1]


@pytest.mark.parametrize(
    ("wanted", "counts"), [("equal", (4, 4)), ((3, 1), (6, 2)), ((1, 7), (1, 7))]
)
def test_shares_that_are_named_are_taken(
    wanted: Wanted, counts: tuple[int, ...], subject: Subject
) -> None:
    cards = machines(subject, "rtx3090", "rtx4060ti")
    assert share_out(subject.facts, cards, asked(subject), wanted=wanted).micro_batches == counts


def test_each_rank_has_slots_and_graphs_of_its_own(subject: Subject) -> None:
    cards = machines(subject, "rtx3090", "rtx4060ti")
    shares = share_out(subject.facts, cards, asked(subject), wanted="auto")
    first, second = (
        own_choice(subject.facts, card, shares, rank=rank).plan for rank, card in enumerate(cards)
    )
    assert first.residency != second.residency
    assert first.request.typical == second.request.typical
    assert (
        first.request.rank_micro_batches + second.request.rank_micro_batches
        == first.request.num_micro_batches
    )


def test_shares_of_no_whole_micro_batches_are_refused(subject: Subject) -> None:
    cards = machines(subject, "rtx3090", "rtx4060ti")
    with pytest.raises(ConfigError) as info:
        share_out(subject.facts, cards, asked(subject), wanted=(2, 1))
    assert info.value.what == "train.shares: [2, 1] for a step of 8 micro-batches"
    assert info.value.limit == "they add up to 3, which must divide the micro-batches of a step"
    assert info.value.hint == "`train.shares: [5, 3]`, or `train.shares: auto`"


def test_a_rank_that_does_not_fit_is_named(subject: Subject) -> None:
    roomy, small = machines(subject, "rtx3090", "rtx4060ti")
    small = replace(small, ram_bytes=2**30)
    with pytest.raises(DoesNotFitError, match=r"^rank 1 with 4 of the step's micro-batches: "):
        share_out(subject.facts, [roomy, small], asked(subject), wanted="auto")
