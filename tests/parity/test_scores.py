"""Log-probabilities under several adapters in one pass over the layers.

Grades: MOVE is to the bit, REORDER within rounding of plain transformers and peft.
"""

import copy
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn

from finetune.adapter.linear_lora import compute_beside, compute_in_base_dtype
from offload.engine.engine import Engine
from offload.engine.passes.scoring import ScoreResult
from offload.errors import OffloadError
from tests.parity.steps import MODELS, NUM_LAYERS, OPTIONS, micro_batches
from tests.tiers import mostly_slow

pytestmark = pytest.mark.usefixtures("one_thread")

EXPERTS = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
CONFIGS: dict[str, dict[str, Any]] = {
    "ranks": {"r": 2},
    "targets": {"r": 3, "target_modules": ["v_proj", "down_proj"]},
    "dora": {"use_dora": True},
    "whole": {"modules_to_save": ["embed_tokens", "norm", "input_layernorm"]},
    "outside": {"target_modules": ["q_proj", "lm_head"]},
}


def with_adapters(name: str, configs: dict[str, dict[str, Any]]) -> Any:
    """Return a model with an adapter for each config, all with weights drawn at random."""
    torch.manual_seed(0)
    model: Any = MODELS[name]()
    for number, (adapter, changes) in enumerate(configs.items()):
        options: dict[str, Any] = {"r": 4, "target_modules": ["q_proj", "o_proj"], "lora_alpha": 8}
        config = LoraConfig(**options | changes)
        if number:
            model.add_adapter(adapter, config)
        else:
            model = get_peft_model(model, config, adapter_name=adapter)
    with torch.no_grad():
        for path, parameter in model.named_parameters():
            if any(adapter in path.split(".") for adapter in configs):
                parameter += 0.1 * torch.randn(parameter.shape)
                parameter.requires_grad_(True)
    return model


def scored(
    model: nn.Module, adapters: Sequence[str | None], *, num: int = 3, **changes: Any
) -> ScoreResult:
    engine = Engine(model, device=torch.device("cpu"), options=replace(OPTIONS, **changes))
    try:
        return engine.score(micro_batches(num), adapters=adapters)
    finally:
        engine.detach()


