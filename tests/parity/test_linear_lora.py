"""Adapters of linear layers computed in the base's dtype, against peft's own forward."""

import copy
import warnings
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from torch import nn

import offload
from finetune.adapter.linear_lora import Linear, compute_in_base_dtype
from offload.engine.batch import Batch
from offload.engine.visit_cache import VISIT_CACHE
from tests.counted import Counted
from tests.parity.architectures import (
    Gradients,
    gradients,
    micro_batches,
    plain,
    rel_error,
    streamed,
    truth,
)
from tests.parity.held_choices import HeldChoices
from tests.parity.tiny_models import NUM_LAYERS, tiny_model
from tests.tiers import mostly_slow

TYPES = ("qwen3", "gemma2", "phi3", "glm4_moe", "deepseek_v3", "qwen3_next", "gpt_neox", "cohere")
MIXTURES = ("qwen3_moe", "mixtral", "olmoe", "gpt_oss")
DORA = ("qwen2", "qwen3", "phi3", "gpt_neox", "cohere")  # qwen2 and gpt_neox have biases
MAX_SEEDS = 24


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def adapted(model_type: str, *, seed: int = 0, **settings: Any) -> PeftModel:
    """Return a tiny model whose linears all have an adapter of peft, with B other than zero."""
    base: Any = tiny_model(model_type, seed=seed)
    torch.manual_seed(seed)
    config = LoraConfig(r=3, lora_alpha=6, target_modules="all-linear", **settings)
    model = get_peft_model(base, config)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(parameter, std=0.05)
        elif "lora_magnitude" in name:
            parameter.data *= 0.5 + torch.rand_like(parameter)
    return model


def grouped(model: PeftModel) -> PeftModel:
    model = copy.deepcopy(model)
    compute_in_base_dtype(model)
    assert any(isinstance(module, Linear) for module in model.modules())
    return model


@pytest.mark.parametrize(
    ("model_type", "use_dora"),
    mostly_slow(
        [*((name, False) for name in TYPES), *((name, True) for name in DORA)],
        ("phi3", False),
        ("qwen2", True),
    ),
)
def test_reorder_fp32_gradients_are_those_of_peft(model_type: str, use_dora: bool) -> None:
    model, batches = adapted(model_type, use_dora=use_dora), micro_batches()
    loss, ours = streamed(grouped(model), batches, num_slots=2)
    resident_loss, resident = streamed(grouped(model), batches, num_slots=8)
    assert loss == resident_loss
    assert all(torch.equal(ours[name], resident[name]) for name in resident)
    plain_loss, theirs = plain(model, batches)
    assert ours.keys() == theirs.keys()
    assert loss == pytest.approx(plain_loss, rel=1e-6)
    assert rel_error(ours, theirs) < 1e-6
    for name, gradient in theirs.items():
        assert ours[name].dtype == torch.float32
        assert (ours[name] - gradient).norm() <= 2e-6 * gradient.norm() + 1e-9, name


def under_autocast(model: PeftModel, batches: Sequence[Batch]) -> Gradients:
    with torch.autocast("cpu", torch.bfloat16):
        return plain(model, batches)[1]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model_type", "use_dora"),
    [*((name, False) for name in (*TYPES, *MIXTURES)), *((name, True) for name in DORA)],
)
def test_reorder_bf16_gradients_are_no_worse_than_those_of_peft_under_autocast(
    model_type: str, use_dora: bool
) -> None:
    """Both take the experts that float64 takes."""
    squares = {"ours": 0.0, "peft": 0.0}
    for seed in range(MAX_SEEDS):
        model, batches = adapted(model_type, seed=seed, use_dora=use_dora), micro_batches()
        for name, parameter in model.named_parameters():
            if "lora_" not in name:
                parameter.data = parameter.data.bfloat16()
        with HeldChoices() as noted:
            exact = truth(model, batches)
        assert exact is not None
        assert noted.notes or model_type not in MIXTURES
        with HeldChoices(noted):
            found = streamed(grouped(model), batches, num_slots=2)[1]
        with HeldChoices(noted):
            theirs = under_autocast(model, batches)
        squares["ours"] += rel_error(found, exact) ** 2
        squares["peft"] += rel_error(theirs, exact) ** 2
        if seed >= 3 and squares["ours"] <= squares["peft"]:
            return
    pytest.fail(f"squared errors {squares}")


def test_choices_that_rounding_would_move_are_held_and_keep_their_gradient() -> None:
    scores = torch.tensor([[0.500, 0.501, 0.2], [0.1, 0.7, 0.701]], dtype=torch.float64)
    with HeldChoices() as noted:
        first = scores.topk(1).indices
    moved = torch.tensor([[0.502, 0.501, 0.2], [0.1, 0.702, 0.701]], requires_grad=True)
    with HeldChoices(noted) as held:
        values, chosen = torch.topk(moved, 1, dim=-1)
        other = torch.topk(-moved, 1).indices  # scores of which there is no note
    assert held.num_moved == 2
    assert torch.equal(chosen, first)
    assert torch.equal(values, moved.gather(1, first))
    assert other.tolist() == [[2], [0]]
    values.sum().backward()
    assert moved.grad is not None
    assert torch.equal(moved.grad.nonzero()[:, 1:], first)


