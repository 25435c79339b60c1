"""Runs that share the visits of a step: each is, to the bit, what it is alone."""

import functools
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.nn import functional as F

from offload.engine.engine import Engine
from offload.engine.objective import Reference
from offload.engine.passes.part import RunStep
from offload.errors import OffloadError
from tests.parity.objectives import ByRow, against_scored, pairs, sigmoid
from tests.parity.runs import (
    ATTENTION,
    DORA,
    DROPPING,
    EXPERTS,
    LARGE,
    WHOLE,
    WIDE,
    Config,
    Found,
    apart,
    assert_same,
    engine_of,
    found,
    joint_model,
    own_model,
    rows,
    run_name,
    together,
)
from tests.parity.steps import NUM_LAYERS

pytestmark = pytest.mark.usefixtures("one_thread")

SLOW = pytest.mark.slow
MIXED: tuple[Config, ...] = (ATTENTION, WIDE, LARGE)


def plain_runs(num: int, **changes: Any) -> list[RunStep]:
    """Return runs of one to three micro-batches of other sizes, seeds and divisors."""
    widths = ((12, 14), (9,), (11, 8, 13))
    return [
        RunStep(
            micro_batches=rows(i, *widths[i % 3]),
            dropout_seed=100 + i,
            num_label_tokens=40 + i if i % 2 else None,
            **changes,
        )
        for i in range(num)
    ]


@functools.cache
def mixed_apart() -> list[Found]:
    """Return what two steps of three mixed runs find, each alone, with the tests' usual options."""
    return apart("qwen3", MIXED, plain_runs(3), num_steps=2)


def is_same(configs: tuple[Config, ...], runs: list[RunStep], name: str = "qwen3", **options: Any):
    assert_same(
        together(name, configs, runs, **_copy(options)),
        apart(name, configs, runs, **_copy(options)),
    )


def _copy(options: dict[str, Any]) -> dict[str, Any]:
    return dict(options)


@pytest.mark.parametrize("num", [3, pytest.param(2, marks=SLOW), pytest.param(8, marks=SLOW)])
def test_runs_of_mixed_ranks_targets_and_lengths(num) -> None:
    configs = tuple(MIXED[i % 3] for i in range(num))
    expected = mixed_apart() if num == 3 else apart("qwen3", configs, plain_runs(num), num_steps=2)
    assert_same(together("qwen3", configs, plain_runs(num), num_steps=2), expected)


def test_a_run_whose_linears_are_fewer_than_those_of_the_first() -> None:
    is_same((WIDE, ATTENTION), plain_runs(2))


@pytest.mark.thorough
@pytest.mark.parametrize(
    "options",
    [
        pytest.param({"stash": "host"}, marks=SLOW),
        pytest.param({"num_kept_graphs": 2}, marks=SLOW),
        pytest.param(
            {"num_sent_graphs": 2, "num_kept_outputs": 1, "num_sent_outputs": 1}, marks=SLOW
        ),
        {
            "stash": "host",
            "num_kept_graphs": 1,
            "num_sent_graphs": 1,
            "num_kept_outputs": 1,
            "num_sent_outputs": 1,
        },
        pytest.param({"num_slots": NUM_LAYERS}, marks=SLOW),
    ],
    ids=str,
)
def test_runs_with_each_part_of_the_plan(options) -> None:
    """Each of which changes no bit of a run that is alone."""
    assert_same(together("qwen3", MIXED, plain_runs(3), num_steps=2, **options), mixed_apart())


@pytest.mark.thorough
@pytest.mark.parametrize(
    "options",
    [
        {"codec": "nf4"},
        pytest.param({"mlp_chunk_tokens": 8}, marks=SLOW),
        pytest.param({"layer_kernels": "fused"}, marks=SLOW),
    ],
    ids=str,
)
def test_runs_of_layers_that_are_computed_in_other_ways(options) -> None:
    is_same(MIXED, plain_runs(3), num_steps=2, **options)


@pytest.mark.thorough
@pytest.mark.parametrize(
    "configs",
    [
        pytest.param((DORA, ATTENTION, DORA), id="dora"),
        pytest.param((DROPPING, WIDE, DROPPING), id="dropout", marks=SLOW),
        pytest.param((WHOLE, ATTENTION), id="a module trained whole", marks=SLOW),
        pytest.param((WHOLE, WHOLE), id="two of them"),
    ],
)
def test_runs_with_other_kinds_of_adapters(configs) -> None:
    is_same(configs, plain_runs(len(configs)), num_steps=2)


