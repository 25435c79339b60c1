"""Prefix tuning layer by layer against plain transformers and peft, with peft's own cache."""

import copy
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PrefixTuningConfig, get_peft_model
from torch.nn import functional

from finetune.adapter.virtual_tokens import add_prefix
from finetune.errors import ConfigError
from finetune.recipe.sections import AdapterSection
from tests.parity.architectures import read_table
from tests.parity.generations import attached, generated, plain, prompts
from tests.parity.tiny_models import tiny_model
from tests.tiers import mostly_slow, tiered

pytestmark = pytest.mark.usefixtures("one_thread")
FEW, OVER_WINDOW = 3, 12  # tokens; windows of the models are of 8
TABLE = read_table(Path(__file__).parents[2] / "docs" / "architectures.md")
REFUSED = {
    *("axk1", "axk2", "bailing_hybrid", "bamba", "dbrx", "deepseek_v2", "deepseek_v3"),
    *("deepseek_v32", "deepseek_v4", "dots3_note", "dots3_note_text", "falcon", "falcon_h1"),
    *("falcon_mamba", "gemma4", "gemma4_text", "gemma4_unified", "gemma4_unified_text"),
    *("glm4_moe_lite", "granitemoehybrid", "inkling_text", "jamba", "kimi_linear", "lfm2"),
    *("lfm2_moe", "lfm3", "longcat_flash", "mamba", "mamba2", "mimo_v2_flash", "minicpm3"),
    *("minimax", "mpt", "nemotron_h", "olmo_hybrid", "openai-gpt", "qwen3_5", "qwen3_5_moe"),
    *("qwen3_5_moe_text", "qwen3_5_text", "qwen3_next", "qwen4_exp", "qwen4_exp_text"),
    *("recurrent_gemma", "rwkv", "xglm", "xlstm", "youtu", "zamba", "zamba2"),
}
"""Exact types whose layers keep something else, or keys of sizes that peft does not find."""
EXACT = [name for name, verdict in TABLE.verdicts.items() if verdict.is_exact]


def micro_batches() -> list[dict[str, torch.Tensor]]:
    """Return three of other shapes each, of which two have a padded row."""
    generator = torch.Generator().manual_seed(5)
    found = []
    for num_rows, num_tokens, num_padded in ((2, 10, 3), (1, 7, 0), (3, 5, 1)):
        ids = torch.randint(3, 60, (num_rows, num_tokens), generator=generator)
        mask = torch.ones_like(ids)
        mask[0, num_tokens - num_padded :] = 0
        labels = ids.masked_fill(mask == 0, -100)
        found.append({"input_ids": ids, "attention_mask": mask, "labels": labels})
    return found


def section(num: int, *, has_mlp: bool = False) -> AdapterSection:
    method: Any = "prefix_mlp" if has_mlp else "prefix"
    return AdapterSection(method=method, num_virtual_tokens=num)


def with_prefix(model_type: str, num: int, *, has_mlp: bool = False) -> tuple[Any, Any]:
    """Return a model with a prefix that is ours, and one with the same that is peft's."""
    torch.manual_seed(0)
    model: Any = tiny_model(model_type).float()
    config = PrefixTuningConfig(
        num_virtual_tokens=num, prefix_projection=has_mlp, task_type="CAUSAL_LM"
    )
    base = copy.deepcopy(model)
    ours = add_prefix(model, section(num, has_mlp=has_mlp), seed=1)
    theirs: Any = get_peft_model(base, config)
    state = ours.prompt_encoder["default"].state_dict()
    theirs.prompt_encoder["default"].load_state_dict(state)
    return ours.train(), theirs.train()


def encoder_gradients(adapted: Any) -> list[torch.Tensor]:
    return [p.grad for p in adapted.prompt_encoder["default"].parameters()]


def step(adapted: Any, **options: Any) -> tuple[float, list[torch.Tensor]]:
    """Run a step on the engine; return its loss and the encoder's gradients."""
    adapted.zero_grad()
    with attached(adapted.get_base_model(), **options) as engine:
        loss = engine.forward_backward(micro_batches()).loss
    return loss, encoder_gradients(adapted)


def plain_step(adapted: Any) -> tuple[float, list[torch.Tensor]]:
    """Run the same by peft alone, with its own mask and positions."""
    batches = micro_batches()
    num = sum(int((batch["labels"][:, 1:] != -100).sum()) for batch in batches)
    total = 0.0
    for batch in batches:
        logits = adapted(
            input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]
        ).logits
        loss = functional.cross_entropy(
            logits[:, :-1].flatten(0, 1), batch["labels"][:, 1:].flatten(), reduction="sum"
        )
        (loss / num).backward()
        total += loss.item() / num
    return total, encoder_gradients(adapted)


def assert_same(
    found: tuple[float, list[torch.Tensor]], wanted: tuple[float, list[torch.Tensor]]
) -> None:
    assert found[0] == pytest.approx(wanted[0], rel=1e-6)
    for ours, theirs in zip(found[1], wanted[1], strict=True):
        assert theirs.norm() > 0
        assert (ours - theirs).norm() <= 2e-6 * theirs.norm()


