"""Micro-batches of all kinds: lengths, padding, packing, positions, precision, randomness."""

import copy
import itertools
from typing import Any

import pytest
import torch
from torch import nn
from transformers import Gemma3ForCausalLM, Gemma3TextConfig

import offload
from offload.engine.model.layers import LayeredModel
from tests.parity.architectures import micro_batches, plain, rel_error, streamed, truth
from tests.parity.exactness import Batches, adapted, assert_exact, llama
from tests.parity.tiny_models import tiny_model, with_adapters
from tests.tiers import mostly_slow

pytestmark = pytest.mark.usefixtures("one_thread")
PADDED = ("llama", "gemma3_text", "qwen3_next", "gpt2", "bloom")


@pytest.mark.thorough
@pytest.mark.parametrize(
    "model_type",
    mostly_slow(["bamba", "gemma3_text", "mpt", "qwen3_next"], "gemma3_text"),
)
def test_reorder_padding_behind_a_rows_tokens_changes_nothing_with_or_without_a_mask(
    model_type: str,
) -> None:
    """State spaces, windows, biases by distance, gated deltas: what comes later is not seen."""
    base = tiny_model(model_type)
    model = with_adapters(base, LayeredModel(base).layers)
    loss, masked = streamed(model, micro_batches(), num_slots=2)
    found_loss, found = streamed(model, padded("none"), num_slots=2)
    assert found_loss == pytest.approx(loss, rel=1e-6)
    assert rel_error(found, masked) < 5e-6
    for batch in (others := padded("none")):
        batch["input_ids"] = batch["input_ids"].masked_fill(batch["labels"] == -100, 3)
    assert streamed(model, others, num_slots=2)[0] != pytest.approx(loss, rel=1e-6)


def accumulate(model: nn.Module, batches: Batches) -> None:
    num_label_tokens = sum(int((batch["labels"][:, 1:] != -100).sum()) for batch in batches)
    for batch in batches:
        model(**batch, use_cache=False, num_items_in_batch=num_label_tokens).loss.backward()


def padded(side: str) -> list[dict[str, torch.Tensor]]:
    batches = micro_batches()
    for batch in batches:
        if side == "none":
            del batch["attention_mask"]
        elif side == "left":
            for name, tensor in batch.items():
                batch[name] = torch.cat([tensor[:1], tensor[1:].roll(3, dims=1)])
    return batches


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("model_type", "side"),
    mostly_slow(
        list(itertools.product(PADDED, ("left", "right", "none"))),
        ("gpt2", "left"),
    ),
)
def test_padding_on_either_side_or_none_is_exact(model_type: str, side: str) -> None:
    assert_exact(adapted(tiny_model(model_type)), padded(side))


def packed() -> list[dict[str, torch.Tensor]]:
    """Rows of several sequences, told apart by positions that start again."""
    batches = []
    generator = torch.Generator().manual_seed(2)
    for lengths in ([[9, 5, 6], [4, 12, 4]], [[16, 4], [7, 13]]):
        positions = torch.stack([torch.cat([torch.arange(n) for n in row]) for row in lengths])
        input_ids = torch.randint(3, 64, positions.shape, generator=generator)
        labels = input_ids.masked_fill(positions == 0, -100)
        batches.append({"input_ids": input_ids, "labels": labels, "position_ids": positions})
    return batches


@pytest.mark.parametrize(
    ("model_type", "implementation"),
    mostly_slow(
        [
            ("llama", "eager"),
            ("llama", "sdpa"),
            ("gemma3_text", "eager"),
            ("gemma3_text", "sdpa"),
            ("gpt_oss", "eager"),  # its attention sinks have no other form on a CPU
            ("qwen3_moe", "eager"),
            ("qwen3_moe", "sdpa"),
        ],
        ("qwen3_moe", "sdpa"),
    ),
)
def test_packed_rows_are_exact_in_each_form_of_attention(
    model_type: str, implementation: str
) -> None:
    base = tiny_model(model_type)
    base.set_attn_implementation(implementation)
    model = adapted(base)
    assert_exact(model, packed())
    assert base.config._attn_implementation == implementation


def test_an_input_that_would_not_reach_the_model_is_refused() -> None:
    batches = micro_batches()
    for batch in batches:
        batch["token_type_ids"] = torch.ones_like(batch["input_ids"])
    engine = offload.attach(llama(), num_slots=2, device="cpu")
    with pytest.raises(offload.UnsupportedModelError, match="would be given `token_type_ids`"):
        engine.forward_backward(batches)
    engine.detach()


