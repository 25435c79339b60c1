"""The plan of a server, against what an engine holds and against its own figures."""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

from finetune.clients.requests import Freeze, Sample, Step, Train
from finetune.clients.scheduler import Scheduler
from finetune.errors import ConfigError
from finetune.planning.subject import Subject, subject_of
from finetune.report.rows import as_json, as_markdown
from finetune.serve.planned import (
    Capacity,
    ServePlan,
    plan_serving,
    serve_parts,
    serve_rows,
)
from offload.engine.adapters import AdapterSettings
from offload.engine.engine import EngineOptions
from offload.engine.objective import Scores, StepLoss
from offload.errors import DoesNotFitError, UnsupportedModelError
from offload.plan.facts.linears import SoftmaxAttention
from offload.plan.machine.machine import GIB, Machine, named_machine
from tests.parity.clients import LINEARS, base_model, shared_engine
from tests.parity.steps import MODELS

ALL = AdapterSettings(rank=4, alpha=4.0, targets=frozenset(LINEARS))
NUM_SLOTS = 2


class Sum:
    """Minus the sum of log-probabilities."""

    reference = None

    def loss(self, scores: Scores) -> StepLoss:
        return StepLoss(value=-scores.policy_N.sum(), metrics={})


def capacity(**changes: Any) -> Capacity:
    values: dict[str, Any] = {
        "num_clients": 4,
        "num_samplers": 4,
        "max_rank": 32,
        "row_tokens": 2048,
        "cached_tokens": None,
    }
    return Capacity(**values | changes)


@cache
def shipped(name: str, *overrides: str) -> Subject:
    return subject_of(name, overrides)


def card(name: str = "rtx3090") -> Machine:
    return named_machine(name, dtype="bfloat16", ram_bytes=64 * GIB)


@cache
def planned(name: str = "qwen3-8b", machine: str = "rtx3090", **changes: Any) -> ServePlan:
    return plan_serving(shipped(name), card(machine), capacity(**changes))


# ---------------------------------------------------------------------------------------------
# Against an engine