@pytest.mark.parametrize(
    ("model_type", "num"),
    mostly_slow(
        [
            (name, num)
            for name in ("llama", "qwen3", "qwen3_moe", "gemma3_text", "mistral", "gpt_oss", "gpt2")
            for num in (FEW, OVER_WINDOW)
        ],
        ("gemma3_text", OVER_WINDOW),
        ("qwen3", FEW),
    ),
)
def test_reorder_a_step_has_the_loss_and_gradients_of_plain_peft(model_type: str, num: int) -> None:
    ours, theirs = with_prefix(model_type, num)
    assert_same(step(ours), plain_step(theirs))


@pytest.mark.parametrize("model_type", mostly_slow(("qwen3", "gemma3_text"), "qwen3"))
def test_reorder_the_mlp_that_computes_a_prefix_has_the_gradients_of_plain_peft(
    model_type: str,
) -> None:
    ours, theirs = with_prefix(model_type, FEW, has_mlp=True)
    assert_same(step(ours), plain_step(theirs))


OPTIONS: Mapping[str, Mapping[str, Any]] = {
    "resident": {"num_slots": 4},
    "inputs on the host": {"stash": "host"},
    "a kept graph": {"kept_graphs": 1},
    "kept attention": {"kept_outputs": 2},
    "a sent graph": {"sent_graphs": 1},
    "embedding on the host": {"embeddings": "host"},
}


@pytest.mark.parametrize("option", mostly_slow(OPTIONS, "kept attention"))
def test_move_each_way_to_compute_a_layer_again_gives_the_same_bits(
    option: Mapping[str, Any],
) -> None:
    ours, _ = with_prefix("qwen3", FEW)
    wanted = step(ours)
    found = step(ours, **option)
    assert found[0] == wanted[0]
    assert all(map(torch.equal, found[1], wanted[1]))


@pytest.mark.slow
def test_reorder_tiles_of_an_mlp_change_no_more_than_rounding() -> None:
    ours, _ = with_prefix("qwen3", FEW)
    assert_same(step(ours, mlp_chunk_tokens=4), step(ours))


def test_move_a_second_step_finds_the_prefix_as_the_first_did() -> None:
    ours, _ = with_prefix("qwen3", FEW)
    with attached(ours.get_base_model()) as engine:
        steps = []
        for _ in range(2):
            ours.zero_grad()
            loss = engine.forward_backward(micro_batches()).loss
            steps.append((loss, [gradient.clone() for gradient in encoder_gradients(ours)]))
    assert steps[0][0] == steps[1][0]
    assert all(map(torch.equal, steps[0][1], steps[1][1]))


@pytest.mark.parametrize(
    ("model_type", "num"),
    mostly_slow(
        [
            (name, num)
            for name in ("llama", "qwen3", "gemma3_text", "gpt2")
            for num in (FEW, OVER_WINDOW)
        ],
        ("gemma3_text", OVER_WINDOW),
    ),
)
def test_move_a_prefix_answers_as_plain_peft_does_with_its_cache(model_type: str, num: int) -> None:
    ours, theirs = (one.eval() for one in with_prefix(model_type, num))
    base = ours.get_base_model().requires_grad_(requires_grad=False)
    with torch.no_grad():
        wanted = plain(theirs)
    with attached(base) as engine, engine.generation() as generation:
        found = generated(generation, prompts())
    for group, (logits_BTV, tokens) in wanted.items():
        assert torch.equal(found[group][0], logits_BTV)
        assert torch.equal(found[group][1], tokens)


@pytest.mark.parametrize(
    ("model_type", "why"),
    mostly_slow(
        {
            name: (name, why)
            for name, why in (
                ("deepseek_v3", "latent attention"),
                ("mamba", "takes no cache of keys and values"),
                ("qwen3_next", "LinearAttentionLayer"),
                ("falcon_h1", "LinearAttentionAndFullAttentionLayer"),
                ("openai-gpt", "takes no cache of keys and values"),
                ("dbrx", "does not find the size of its keys"),
                ("bart", "it has 4 layers, of which peft counts 2"),
            )
        },
        "deepseek_v3",
        "qwen3_next",
        "openai-gpt",
    ),
)
def test_a_cache_of_anything_else_is_refused_by_name(model_type: str, why: str) -> None:
    with pytest.raises(ConfigError, match=f"prefix for a {model_type} model") as refusal:
        add_prefix(tiny_model(model_type), section(FEW), seed=1)
    assert why in refusal.value.limit


@pytest.mark.parametrize("model_type", mostly_slow(("gemma4_text", "falcon"), "gemma4_text"))
def test_layers_of_other_heads_are_refused_before_a_gradient(model_type: str) -> None:
    ours = add_prefix(tiny_model(model_type), section(FEW), seed=1).train()
    with (
        pytest.raises(ConfigError, match=r"a prefix in front of a layer's keys or values"),
        attached(ours.get_base_model()) as engine,
    ):
        engine.forward_backward(micro_batches())
    assert encoder_gradients(ours) == [None]


@pytest.mark.parametrize(
    "model_type",
    tiered(EXACT, default=("phi3",), slow=("bloom", "falcon", "gemma2", "llama4_text", "opt")),
)
def test_each_exact_type_has_the_gradients_of_plain_peft_or_is_refused(model_type: str) -> None:
    if model_type in REFUSED:
        with pytest.raises(ConfigError, match="prefix"):
            step(add_prefix(tiny_model(model_type), section(FEW), seed=1))
        return
    ours, theirs = with_prefix(model_type, FEW)
    assert_same(step(ours), plain_step(theirs))