def plainly(model: Any, adapter: str | None) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Return log-probabilities and greedy matches of each micro-batch by transformers and peft."""
    model = copy.deepcopy(model).eval()
    if adapter is None:
        model = model.unload()
    else:
        model.base_model.set_adapter(adapter)
    found = []
    for batch in micro_batches():
        with torch.no_grad():
            logits = model(
                input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]
            ).logits[:, :-1]
        labels = batch["labels"][:, 1:]
        logps = logits.float().log_softmax(-1).gather(-1, labels.clamp(min=0)[..., None])[..., 0]
        is_label = labels != -100
        found.append((logps[is_label], (logits.argmax(-1) == labels)[is_label]))
    return found


def assert_plain(model: Any, result: ScoreResult, adapters: Sequence[str | None]) -> None:
    for adapter, found in zip(adapters, result.scores, strict=True):
        for one, (logps_N, is_greedy_N) in zip(found, plainly(model, adapter), strict=True):
            assert one.logps_N.dtype == torch.float32
            assert torch.allclose(one.logps_N, logps_N, rtol=1e-5, atol=1e-5), adapter
            assert torch.equal(one.is_greedy_N, is_greedy_N), adapter


def assert_same(found: ScoreResult, expected: ScoreResult) -> None:
    for ones, others in zip(found.scores, expected.scores, strict=True):
        for one, other in zip(ones, others, strict=True):
            assert torch.equal(one.logps_N, other.logps_N)
            assert torch.equal(one.is_greedy_N, other.is_greedy_N)
            assert torch.equal(one.rows_N, other.rows_N)


@pytest.mark.parametrize("is_training", mostly_slow([True, False], True))
def test_reorder_each_adapter_scores_as_plain_peft_with_it_alone(is_training: bool) -> None:
    model = with_adapters("llama", CONFIGS | {"drops": {"lora_dropout": 0.5}})
    plain = copy.deepcopy(model)
    compute_in_base_dtype(model)
    adapters = [None, *CONFIGS, "drops"]
    result = scored(model.train(is_training), adapters)
    assert_plain(plain, result, adapters)
    sums = {float(sum(one.logps_N.sum() for one in found)) for found in result.scores}
    assert len(sums) == len(adapters)  # no two adapters are alike


@pytest.mark.thorough
@pytest.mark.parametrize("name", mostly_slow(["qwen3_moe", "gpt_oss"], "gpt_oss"))
def test_reorder_adapters_on_experts_score_as_plain_peft(name: str) -> None:
    configs = {n: {"r": r, "target_parameters": EXPERTS} for n, r in (("one", 2), ("two", 4))}
    model = with_adapters(name, configs | {"attention": {"r": 2}})
    adapters = ["two", None, "one", "attention"]
    plain = copy.deepcopy(model)
    assert_plain(plain, scored(compute_beside(model), adapters), adapters)


@pytest.mark.thorough
@pytest.mark.parametrize("name", mostly_slow(["llama", "qwen3_moe", "gemma3_text"], "qwen3_moe"))
def test_move_streamed_scores_are_those_of_the_resident_model(name: str) -> None:
    experts = {"target_parameters": EXPERTS} if name == "qwen3_moe" else {}
    model = with_adapters(name, {"one": experts, "two": {"r": 2} | experts})
    compute_in_base_dtype(compute_beside(model))
    adapters = [None, "two", "one"]
    resident = scored(copy.deepcopy(model), adapters, num_slots=NUM_LAYERS)
    assert_same(scored(copy.deepcopy(model), adapters), resident)
    for codec in ("int8", "nf4"):
        expected = scored(copy.deepcopy(model), adapters, codec=codec, num_slots=NUM_LAYERS)
        assert_same(scored(copy.deepcopy(model), adapters, codec=codec), expected)


@pytest.mark.thorough
def test_move_an_adapter_scores_among_others_as_it_does_alone() -> None:
    model = with_adapters("llama", CONFIGS)
    compute_in_base_dtype(model)
    adapters = [None, *CONFIGS]
    together = scored(copy.deepcopy(model), adapters)
    engine = Engine(model, device=torch.device("cpu"), options=OPTIONS)
    for number, adapter in enumerate(adapters):
        alone = engine.score(micro_batches(), adapters=[adapter])
        assert_same(replace(together, scores=together.scores[number : number + 1]), alone)
    engine.detach()


@pytest.mark.thorough
def test_the_loads_depend_on_neither_the_adapters_nor_the_micro_batches() -> None:
    model = with_adapters("llama", CONFIGS)
    for num, adapters in ((1, [None]), (1, [None, *CONFIGS]), (3, [None, *CONFIGS])):
        engine = Engine(model, device=torch.device("cpu"), options=OPTIONS)
        first, second = (engine.score(micro_batches(num), adapters=adapters) for _ in range(2))
        engine.detach()
        assert first.num_loads == second.num_loads == NUM_LAYERS  # the ring holds the last ones
        assert first.num_passes == num * len(adapters)


def test_scoring_changes_neither_the_model_nor_its_gradients() -> None:
    model = with_adapters("llama", {"one": {"lora_dropout": 0.5}, "two": {}}).train()
    model.base_model.set_adapter("two")
    engine = Engine(model, device=torch.device("cpu"), options=OPTIONS)
    before = torch.get_rng_state()
    engine.score(micro_batches(), adapters=["one", None])
    assert torch.equal(torch.get_rng_state(), before)
    assert all(module.training for module in model.modules())
    assert model.active_adapters == ["two"]
    assert all(parameter.grad is None for parameter in model.parameters())
    engine.forward_backward(micro_batches())
    graded = {name for name, p in model.named_parameters() if p.grad is not None}
    engine.detach()
    assert graded
    assert all(".two." in name for name in graded)


def test_a_model_without_adapters_is_scored_as_it_is() -> None:
    torch.manual_seed(0)
    model = MODELS["llama"]()
    model.requires_grad_(False)
    result = scored(model, [None])
    with torch.no_grad():
        batch = micro_batches()[0]
        expected = model.eval()(**{k: v for k, v in batch.items() if k != "labels"}).logits
    labels = batch["labels"][:, 1:]
    logps = expected[:, :-1].log_softmax(-1).gather(-1, labels.clamp(min=0)[..., None])[..., 0]
    (scores, *_) = result.scores[0]
    assert torch.allclose(scores.logps_N, logps[labels != -100], rtol=1e-5, atol=1e-5)
    assert scores.num_rows == 2
    assert scores.rows_N.tolist() == [0] * 8 + [1] * 5


@pytest.mark.parametrize(
    ("adapters", "message"),
    [
        ([], "adapters is empty"),
        (["one", "one"], "adapters names 'one' twice"),
        ([None, None], "adapters names None twice"),
        (["three"], "LlamaForCausalLM has no adapter 'three'"),
    ],
)
def test_adapters_that_cannot_be_scored_are_refused(adapters: list[Any], message: str) -> None:
    with pytest.raises(OffloadError, match=message):
        scored(with_adapters("llama", {"one": {}}), adapters)


def test_an_adapter_that_is_merged_is_refused() -> None:
    model = with_adapters("llama", {"one": {}, "two": {}})
    model.merge_adapter(["one"])
    with pytest.raises(OffloadError, match="is merged into its weights"):
        scored(model, ["two"])