def test_sides_of_a_relu_that_rounding_would_move_are_held_and_keep_their_gradient() -> None:
    with HeldChoices() as noted:
        torch.relu(torch.tensor([0.001, -0.001, 0.5, -0.5], dtype=torch.float64))
    moved = torch.tensor([-0.001, 0.001, 0.5, -0.5], requires_grad=True)
    with HeldChoices(noted) as held:
        values = nn.ReLU()(moved)
        other = torch.relu(-moved)  # values of which there is no note
    assert held.num_moved == 2
    assert torch.equal(values, moved.detach() * torch.tensor([1.0, 0.0, 1.0, 0.0]))
    assert torch.equal(other, (-moved).clamp(min=0))
    values.sum().backward()
    assert moved.grad is not None
    assert moved.grad.tolist() == [1.0, 0.0, 1.0, 0.0]


@pytest.mark.parametrize("settings", [{"lora_dropout": 0.3}, {"use_rslora": True}])
def test_reorder_dropout_and_scaling_are_those_of_peft(settings: dict[str, Any]) -> None:
    model, batches = adapted("qwen3", **settings).train(), micro_batches()
    torch.manual_seed(5)
    _, theirs = plain(model, batches)
    torch.manual_seed(5)
    _, ours = plain(grouped(model), batches)
    assert rel_error(ours, theirs) < 1e-6


def test_two_adapters_at_once_are_summed_as_in_peft() -> None:
    model, batches = adapted("qwen3"), micro_batches()
    model.add_adapter("other", LoraConfig(r=2, lora_alpha=8, target_modules=["q_proj", "up_proj"]))
    for name, parameter in model.named_parameters():
        if "lora_B.other" in name:
            nn.init.normal_(parameter, std=0.05)
    model.base_model.set_adapter(["default", "other"])  # type: ignore[operator]  # peft's
    _, theirs = plain(model, batches)
    _, ours = plain(grouped(model), batches)
    assert ours.keys() == theirs.keys()
    assert rel_error(ours, theirs) < 1e-6


@pytest.mark.parametrize("settings", [{"use_dora": True, "lora_dropout": 0.3}, {"lora_bias": True}])
def test_move_what_is_not_plain_lora_stays_with_peft(settings: dict[str, Any]) -> None:
    model, batches = adapted("qwen3", **settings).train(), micro_batches()
    torch.manual_seed(5)
    _, theirs = plain(model, batches)
    torch.manual_seed(5)
    _, ours = plain(grouped(model), batches)
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


def test_move_an_adapter_that_is_left_to_peft_stays_with_it() -> None:
    """Runs that share their steps may have been begun at another precision each."""
    model, batches = adapted("qwen3", use_dora=True), micro_batches()
    ours: Any = copy.deepcopy(model)
    compute_in_base_dtype(ours, by_peft=["default"])
    expected, found = plain(model, batches)[1], plain(ours, batches)[1]
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    ours.add_adapter("other", LoraConfig(r=2, target_modules=["q_proj"], use_dora=True))
    linear = ours.get_base_model().model.layers[0].self_attn.q_proj
    x = torch.randn(1, 3, linear.in_features)
    assert not linear.is_plain(x)
    ours.set_adapter("other")
    assert linear.is_plain(x)


@pytest.mark.parametrize("use_dora", [False, True])
def test_adapters_that_are_off_or_merged_leave_the_base(use_dora: bool) -> None:
    model = grouped(adapted("qwen3", use_dora=use_dora)).eval()
    ids = torch.arange(8)[None]
    with torch.no_grad():
        adapted_logits = model(input_ids=ids).logits
        with model.disable_adapter():
            without = model(input_ids=ids).logits
        model.merge_adapter()
        merged = model(input_ids=ids).logits
        model.unmerge_adapter()
    assert not torch.allclose(adapted_logits, without, atol=1e-3)
    torch.testing.assert_close(merged, adapted_logits, rtol=1e-4, atol=1e-5)


def test_adapters_may_be_switched_off_within_a_visit() -> None:
    model: Any = grouped(adapted("qwen3")).eval()
    linear = model.get_base_model().model.layers[0].self_attn.o_proj
    x = torch.randn(1, 3, linear.in_features)
    VISIT_CACHE.enter("a visit")
    try:
        with torch.no_grad():
            with_adapter = linear(x)
            linear.enable_adapters(False)
            without = linear(x)
            linear.enable_adapters(True)
            again = linear(x)
            base = linear.base_layer(x)
    finally:
        VISIT_CACHE.enter(None)
    assert torch.equal(without, base)
    assert not torch.allclose(with_adapter, base)
    assert torch.equal(again, with_adapter)