@pytest.mark.thorough
@pytest.mark.parametrize("path", ["grouped_mm", pytest.param("eager", marks=SLOW)])
def test_runs_with_adapters_on_experts_and_a_router_loss(path) -> None:
    config = {"_experts_implementation": path, "output_router_logits": True}
    is_same((EXPERTS, ATTENTION, EXPERTS), plain_runs(3), "qwen3_moe", config=config)


@pytest.mark.long
@SLOW
def test_runs_with_adapters_on_experts_in_triton_kernels(monkeypatch) -> None:
    """Interpreted, which writes weights back as they were: to an inspection, a change."""
    pytest.importorskip("triton", reason="Triton is not installed")
    monkeypatch.setattr(Engine, "_inspect", lambda *_args, **_more: None)
    config = {"_experts_implementation": "triton", "output_router_logits": True}
    runs = [RunStep(micro_batches=rows(seed, 5)) for seed in (1, 2)]
    is_same((EXPERTS, EXPERTS), runs, "qwen3_moe", config=config)


@pytest.mark.thorough
def test_runs_of_packed_rows_next_to_padded_ones() -> None:
    runs = plain_runs(2)
    runs[1] = replace(runs[1], micro_batches=rows(1, 7, 9, packed=True))
    is_same(MIXED[:2], runs)


@pytest.mark.thorough
@pytest.mark.parametrize(
    "options",
    [{"stash": "host"}, *(pytest.param(one, marks=SLOW) for one in ({}, {"num_kept_graphs": 2}))],
    ids=str,
)
def test_runs_of_different_objectives(options) -> None:
    """Plain fine-tuning, a loss with a reference, and one that reads rows it does not train on."""
    runs = [
        plain_runs(1)[0],
        RunStep(micro_batches=pairs(1, 2), objective=ByRow(sigmoid, num_trained=6), dropout_seed=3),
        RunStep(
            micro_batches=pairs(1, seed=1),
            scored=pairs(1, seed=2),
            objective=ByRow(against_scored, num_trained=2),
            dropout_seed=4,
        ),
        plain_runs(2)[1],
    ]
    is_same((ATTENTION, WIDE, DROPPING, LARGE), runs, num_steps=2, **options)


def test_a_run_against_plain_autograd() -> None:
    """The gradients of one of three runs, by a loop without the engine."""
    runs = plain_runs(3)
    _, _, gradients = together("qwen3", MIXED, runs)[2]
    model = own_model("qwen3", MIXED, 2).double()
    num = sum((batch["labels"][:, 1:] != -100).sum() for batch in runs[2].micro_batches)
    for batch in runs[2].micro_batches:
        logits_BTV = model(input_ids=batch["input_ids"], use_cache=False).logits[:, :-1]
        labels_BT = batch["labels"][:, 1:]
        loss = F.cross_entropy(logits_BTV.flatten(0, 1), labels_BT.flatten(), reduction="sum")
        (loss / num).backward()
    for path, parameter in model.named_parameters():
        if parameter.grad is not None:
            ours = gradients[path.replace(".default", "")]
            torch.testing.assert_close(ours.double(), parameter.grad, rtol=2e-4, atol=1e-7)


@pytest.mark.thorough
def test_a_step_loads_the_same_layers_however_many_runs_share_it() -> None:
    loads = []
    for num in (1, 3):
        engine = engine_of(joint_model("llama", [ATTENTION] * num))
        named = [replace(run, adapter=run_name(i)) for i, run in enumerate(plain_runs(num))]
        results = [engine.forward_backward_runs(named) for _ in range(2)][-1]
        loads.append({result.num_loads for result in results})
        engine.close()
    assert loads == [{2 * (NUM_LAYERS - 2)}] * 2


@pytest.mark.thorough
def test_a_run_that_leaves_changes_nothing_for_the_others() -> None:
    runs, model = plain_runs(3), joint_model("qwen3", MIXED)
    engine = engine_of(model)
    named = [replace(run, adapter=run_name(i)) for i, run in enumerate(runs)]
    engine.forward_backward_runs(named)
    results = engine.forward_backward_runs([named[0], named[2]])
    ours = [found(one, model, run_name(i)) for i, one in zip((0, 2), results, strict=True)]
    engine.close()
    expected = mixed_apart()
    assert_same(ours, [expected[0], expected[2]])


