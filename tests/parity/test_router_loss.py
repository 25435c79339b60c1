"""The router's auxiliary loss, over all layers at once, is that of the plain model."""

import copy
import sys
from collections.abc import Callable, Sequence
from typing import Any, cast

import pytest
import torch
from torch import nn

import offload
from finetune.model.load import set_router_loss
from offload.engine.batch import Batch
from offload.engine.model.layers import LayeredModel
from offload.errors import OffloadError, UnsupportedModelError
from offload.plan.schedule.schedule import Order
from tests.parity.architectures import (
    SLACK,
    Gradients,
    causal_types,
    gradients,
    micro_batches,
    rel_error,
    streamed,
)
from tests.parity.router_loss import plain, plain_over_step
from tests.parity.tiny_models import balanced, tiny_model, with_adapters
from tests.tiers import mostly_slow

pytestmark = pytest.mark.usefixtures("one_thread")
COMMON = ("gpt_oss", "qwen3_moe")
OTHERS = (
    "dbrx",
    "deepseek_v4",
    "ernie4_5_moe",
    "flex_olmo",
    "flint",
    "granitemoe",
    "granitemoe_swa",
    "granitemoehybrid",
    "granitemoeshared",
    "jamba",
    "laguna",
    "mellum",
    "minimax",
    "minimax_m2",
    "minimax_m3_vl_text",
    "mixtral",
    "olmoe",
    "phimoe",
    "qwen2_moe",
    "qwen3_5_moe_text",
    "qwen3_next",
    "qwen4_exp_text",
)


def step(
    model: nn.Module,
    batches: Sequence[Batch],
    *,
    num_slots: int = 2,
    num_label_tokens: int | None = None,
    add_up: Callable[[torch.Tensor], torch.Tensor] = lambda own: own,
    **options: Any,
) -> tuple[float, Gradients]:
    """Return loss and gradients of one step of the engine."""
    model = copy.deepcopy(model)
    engine = offload.attach(
        model, num_slots=num_slots, device="cpu", head_chunk_tokens=7, **options
    )
    try:
        result = engine.forward_backward(
            batches, dropout_seed=0, add_up=add_up, num_label_tokens=num_label_tokens
        )
        return result.loss, gradients(model)
    finally:
        engine.detach()


def truth(model: nn.Module, batches: Sequence[Batch]) -> Gradients:
    model = copy.deepcopy(model).double()
    config: Any = model.config
    config._experts_implementation = "eager"
    return plain_over_step(model, batches)[1]


def check(model_type: str) -> None:
    """Compare to the bit with the resident step, and with the plain model over several models."""
    batches = micro_batches()
    ours_squared = plain_squared = 0.0
    for seed in range(8):
        model = balanced(model_type, seed=seed)
        loss, ours = step(model, batches)
        resident_loss, resident = step(model, batches, num_slots=8)
        assert loss == resident_loss
        assert all(torch.equal(ours[name], resident[name]) for name in ours)
        plain_loss, expected = plain_over_step(model, batches)
        assert loss == pytest.approx(plain_loss, rel=1e-6)
        assert rel_error(ours, expected) < 2e-6
        true = truth(model, batches)
        ours_squared += rel_error(ours, true) ** 2
        plain_squared += rel_error(expected, true) ** 2
    assert ours_squared <= SLACK**2 * plain_squared


@pytest.mark.slow
@pytest.mark.parametrize("model_type", COMMON)
def test_reorder_a_router_loss_of_a_step_is_that_of_all_its_tokens(model_type: str) -> None:
    check(model_type)


@pytest.mark.exhaustive
@pytest.mark.parametrize("model_type", [name for name in OTHERS if name in causal_types()])
def test_reorder_a_router_loss_is_that_of_all_tokens_in_other_types(model_type: str) -> None:
    check(model_type)


@pytest.mark.thorough
@pytest.mark.parametrize("model_type", mostly_slow(COMMON, "qwen3_moe"))
def test_reorder_a_router_loss_of_one_micro_batch_is_the_plain_models(model_type: str) -> None:
    model, batches = balanced(model_type), micro_batches()[:1]
    loss, ours = step(model, batches)
    plain_loss, expected = plain(model, batches)
    assert loss == pytest.approx(plain_loss, rel=1e-6)
    assert rel_error(ours, expected) < 2e-6


def test_the_router_loss_is_in_the_loss_and_in_the_gradients() -> None:
    batches = micro_batches()
    small, large = balanced("mixtral", coefficient=0.0), balanced("mixtral", coefficient=0.5)
    without, with_loss = (
        streamed(small, batches, num_slots=2),
        streamed(large, batches, num_slots=2),
    )
    assert with_loss[0] > without[0] + 0.4
    assert rel_error(with_loss[1], without[1]) > 1e-3


