from collections.abc import Sequence

import pytest

from finetune.errors import ConfigError
from finetune.recipe.load import load_recipe
from finetune.recipe.shared_rules import require_shared
from finetune.sweep.plan_wave import with_common_places
from finetune.sweep.sweep import _with_begun
from finetune.sweep.variants import Variant, waves_of
from offload.plan.request import PlanRequest, with_workload
from tests.builders import lora, qwen3_8b, request, workload


def require(runs: list[Variant]) -> None:
    require_shared([(run.name, run.recipe) for run in runs])


def variants(*settings: Sequence[str]) -> list[Variant]:
    return [
        Variant(name=f"run-{number}", settings={}, recipe=load_recipe("quickstart", list(words)))
        for number, words in enumerate(settings)
    ]


@pytest.mark.parametrize(
    ("setting", "match"),
    [
        ("offload.num_slots=4", r"offload.num_slots is 3 in run-0 and 4 in run-1"),
        ("model.dtype=bfloat16", r"model.dtype is float32 in run-0 and bfloat16 in run-1"),
        ("train.neftune_alpha=5", r"train.neftune_alpha is None in run-0 and 5.0 in run-1"),
        ("train.router_loss_coef=0.1", r"train.router_loss_coef is None in run-0 and 0.1"),
        ("report.profile=3", r"report.profile is 3 in run-1"),
        ("train.compile=true", r"train.compile is true in run-1"),
    ],
)
def test_what_differs_and_must_not_is_named(setting: str, match: str) -> None:
    with pytest.raises(ConfigError, match=match):
        require(variants([], [setting]))


def test_runs_may_differ_in_what_is_their_own() -> None:
    own = ["adapter.rank=2", "train.seed=9", "train.lr=0.1", "adapter.dropout=0", "train.steps=40"]
    own += ["adapter.compute_dtype=float32"]
    require(variants([], own, ["train.optimizer=sgd"]))


def test_the_base_must_be_the_same_where_it_is_random() -> None:
    random = ["model.init=random"]
    with pytest.raises(ConfigError, match=r"train.seed is 0 in run-0 and 1 in run-1"):
        require(variants(random, [*random, "train.seed=1"]))


def test_a_wave_has_no_more_runs_than_asked_for() -> None:
    runs = variants(["train.seed=1"], ["train.seed=2"], ["train.seed=3"])
    names = [[run.name for run in wave] for wave in waves_of(runs, most=2)]
    assert names == [["run-0", "run-1"], ["run-2"]]
    assert [len(wave) for wave in waves_of(runs, most=None)] == [3]


def test_a_run_takes_the_places_of_those_that_have_begun_unless_it_trains_a_copy_there() -> None:
    begun, plain, headed, embedded = variants(
        ["offload.head=host", "offload.embeddings=host", "offload.head_chunk=512"],
        ["train.seed=1"],
        ["adapter.modules_to_save=[lm_head]"],
        ["adapter.modules_to_save=[embed_tokens]"],
    )
    settled = {begun.name: begun.recipe.offload}
    made = [run.recipe.offload for run in _with_begun([begun, plain, headed, embedded], settled)]
    assert [one.head for one in made] == ["host", "host", "auto", "auto"]  # it may be one weight
    assert [one.embeddings for one in made] == ["host", "host", "host", "auto"]
    assert {one.head_chunk for one in made} == {512}


def test_runs_that_share_a_step_have_the_head_where_all_may_have_it() -> None:
    facts, chosen = (
        qwen3_8b(),
        with_workload(with_workload(request(), embeddings="host"), head="host"),
    )
    plain, headed, embedded = (
        request(workload(adapter=lora(modules=modules)))
        for modules in ((), ("lm_head",), ("embed_tokens",))
    )

    def places(*others: PlanRequest) -> tuple[str, str]:
        made = with_common_places(chosen, [chosen, *others], facts).typical
        return made.embeddings, made.head

    assert places(plain) == ("host", "host")
    assert places(plain, headed) == ("host", "device")
    assert places(embedded) == ("device", "host")