@pytest.mark.thorough
def test_a_run_whose_adapter_is_not_finite_harms_no_other() -> None:
    runs, model = plain_runs(3), joint_model("qwen3", MIXED)
    with torch.no_grad():
        for path, parameter in model.named_parameters():
            if run_name(1) in path.split("."):
                parameter.fill_(torch.nan)
    engine = engine_of(model)
    named = [replace(run, adapter=run_name(i)) for i, run in enumerate(runs)]
    results = [engine.forward_backward_runs(named) for _ in range(2)][-1]
    ours = [found(one, model, run_name(i)) for i, one in enumerate(results)]
    engine.close()
    assert_same(ours[::2], mixed_apart()[::2])
    assert ours[1][0] != ours[1][0]


@pytest.mark.thorough
def test_passes_of_their_own_use_one_adapter_and_change_no_flag() -> None:
    model = joint_model("qwen3", MIXED)
    flags = [parameter.requires_grad for parameter in model.parameters()]
    batch = rows(5, 10)[0]
    engine = engine_of(model)
    ours = []
    for number in range(3):
        with engine.using(run_name(number)):
            model.eval()
            with torch.no_grad():
                logits_BTV = model(input_ids=batch["input_ids"]).logits
            ours.append((engine.forward(batch).loss_sum, logits_BTV))
            model.train()
    assert flags == [parameter.requires_grad for parameter in model.parameters()]
    engine.close()
    for number, (loss, logits_BTV) in enumerate(ours):
        alone = own_model("qwen3", MIXED, number).eval()
        own = engine_of(alone)
        assert own.forward(batch).loss_sum == loss
        with torch.no_grad():
            assert torch.equal(alone(input_ids=batch["input_ids"]).logits, logits_BTV)
        own.close()
    assert len({loss for loss, _ in ours}) == 3


@pytest.mark.thorough
def test_a_run_may_have_the_adapter_of_another_as_its_reference() -> None:
    model = joint_model("llama", [ATTENTION, ATTENTION])
    for path, parameter in model.named_parameters():
        if run_name(1) in path.split("."):
            parameter.requires_grad_(requires_grad=False)
    engine = engine_of(model)
    objective = ByRow(sigmoid, num_trained=4, reference=Reference(adapter=run_name(1)))
    run = RunStep(micro_batches=pairs(2), adapter=run_name(0), objective=objective)
    engine.forward_backward_runs([run])
    assert objective.seen[0].reference_N is not None
    assert not torch.equal(objective.seen[0].reference_N, objective.seen[0].policy_N)
    engine.close()


# ---------------------------------------------------------------------------------------------
# What is refused


@pytest.mark.parametrize(
    ("adapters", "said"),
    [
        (["run0", "run0"], "two runs train the adapter 'run0'"),
        (["run0", None], "1 of 2 runs name no adapter"),
        (["run0", "other"], "has no adapter 'other' that trains"),
        ([], "0 of 0 runs"),
    ],
)
def test_runs_without_adapters_of_their_own_are_refused(adapters, said) -> None:
    model = joint_model("llama", [ATTENTION, ATTENTION])
    engine = engine_of(model)
    runs = [RunStep(micro_batches=rows(1, 8), adapter=adapter) for adapter in adapters]
    with pytest.raises(OffloadError, match=said):
        engine.forward_backward_runs(runs)
    assert all(parameter.grad is None for parameter in model.parameters())
    engine.close()


@pytest.mark.parametrize(
    ("changes", "trained", "said"),
    [
        ({}, "norm.weight", "and it is no adapter's"),
        ({"trained_weights": "host"}, "q_proj", "host"),
    ],
)
def test_weights_that_runs_would_share_are_refused(changes, trained, said) -> None:
    configs = [{**ATTENTION, "modules_to_save": ["k_proj"]}] * 2
    model = joint_model("llama", configs if changes else [ATTENTION, ATTENTION])
    for path, parameter in model.named_parameters():
        if not changes and path.endswith(trained) and "layernorm" not in path:
            parameter.requires_grad_()
    engine = engine_of(model, **changes)
    runs = [RunStep(micro_batches=rows(1, 8), adapter=run_name(i)) for i in range(2)]
    with pytest.raises(OffloadError, match=said):
        engine.forward_backward_runs(runs)
    engine.close()