@pytest.mark.thorough
@pytest.mark.parametrize("model_type", mostly_slow(COMMON, "qwen3_moe"))
def test_reorder_a_coefficient_that_is_set_later_is_that_of_transformers_own(
    model_type: str,
) -> None:
    asked: dict[str, Any] = {"output_router_logits": True, "router_aux_loss_coef": 0.25}
    silent: Any = tiny_model(model_type, output_router_logits=False, router_aux_loss_coef=0.001)
    with_loss: Any = tiny_model(model_type, **asked)
    set_router_loss(silent, 0.25)
    models = [with_adapters(m, LayeredModel(m).layers) for m in (silent, with_loss)]
    batches = micro_batches()[:1]
    loss, ours = step(models[0], batches)
    plain_loss, reference = plain(models[1], batches)
    assert loss == pytest.approx(plain_loss, rel=1e-6)
    assert rel_error(ours, reference) < 2e-6


@pytest.mark.thorough
def test_a_coefficient_of_zero_leaves_out_what_the_config_asks_for() -> None:
    silent: Any = tiny_model("mixtral", output_router_logits=False)
    asking: Any = tiny_model("mixtral", output_router_logits=True, router_aux_loss_coef=0.5)
    set_router_loss(asking, 0.0)
    models = [with_adapters(m, LayeredModel(m).layers) for m in (silent, asking)]
    losses = [streamed(model, micro_batches(), num_slots=2)[0] for model in models]
    assert losses[0] == losses[1]


@pytest.mark.thorough
def test_micro_batches_without_a_mask_are_counted_whole() -> None:
    batches = [{k: v for k, v in b.items() if k != "attention_mask"} for b in micro_batches()]
    model = balanced("mixtral")
    loss, ours = step(model, batches)
    plain_loss, expected = plain_over_step(model, batches)
    assert loss == pytest.approx(plain_loss, rel=1e-6)
    assert rel_error(ours, expected) < 2e-6


def without_labels(batch: Batch) -> Batch:
    return {**batch, "labels": torch.full_like(batch["labels"], -100)}


@pytest.mark.thorough
def test_tokens_without_labels_are_routed_and_count_over_a_step() -> None:
    first, second, third = micro_batches()
    model, batches = balanced("qwen3_moe"), [first, without_labels(second), third]
    loss, ours = step(model, batches)
    plain_loss, expected = plain_over_step(model, batches)
    assert loss == pytest.approx(plain_loss, rel=1e-6)
    assert rel_error(ours, expected) < 2e-6


def rows() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    return [torch.randint(3, 64, (length,), generator=generator) for length in (17, 12, 9, 4, 11)]


def padded(*rows: torch.Tensor) -> Batch:
    width = max(map(len, rows))
    ids = torch.stack([nn.functional.pad(row, (0, width - len(row))) for row in rows])
    mask = torch.stack([(torch.arange(width) < len(row)).long() for row in rows])
    return {
        "input_ids": ids,
        "labels": ids.masked_fill(mask == 0, -100),
        "attention_mask": mask,
    }


def packed(*rows: torch.Tensor) -> Batch:
    ids = torch.cat(rows).unsqueeze(0)
    return {"input_ids": ids, "labels": ids, "row_lens": torch.tensor([len(row) for row in rows])}


def cuts() -> dict[str, list[Batch]]:
    a, b, c, d, e = rows()
    return {
        "one by one": [padded(row) for row in rows()],
        "unequal": [padded(a, b, c), padded(d, e)],
        "packed": [packed(a, d), packed(b, c, e)],
        "packed all, and one padded": [packed(e, d, c, b), padded(a)],
    }


@pytest.mark.thorough
@pytest.mark.parametrize("cut", mostly_slow(list(cuts()), "packed all, and one padded"))
def test_any_cut_of_a_step_gives_its_router_loss_and_gradients(cut: str) -> None:
    model = balanced("qwen3_moe")
    plain_loss, expected = plain_over_step(model, [padded(*rows())])
    loss, ours = step(model, cuts()[cut])
    assert loss == pytest.approx(plain_loss, rel=1e-6)
    assert rel_error(ours, expected) < 2e-6


@pytest.mark.slow
@pytest.mark.parametrize("model_type", ["gpt_oss", "mixtral", "qwen3_next", "granitemoehybrid"])
@pytest.mark.parametrize("cut", cuts())
def test_any_cut_gives_other_types_router_loss(model_type: str, cut: str) -> None:
    model = balanced(model_type)
    plain_loss, expected = plain_over_step(model, [padded(row) for row in rows()])
    loss, ours = step(model, cuts()[cut])
    assert loss == pytest.approx(plain_loss, rel=1e-6)
    assert rel_error(ours, expected) < 4e-6