def test_a_step_computes_each_norm_of_dora_once_and_the_next_step_its_own() -> None:
    model, batches = grouped(adapted("qwen3", use_dora=True)), micro_batches()
    num_norms = sum(isinstance(module, Linear) for module in model.modules())
    twin = copy.deepcopy(model)
    engine = offload.attach(model, num_slots=2, device="cpu", head_chunk_tokens=7)
    engine.forward_backward(batches, dropout_seed=0)  # inspects the layers before
    for _ in range(2):
        for one in (model, twin):
            for name, parameter in one.named_parameters():
                if "lora_" in name:
                    parameter.grad = None
                    parameter.data.mul_(1.5)
        with Counted() as counted:
            loss = engine.forward_backward(batches, dropout_seed=0).loss
        assert counted.num_ops["linalg_vector_norm"] == num_norms
        wanted_loss, wanted = streamed(twin, batches, num_slots=NUM_LAYERS)
        assert loss == wanted_loss
        assert all(torch.equal(g, wanted[name]) for name, g in gradients(model).items())
    engine.detach()


ODD_ADAPTER = LoraConfig(
    r=2, target_modules=["q_proj", "k_proj", "v_proj"], init_lora_weights=False
)


class Odd(nn.Module):
    """Reads another input for each of its linears."""

    def __init__(self) -> None:
        super().__init__()
        self.q_proj, self.k_proj, self.v_proj = (nn.Linear(6, 4) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.q_proj(x) + self.k_proj(x * 2) * self.v_proj(x)


def test_linears_that_read_different_inputs_compute_by_themselves() -> None:
    torch.manual_seed(0)
    model = get_peft_model(Odd(), ODD_ADAPTER)
    ours, x = copy.deepcopy(model), torch.randn(3, 6)
    compute_in_base_dtype(ours)
    for _ in range(2):
        wanted, found = model(x), ours(x)
        torch.testing.assert_close(found, wanted)
        wanted.square().sum().backward()
        found.square().sum().backward()
        for (name, one), other in zip(model.named_parameters(), ours.parameters(), strict=True):
            if one.requires_grad:
                torch.testing.assert_close(other.grad, one.grad, msg=name)


def test_an_input_that_changes_in_place_is_not_taken_for_the_same() -> None:
    class InPlace(Odd):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = x.clone()
            return self.q_proj(x) + self.k_proj(x.mul_(2)) + self.v_proj(x)

    torch.manual_seed(0)
    model = get_peft_model(InPlace(), ODD_ADAPTER)
    ours, x = copy.deepcopy(model), torch.randn(3, 6)
    compute_in_base_dtype(ours)
    with torch.no_grad():
        for _ in range(2):
            torch.testing.assert_close(ours(x), model(x))


def test_a_pass_that_was_cut_off_between_siblings_changes_no_later_bit() -> None:
    class Failing(Odd):
        fails = False

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            q = self.q_proj(x)
            if self.fails:
                raise ValueError("cut off")
            return q + self.k_proj(x) * self.v_proj(x)

    torch.manual_seed(0)
    ours: Any = get_peft_model(Failing(), ODD_ADAPTER)
    compute_in_base_dtype(ours)
    x = torch.randn(3, 6)
    with torch.no_grad():
        before = ours(x)
        ours.base_model.model.fails = True
        with pytest.raises(ValueError, match="cut off"):
            ours(torch.randn(3, 6))
        ours.base_model.model.fails = False
        assert torch.equal(ours(x), before)
        assert ours.base_model.model.k_proj.siblings._share


def test_hooks_on_a_and_b_still_run() -> None:
    torch.manual_seed(0)
    model: Any = get_peft_model(Odd(), ODD_ADAPTER)
    model.base_model.model.k_proj.lora_A["default"].register_forward_hook(lambda *a: a[-1] * 3)
    ours, x = copy.deepcopy(model), torch.randn(3, 6)
    compute_in_base_dtype(ours)
    torch.testing.assert_close(ours(x), model(x))


@pytest.mark.parametrize("shape", [(6,), (0, 6), (1, 1, 6)])
def test_inputs_of_any_shape_are_taken(shape: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    model = get_peft_model(Odd(), ODD_ADAPTER)
    ours, x = copy.deepcopy(model), torch.randn(*shape)
    compute_in_base_dtype(ours)
    torch.testing.assert_close(ours(x), model(x))


def test_a_second_derivative_is_refused_and_not_wrong() -> None:
    torch.manual_seed(0)
    ours = get_peft_model(Odd(), ODD_ADAPTER)
    compute_in_base_dtype(ours)
    x = torch.randn(3, 6).requires_grad_()
    (first,) = torch.autograd.grad(ours(x).square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        first.sum().backward()