def tiny(folder: Path, name: str = "qwen3", num_slots: int = NUM_SLOTS) -> ServePlan:
    """Return the plan of a tiny model in float32 for two clients."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        MODELS[name]().config.save_pretrained(folder)
    overrides = [f"offload.num_slots={num_slots}", "model.dtype=float32"]
    machine = named_machine("rtx3090", dtype="float32")
    asked = capacity(num_clients=2, num_samplers=1, max_rank=4, row_tokens=32, cached_tokens=64)
    return plan_serving(subject_of(str(folder), overrides), machine, asked)


@contextmanager
def served(plan: ServePlan) -> Iterator[Scheduler]:
    """Attach the model as it is planned."""
    model = base_model()
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    options = EngineOptions.planned(plan.plan)
    engine = shared_engine(
        model, num_slots=options.num_slots, num_kept_graphs=options.num_kept_graphs
    )
    assert plan.capacity.cached_tokens is not None
    try:
        yield Scheduler(
            engine,
            pattern="pattern",
            max_clients=plan.capacity.num_clients + plan.capacity.num_samplers,
            max_rank=plan.capacity.max_rank,
            max_cached_tokens=plan.capacity.cached_tokens,
        )
    finally:
        engine.detach()


def rows(num: int, length: int) -> list[dict[str, torch.Tensor]]:
    ids = torch.randint(0, 64, (num, 1, length), generator=torch.Generator().manual_seed(0))
    return [{"input_ids": row, "labels": row.clone()} for row in ids]


def trained(one: Scheduler, names: list[str], *, num_rows: int, length: int) -> None:
    for name in names:
        one.submit(name, Train(rows=rows(num_rows, length), objective=Sum()))
    one.run_all()


def test_bytes_of_clients_and_frozen_copies_are_those_that_an_engine_holds(tmp_path: Path) -> None:
    plan = tiny(tmp_path)
    with served(plan) as one:
        one.add("a", ALL, seed=0)
        trained(one, ["a"], num_rows=2, length=8)
        one.submit("a", Step(lr=1e-3))
        one.submit("a", Freeze(name="frozen"))
        trained(one, ["a"], num_rows=2, length=8)
        client = one._clients["a"]
        assert client.optimizer is not None
        moments = client.optimizer.state_dict()["state"].values()
        states = [x for state in moments for name, x in state.items() if name != "step"]
        values = list(one.adapters.parameters("a").values())
        held = [*values, *(x.grad for x in values), *states]
        assert sum(x.nbytes for x in held if x is not None) == plan.client_bytes
        assert one.adapters.slot_bytes == plan.client_bytes
        assert one.adapters.num_bytes("frozen") == plan.adapter_bytes
        copies = one._gradients("a").values()
        assert sum(x.nbytes for x in copies if x is not None) == plan.adapter_bytes
        saved = sum(x.nbytes for x in (*values, *states))
        assert saved == plan.checkpoint_bytes
    terms = {term.name: term.num_bytes for term in plan.device_memory}
    on_head = terms["adapters on the head, their gradients and optimizer states"]
    in_layers = terms["adapters"] + terms["gradients"] + terms["optimizer states"]
    assert on_head + in_layers == 2 * plan.client_bytes


@pytest.mark.parametrize("name", ["qwen3", "qwen3_moe", "gemma3_text", "gpt_oss"])
def test_bytes_of_answers_are_those_of_their_caches_after_a_prompt(
    name: str, tmp_path: Path
) -> None:
    plan = tiny(tmp_path, name)
    assert plan.state_tokens == 0
    model = MODELS[name]().eval().requires_grad_(requires_grad=False)
    engine = shared_engine(model, num_slots=NUM_SLOTS)
    with engine.generation() as generation:
        prompts = torch.randint(0, 64, (2, 32))
        generation.next_logits({0: prompts})
        assert generation.cache_bytes == plan.cached_bytes
        generation.next_logits({0: prompts[:, :1]})
        per_token = plan.cached_bytes // 64
        assert generation.cache_bytes <= 66 * per_token
    engine.detach()


def test_loads_of_a_pass_are_those_that_an_engine_makes(tmp_path: Path) -> None:
    plan = tiny(tmp_path)
    assert [rate.num_clients for rate in plan.rates] == [1, 2]
    with served(plan) as one:
        for name in "ab":
            one.add(name, ALL, seed=0)
        for rate, names in zip(plan.rates, (["a"], ["a", "b"]), strict=True):
            trained(one, names, num_rows=2, length=16)
            before, passes = one.num_loads["train"], one.num_passes["train"]
            trained(one, names, num_rows=2, length=16)
            assert one.num_passes["train"] == passes + 1
            assert one.num_loads["train"] - before == rate.train_loads > 0
        ends = []
        one.submit("a", Sample(prompt=[1, 2, 3], max_tokens=6, seed=0))
        while one.run_pass():
            ends.append(one.num_loads["decode"])
        assert {later - before for before, later in pairwise(ends[1:-1])} == {
            plan.rates[0].sampled.num_loads
        }


# ---------------------------------------------------------------------------------------------
# Its own figures


@pytest.mark.thorough
def test_all_that_is_planned_is_within_the_device_and_more_clients_leave_fewer_slots() -> None:
    plans = [planned(num_clients=num, num_samplers=num) for num in (1, 2, 4, 5)]
    for plan in plans:
        assert plan.peak_bytes <= plan.limit_bytes
        assert plan.plan.request.num_kept_graphs == 0
        assert not plan.plan.request.is_stashed
    slots = [plan.plan.num_slots for plan in plans]
    assert slots == sorted(slots, reverse=True)
    assert slots[0] > slots[-1]


def test_a_budget_limits_slots_and_caches() -> None:
    smaller = plan_serving(
        shipped("qwen3-8b", "offload.vram_budget=14"), card(), capacity(num_clients=1)
    )
    assert smaller.peak_bytes <= smaller.limit_bytes == 14 * GIB
    assert smaller.plan.num_slots < planned(num_clients=1).plan.num_slots
    assert smaller.cached_bytes <= 14 * GIB / 8


@pytest.mark.thorough
def test_clients_of_a_streamed_base_gain_and_each_is_slower_by_less_than_their_number() -> None:
    plan = planned("qwen3-30b-a3b", num_clients=6)
    assert [rate.num_clients for rate in plan.rates] == [1, 2, 4, 6]
    assert len({rate.train_loads for rate in plan.rates}) == 1
    for before, rate in pairwise(plan.rates):
        assert before.gain < rate.gain
        assert before.slowdown <= rate.slowdown < rate.num_clients
        assert rate.gain * rate.slowdown == pytest.approx(rate.num_clients)
    assert plan.rates[0].gain == plan.rates[0].slowdown == 1


def test_clients_of_a_resident_base_gain_nothing_and_answers_copy_nothing() -> None:
    plan = planned("qwen3-0.6b", num_clients=2)
    assert plan.plan.num_slots == plan.subject.facts.num_layers
    for rate in plan.rates:
        assert rate.train_loads == rate.sampled.num_loads == rate.grouped.num_loads == 0
        assert rate.gain == pytest.approx(1, abs=0.01)


@pytest.mark.thorough
def test_the_smallest_pass_that_is_about_the_fastest_is_taken() -> None:
    streamed = planned("qwen3-30b-a3b", "rtx5090")
    resident = planned("qwen3-0.6b")
    assert resident.pass_tokens == 2048 < streamed.pass_tokens
    for plan in (streamed, resident):
        assert plan.plan.tokens_per_step == 4 * plan.pass_tokens
        assert plan.rates[-1].train_s == plan.plan.step_s


def test_an_eighth_of_the_device_is_for_answers_and_one_of_full_length_at_least() -> None:
    plan = planned()
    tokens = plan.capacity.cached_tokens
    assert tokens is not None
    per_token = 2 * 2 * 36 * 8 * 128  # keys and values in bf16 of 36 layers with 8 heads
    assert plan.cached_bytes == tokens * per_token
    assert 0 <= plan.limit_bytes / 8 - plan.cached_bytes < per_token
    assert plan.rates[-1].sampled.num_answers == tokens // 2048 == 9
    longest = planned(row_tokens=24_576, num_clients=1, num_samplers=1)
    assert longest.capacity.cached_tokens == 24_576
    assert longest.rates[0].sampled.num_answers == 1


def test_more_answers_to_a_prompt_take_less_time_than_as_many_prompts() -> None:
    rate = planned("qwen3-0.6b", row_tokens=512, num_clients=2).rates[-1]
    assert (rate.sampled.num_groups, rate.sampled.num_rows) == (32, 1)
    assert (rate.grouped.num_groups, rate.grouped.num_rows) == (2, 16)
    assert rate.sampled.limited_by == "launches"
    assert rate.grouped.tokens_per_s > 2 * rate.sampled.tokens_per_s


def test_state_of_a_fixed_size_counts_as_tokens_of_an_answer() -> None:
    name = "qwen3.5-9b"
    plan = planned(name, num_clients=1, num_samplers=1)
    facts = plan.subject.facts
    full = [x for x in facts.layers if isinstance(x.attention, SoftmaxAttention)]
    assert 0 < len(full) < facts.num_layers
    assert plan.state_tokens > 0
    tokens = plan.capacity.cached_tokens
    assert tokens is not None
    assert plan.rates[0].sampled.num_answers == min(16, tokens // (2048 + plan.state_tokens))
    with pytest.raises(ConfigError, match="which the longest answer takes"):
        plan_serving(shipped(name), card(), capacity(cached_tokens=2048))


def test_a_cpu_has_one_memory_for_layers_clients_and_answers() -> None:
    subject, asked = shipped("qwen3-0.6b"), capacity(cached_tokens=20_000)
    plenty = replace(card(), device="cpu", context_bytes=0)
    plan = plan_serving(subject, plenty, asked)
    assert plan.plan.machine == plan.machine == plenty
    needed = plan.host_bytes + plan.peak_bytes
    enough = replace(plenty, ram_bytes=needed)
    assert plan_serving(subject, enough, asked).plan.num_slots == plan.plan.num_slots
    less = plan_serving(subject, replace(plenty, ram_bytes=needed - GIB // 8), asked)
    assert less.plan.num_slots < plan.plan.num_slots
    assert less.host_bytes + less.peak_bytes <= less.machine.ram_bytes


# ---------------------------------------------------------------------------------------------
# Refusals


def test_float16_is_refused() -> None:
    subject = shipped("qwen3-0.6b")
    model = subject.recipe.model.model_copy(update={"dtype": "float16"})
    halved = replace(subject, recipe=subject.recipe.model_copy(update={"model": model}))
    with pytest.raises(ConfigError, match="float16 for qwen3"):
        plan_serving(halved, card(), capacity())


FIELDS = {
    "--cached-tokens": "cached_tokens",
    "--samplers": "num_samplers",
    "--clients": "num_clients",
    "--rank": "max_rank",
    "--row-tokens": "row_tokens",
}


def changed(asked: Capacity, words: str) -> Capacity:
    """Return a capacity with the flags of a hint."""
    for one in words.split(" with "):
        flag, number = one.strip("`").split()
        asked = replace(asked, **{FIELDS[flag]: int(number)})
    return asked


@pytest.mark.parametrize(
    ("changes", "hint"),
    [
        ({"num_clients": 12, "num_samplers": 12}, "`--clients 4`, or `--rank 8`"),
        ({"num_clients": 1, "num_samplers": 60}, "`--samplers 34`, or `--rank 16`"),
        ({"cached_tokens": 150_000}, "`--cached-tokens 37500`"),
        (
            {"num_clients": 12, "num_samplers": 12, "max_rank": 64, "row_tokens": 8192},
            "`--cached-tokens 8192` with `--samplers 1` with `--clients 2`",
        ),
    ],
)
def test_what_does_not_fit_is_refused_with_each_number_that_fits(
    changes: dict[str, Any], hint: str
) -> None:
    subject, asked = shipped("qwen3-8b"), capacity(**changes)
    with pytest.raises(DoesNotFitError, match="of device memory for qwen3-8b") as caught:
        plan_serving(subject, card(), asked)
    assert f"--clients {asked.num_clients} --rank {asked.max_rank}" in caught.value.what
    assert caught.value.limit == "22.00 GiB may be used on rtx3090"
    assert caught.value.hint == hint
    for words in hint.split(", or "):
        nearest = changed(asked, words)
        plan_serving(subject, card(), nearest)
        for name in ("num_clients", "num_samplers"):
            if len(words.split()) == 2 and getattr(nearest, name) != getattr(asked, name):
                one_more = replace(nearest, **{name: getattr(nearest, name) + 1})
                with pytest.raises(DoesNotFitError):
                    plan_serving(subject, card(), one_more)


def test_a_base_that_does_not_fit_by_itself_is_refused_as_a_run_is() -> None:
    machine = named_machine("rtx3090", dtype="bfloat16", ram_bytes=24 * GIB)
    with pytest.raises(DoesNotFitError, match=r"GiB of RAM, .* too much") as caught:
        plan_serving(shipped("qwen3-30b-a3b"), machine, capacity())
    assert "offload." in caught.value.hint


@pytest.mark.parametrize(
    ("changes", "what", "hint"),
    [
        ({"num_clients": 0}, "--clients 0", "`--clients 1`"),
        ({"num_samplers": 0}, "--samplers 0", "`--samplers 1`"),
        ({"max_rank": 0}, "--rank 0", "`--rank 1`"),
        ({"row_tokens": 1}, "--row-tokens 1", "`--row-tokens 2`"),
        ({"row_tokens": 50_000}, "--row-tokens 50000", "`--row-tokens 40960`"),
        ({"cached_tokens": 2000}, "--cached-tokens 2000", "`--cached-tokens 2048`"),
    ],
)
def test_what_no_machine_can_serve_is_refused(
    changes: dict[str, int], what: str, hint: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        plan_serving(shipped("qwen3-8b"), card(), capacity(**changes))
    assert what in caught.value.what
    assert caught.value.hint == hint


def test_a_model_that_keeps_what_is_not_known_is_refused() -> None:
    with pytest.raises(UnsupportedModelError, match="what a lfm2_moe model keeps of each token"):
        plan_serving(shipped("lfm2-8b-a1b"), card(), capacity())


# ---------------------------------------------------------------------------------------------
# What is shown


def test_a_plan_is_shown_with_what_clients_take_and_gain() -> None:
    plan = planned("qwen3-30b-a3b", num_clients=8)
    text = as_markdown(serve_parts(plan))
    assert text.startswith("Plan for serving qwen3-30b-a3b on rtx3090: it fits")
    tokens = f"{plan.capacity.cached_tokens:,}"
    assert f"GiB for {tokens} tokens, prompts included" in text
    gain, slowdown = plan.rates[-1].gain, plan.rates[-1].slowdown
    (last,) = [line for line in text.splitlines() if line.startswith("| 8 |")]
    assert f"| {gain:.2f}x | {slowdown:.2f}x |" in last
    figures = as_json(serve_rows(plan))
    assert figures["peak_bytes"] == plan.peak_bytes
    assert figures["cached_tokens"] == plan.capacity.cached_tokens