@pytest.mark.thorough
def test_packed_sequences_do_not_see_each_other() -> None:
    """The loss of a row of two sequences is that of the two, each in a row of its own."""
    model = llama()
    batch = packed()[1]
    parts = []
    for row, cut in ((0, 16), (1, 7)):
        for part in (slice(0, cut), slice(cut, 20)):
            parts.append({name: tensor[row : row + 1, part] for name, tensor in batch.items()})
    together, ours = streamed(model, [batch], num_slots=2)
    apart, expected = plain(model, parts)
    assert together == pytest.approx(apart, rel=2e-6)
    assert rel_error(ours, expected) < 2e-6


@pytest.mark.thorough
def test_an_evaluation_may_run_in_inference_mode() -> None:
    engine = offload.attach(llama(), num_slots=2, device="cpu")
    batch = micro_batches()[0]
    expected = engine.forward(batch).loss_sum
    with torch.inference_mode():
        assert engine.forward(batch).loss_sum == expected
    engine.forward_backward([batch])
    engine.detach()


@pytest.mark.thorough
def test_a_mask_that_micro_batches_share_is_exact() -> None:
    batches = micro_batches()[:1] * 3
    assert batches[0]["attention_mask"] is batches[2]["attention_mask"]
    assert_exact(llama(), batches)


@pytest.mark.slow
@pytest.mark.parametrize(
    "num_micro_batches",
    [
        pytest.param(1, marks=pytest.mark.exhaustive),
        pytest.param(2, marks=pytest.mark.exhaustive),
        3,
    ],
)
@pytest.mark.parametrize("model_type", ["llama", "gemma3_text", "qwen3_moe"])
def test_reorder_bfloat16_is_no_worse_than_the_plain_model(
    model_type: str, num_micro_batches: int
) -> None:
    ours_squared = plain_squared = 0.0
    for seed in range(4):
        base = tiny_model(model_type, seed=seed)
        model = with_adapters(base, LayeredModel(base).layers, seed=seed).bfloat16()
        batches = micro_batches()[:num_micro_batches]
        true = truth(model, batches)
        assert true is not None
        _, ours = streamed(model, batches, num_slots=2)
        if seed == 0:
            _, resident = streamed(model, batches, num_slots=8)
            assert all(torch.equal(ours[name], resident[name]) for name in ours)
        ours_squared += rel_error(ours, true) ** 2
        plain_squared += rel_error(plain(model, batches)[1], true) ** 2
    assert ours_squared <= 1.05**2 * plain_squared


@pytest.mark.thorough
@pytest.mark.parametrize("num_micro_batches", mostly_slow([1, 2], 1))
def test_one_micro_batch_and_two_are_exact(num_micro_batches: int) -> None:
    assert_exact(llama(), micro_batches()[:num_micro_batches])


def test_sliding_and_full_layers_mixed_are_exact_beyond_the_window() -> None:
    config = Gemma3TextConfig(
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        vocab_size=64,
        sliding_window=4,
        layer_types=["sliding_attention", "full_attention"] * 2,
        pad_token_id=0,
    )
    torch.manual_seed(0)
    assert_exact(adapted(Gemma3ForCausalLM(config).requires_grad_(False).train()))


@pytest.mark.thorough
def test_router_noise_in_training_is_replayed() -> None:
    base = tiny_model("phimoe", router_jitter_noise=0.1)
    model = adapted(base)
    batches = micro_batches()
    loss, ours = streamed(model, batches, num_slots=2)
    resident_loss, resident = streamed(model, batches, num_slots=8)
    assert loss == resident_loss
    assert all(torch.equal(ours[name], resident[name]) for name in ours)


def test_dropout_inside_the_layers_is_replayed() -> None:
    """Under another mask in the recompute, a gradient would not be the slope of the loss."""
    model: Any = llama(attention_dropout=0.3)
    for layer in model.get_base_model().model.layers:
        layer.self_attn.attention_dropout = 0.3
    batches = micro_batches()
    loss, ours = streamed(model, batches, num_slots=2)
    assert loss != plain(llama(), batches)[0]
    name = max((n for n in ours if "lora_B" in n), key=lambda n: float(ours[n].abs().max()))
    place = int(ours[name].abs().argmax())
    losses = []
    for move in (0.02, -0.02):
        moved = copy.deepcopy(model)
        with torch.no_grad():
            dict(moved.named_parameters())[name].view(-1)[place] += move
        losses.append(streamed(moved, batches, num_slots=2)[0])
    slope = (losses[0] - losses[1]) / 0.04
    assert ours[name].view(-1)[place].item() == pytest.approx(slope, rel=0.01)