def test_a_router_loss_of_a_step_is_exact_in_float64() -> None:
    model = balanced("mixtral", coefficient=1e9).double()  # so large that tokens' losses, which
    cast("Any", model).config._experts_implementation = "eager"  # are in float32, are nothing
    _, expected = plain_over_step(model, [padded(*rows())])
    _, ours = step(model, cuts()["packed"])
    assert rel_error(ours, expected) < 1e-13


@pytest.mark.thorough
@pytest.mark.parametrize(
    "options",
    mostly_slow(
        {
            str(options): (options,)
            for options in (
                {"num_slots": 8},
                {"stash": "host"},
                {"kept_graphs": 1},
                {"sent_graphs": 2},
                {"kept_graphs": 1, "sent_graphs": 1, "stash": "host"},
            )
        },
        str({"kept_graphs": 1, "sent_graphs": 1, "stash": "host"}),
    ),
)
def test_move_a_router_loss_of_a_step_is_the_same_wherever_things_wait(
    options: dict[str, Any],
) -> None:
    model = balanced("qwen3_moe")
    loss, ours = step(model, cuts()["packed"])
    other_loss, others = step(model, cuts()["packed"], **options)
    assert loss == other_loss
    assert all(torch.equal(ours[name], others[name]) for name in ours)


@pytest.mark.thorough
def test_processes_that_share_a_step_share_its_router_loss() -> None:
    model, batches = balanced("qwen3_moe"), cuts()["unequal"]
    plain_loss, expected = plain_over_step(model, batches)
    sums: list[torch.Tensor] = []

    def note(own: torch.Tensor) -> torch.Tensor:
        sums.append(own)
        return own

    for batch in batches:
        step(model, [batch], add_up=note)
    assert len(sums) == 2
    num = sum(int((batch["labels"][:, 1:] != -100).sum()) for batch in batches)
    parts = [
        step(model, [batch], add_up=lambda _: sums[0] + sums[1], num_label_tokens=num)
        for batch in batches
    ]
    assert sum(loss for loss, _ in parts) == pytest.approx(plain_loss, rel=1e-6)
    ours = {name: parts[0][1][name] + parts[1][1][name] for name in expected}
    assert rel_error(ours, expected) < 2e-6


def test_micro_batches_one_after_another_cannot_share_a_router_loss() -> None:
    model = balanced("mixtral")
    engine = offload.attach(model, num_slots=2, device="cpu")
    order = Order.MICRO_BATCH_MAJOR
    with pytest.raises(OffloadError, match="the step, and order is micro_batch_major"):
        engine.forward_backward(micro_batches(), order=order)
    assert all(p.grad is None for p in model.parameters())
    engine.detach()


def test_a_router_loss_of_another_formula_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    model = balanced("mixtral")
    code = sys.modules["transformers.models.mixtral.modeling_mixtral"]
    own = cast("Any", code).load_balancing_loss_func

    def squared(gate_logits: Any, num_experts: Any, top_k: Any = 2, attention_mask: Any = None):
        return own(gate_logits, num_experts, top_k, attention_mask) ** 2

    monkeypatch.setattr(code, "load_balancing_loss_func", squared)
    what = "has a `load_balancing_loss_func` that is not that of sums over tokens"
    with pytest.raises(UnsupportedModelError, match=what):
        offload.attach(model, num_slots=2, device="cpu")


# ------------------------------------------------------------------------------------- elsewhere


@pytest.mark.thorough
def test_an_evaluation_has_no_router_loss() -> None:
    batch = micro_batches()[0]
    losses = []
    for coefficient in (0.0, 0.5):
        engine = offload.attach(
            balanced("mixtral", coefficient=coefficient), num_slots=2, device="cpu"
        )
        losses.append(engine.forward(batch).loss_sum)
        engine.detach()
    assert losses[0] == losses[1]


@pytest.mark.thorough
def test_the_setting_is_on_again_after_a_step_and_no_hook_is_left() -> None:
    model: Any = balanced("mixtral")
    num_hooks = sum(len(module._forward_hooks) for module in model.modules())
    engine = offload.attach(model, num_slots=2, device="cpu")
    engine.forward_backward(micro_batches())
    engine.detach()
    assert model.config.output_router_logits is True
    assert sum(len(module._forward_hooks) for module in model.modules()) == num_hooks


@pytest.mark.parametrize(
    ("model_type", "what"),
    [
        ("deepseek_v3", "DeepseekV3ForCausalLM has no `load_balancing_loss_func` in its module"),
        ("doge", "DogeForCausalLM has a `load_balancing_loss_func` that takes other arguments"),
        ("jetmoe", "JetMoeForCausalLM has no `router_aux_loss_coef`"),
    ],
)
def test_a_router_loss_of_another_kind_is_refused(model_type: str, what: str) -> None:
    base = tiny_model(model_type, output_router_logits=True)
    with pytest.raises(offload.UnsupportedModelError, match=f"the router loss is on, and {what}"):
        offload.attach(base, num_slots=2, device="cpu")
