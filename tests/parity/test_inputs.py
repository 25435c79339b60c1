"""Micro-batches of all kinds, cut in all ways, and those that are refused."""

import copy
import itertools
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    OPTConfig,
    OPTForCausalLM,
)
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

import offload
from finetune.training.ranks import micro_batches_by_shares
from offload.engine.model.layers import LayeredModel
from tests.parity.architectures import Gradients, micro_batches, plain, rel_error, streamed, truth
from tests.parity.exactness import adapted, assert_exact, llama
from tests.parity.steps import MODELS, NUM_LAYERS, gradients, tiny
from tests.parity.steps import micro_batches as tiny_batches
from tests.parity.steps import plain as plain_tiny
from tests.parity.steps import streamed as streamed_tiny
from tests.parity.tiny_models import VOCABULARY, tiny_model, with_adapters
from tests.tiers import mostly_slow

PADDED = ("llama", "gemma3_text", "qwen3_next", "gpt2", "bloom")


@pytest.mark.usefixtures("one_thread")
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


def padded(side: str) -> list[dict[str, torch.Tensor]]:
    batches = micro_batches()
    for batch in batches:
        if side == "none":
            del batch["attention_mask"]
        elif side == "left":
            for name, tensor in batch.items():
                batch[name] = torch.cat([tensor[:1], tensor[1:].roll(3, dims=1)])
    return batches


@pytest.mark.usefixtures("one_thread")
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


@pytest.mark.usefixtures("one_thread")
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


@pytest.mark.usefixtures("one_thread")
def test_an_input_that_would_not_reach_the_model_is_refused() -> None:
    batches = micro_batches()
    for batch in batches:
        batch["token_type_ids"] = torch.ones_like(batch["input_ids"])
    engine = offload.attach(llama(), num_slots=2, device="cpu")
    with pytest.raises(offload.UnsupportedModelError, match="would be given `token_type_ids`"):
        engine.forward_backward(batches)
    engine.detach()


@pytest.mark.usefixtures("one_thread")
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


@pytest.mark.usefixtures("one_thread")
@pytest.mark.thorough
def test_an_evaluation_may_run_in_inference_mode() -> None:
    engine = offload.attach(llama(), num_slots=2, device="cpu")
    batch = micro_batches()[0]
    expected = engine.forward(batch).loss_sum
    with torch.inference_mode():
        assert engine.forward(batch).loss_sum == expected
    engine.forward_backward([batch])
    engine.detach()


@pytest.mark.usefixtures("one_thread")
@pytest.mark.thorough
def test_a_mask_that_micro_batches_share_is_exact() -> None:
    batches = micro_batches()[:1] * 3
    assert batches[0]["attention_mask"] is batches[2]["attention_mask"]
    assert_exact(llama(), batches)


@pytest.mark.usefixtures("one_thread")
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


@pytest.mark.usefixtures("one_thread")
@pytest.mark.thorough
@pytest.mark.parametrize("num_micro_batches", mostly_slow([1, 2], 1))
def test_one_micro_batch_and_two_are_exact(num_micro_batches: int) -> None:
    assert_exact(llama(), micro_batches()[:num_micro_batches])


@pytest.mark.usefixtures("one_thread")
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


@pytest.mark.usefixtures("one_thread")
@pytest.mark.thorough
def test_router_noise_in_training_is_replayed() -> None:
    base = tiny_model("phimoe", router_jitter_noise=0.1)
    model = adapted(base)
    batches = micro_batches()
    loss, ours = streamed(model, batches, num_slots=2)
    resident_loss, resident = streamed(model, batches, num_slots=8)
    assert loss == resident_loss
    assert all(torch.equal(ours[name], resident[name]) for name in ours)


@pytest.mark.usefixtures("one_thread")
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


# ---------------------------------------------------------------------------------- batches refused


BATCH = tiny_batches()[0]
IDS, LABELS = BATCH["input_ids"], BATCH["labels"]


def changed(key: str, value: int, place: tuple[int, int] = (1, 5)) -> dict[str, torch.Tensor]:
    tensor = BATCH[key].clone()
    tensor[place] = value
    return BATCH | {key: tensor}


REFUSED: dict[str, tuple[Any, str]] = {
    "fewer labels": ([BATCH | {"labels": LABELS[:, :5]}], r"`labels` of .* 0 is \(2, 5\), .*12\)"),
    "labels of another rank": ([BATCH | {"labels": LABELS[None]}], r"`labels` .* is \(1, 2, 12\)"),
    "labels of one row": ([BATCH, BATCH | {"labels": LABELS[:1]}], r"`labels` of micro-batch 1 is"),
    "a narrow mask": (
        [BATCH | {"attention_mask": torch.ones(2, 5)}],
        r"`attention_mask` of micro-batch 0 is \(2, 5\)",
    ),
    "a dict": (BATCH, "micro_batches is a dict"),
    "a number": (3, "micro_batches is a int"),
    "no micro-batch": ([], "micro_batches is empty"),
    "a tensor": ([IDS], "micro-batch 0 is a Tensor"),
    "no labels": ([{"input_ids": IDS}], "micro-batch 0 has no `labels`"),
    "no tokens": ([{"labels": LABELS}], "micro-batch 0 has no `input_ids`"),
    "lists": ([{"input_ids": IDS.tolist(), "labels": LABELS}], "`input_ids` .* is a list"),
    "no rows": ([BATCH, {n: t[:0] for n, t in BATCH.items()}], r"of micro-batch 1 is \(0, 12\)"),
    "one row": ([{n: t[0] for n, t in BATCH.items()}], r"`input_ids` of micro-batch 0 is \(12,\)"),
    "float tokens": ([BATCH | {"input_ids": IDS.float()}], "`input_ids` .* of torch.float32"),
    "float labels": ([BATCH | {"labels": LABELS.float()}], "`labels` .* is of torch.float32"),
    "a label below 0": (
        [BATCH, changed("labels", -1)],
        "`labels` of micro-batch 1 holds -1; the model predicts 64 tokens, from 0",
    ),
    "a label below -100": ([changed("labels", -101)], "`labels` of micro-batch 0 holds -101;"),
    "a label above": (
        [BATCH, BATCH, changed("labels", 64)],
        "`labels` of micro-batch 2 holds 64; the model predicts 64 tokens, from 0",
    ),
    "a token below 0": ([changed("input_ids", -1)], "`input_ids` of micro-batch 0 holds -1;"),
    "a token above": (
        [BATCH, changed("input_ids", 64)],
        "`input_ids` of micro-batch 1 holds 64; the model's input embedding has 64 tokens",
    ),
    "positions without rows": (
        [BATCH | {"position_ids": torch.arange(12)}],
        r"`position_ids` of micro-batch 0 is \(12,\), `input_ids` \(2, 12\); it ends in",
    ),
    "positions of another width": (
        [BATCH, BATCH | {"position_ids": torch.arange(5)[None]}],
        r"`position_ids` of micro-batch 1 is \(1, 5\), `input_ids` \(2, 12\)",
    ),
    "positions of more rows": (
        [BATCH | {"position_ids": torch.arange(12).expand(3, 12)}],
        r"`position_ids` of micro-batch 0 is \(3, 12\), `input_ids` \(2, 12\)",
    ),
}


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize(("batches", "what"), REFUSED.values(), ids=REFUSED)
def test_micro_batches_that_a_step_cannot_take_are_refused(batches: Any, what: str) -> None:
    model = tiny("qwen3")
    engine = offload.attach(model, num_slots=2, device="cpu")
    with pytest.raises(offload.OffloadError, match=rf"(?s){what}.*\n\nhint: "):
        engine.forward_backward(batches)
    assert all(p.grad is None for p in model.parameters())
    engine.detach()


ARGUMENTS: dict[str, tuple[dict[str, Any], str]] = {
    "too few ids": ({"micro_batch_ids": [0]}, "micro_batch_ids has 1 numbers for 3 micro-batches"),
    "too many ids": (
        {"micro_batch_ids": range(4)},
        "micro_batch_ids has 4 numbers for 3 micro-batches",
    ),
    "fewer than no labels": ({"num_label_tokens": -3}, "num_label_tokens is -3;"),
    "no labels": ({"num_label_tokens": 0}, "num_label_tokens is 0;"),
}


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize(("arguments", "what"), ARGUMENTS.values(), ids=ARGUMENTS)
def test_other_arguments_that_a_step_cannot_take_are_refused(
    arguments: dict[str, Any], what: str
) -> None:
    model = tiny("qwen3")
    engine = offload.attach(model, num_slots=2, device="cpu")
    with pytest.raises(offload.OffloadError, match=rf"(?s){what}.*\n\nhint: "):
        engine.forward_backward(tiny_batches(), **arguments)
    assert all(p.grad is None for p in model.parameters())
    engine.detach()


@pytest.mark.usefixtures("one_thread")
@pytest.mark.thorough
def test_tokens_are_looked_up_in_embeddings_and_heads_that_peft_has_wrapped() -> None:
    targets = ["q_proj", "embed_tokens", "lm_head"]
    for config in (
        LoraConfig(target_modules=targets),
        LoraConfig(target_modules=["q_proj"], modules_to_save=targets[1:]),
        LoraConfig(target_modules=["q_proj"], trainable_token_indices=[3]),
    ):
        model = get_peft_model(MODELS["qwen3"](), config)
        engine = offload.attach(model, num_slots=2, device="cpu")
        with pytest.raises(offload.OffloadError, match="`input_ids` of micro-batch 0 holds 64"):
            engine.forward_backward([changed("input_ids", 64)])
        with pytest.raises(offload.OffloadError, match="`labels` of micro-batch 0 holds 64"):
            engine.forward_backward([changed("labels", 64)])
        assert engine.forward_backward(tiny_batches()).loss > 0
        engine.detach()


@pytest.mark.usefixtures("one_thread")
def test_a_label_of_the_first_token_is_not_looked_at() -> None:
    engine = offload.attach(tiny("qwen3"), num_slots=2, device="cpu")
    expected = engine.forward_backward([BATCH], dropout_seed=0).loss
    batch = changed("labels", -1, (1, 0))
    assert engine.forward_backward([batch], dropout_seed=0).loss == expected
    engine.detach()


@pytest.mark.usefixtures("one_thread")
def test_a_row_of_positions_is_that_of_all_rows() -> None:
    engine = offload.attach(tiny("qwen3"), num_slots=2, device="cpu")
    positions = torch.arange(12).flip(0)[None]
    each = BATCH | {"position_ids": positions.expand(2, 12)}
    expected = engine.forward_backward([each], dropout_seed=0).loss
    one = BATCH | {"position_ids": positions}
    assert engine.forward_backward([one], dropout_seed=0).loss == expected
    engine.detach()


@pytest.mark.usefixtures("one_thread")
def test_a_forward_of_a_token_that_the_model_does_not_know_is_refused() -> None:
    engine = offload.attach(tiny("qwen3"), num_slots=2, device="cpu")
    with pytest.raises(offload.OffloadError, match="`input_ids` of the batch holds 64"):
        engine.forward({"input_ids": changed("input_ids", 64)["input_ids"]})
    engine.detach()


@pytest.mark.usefixtures("one_thread")
def test_a_frozen_sparse_weight_of_a_layer_is_refused_at_attach() -> None:
    model: Any = tiny("qwen3")
    layer = model.get_base_model().model.layers[1]
    layer.sparse = nn.Parameter(torch.eye(4).to_sparse(), requires_grad=False)
    with pytest.raises(
        offload.UnsupportedModelError,
        match=r"model.layers.1.sparse is of torch.sparse_coo.*\n\nhint: `to_dense\(\)` before",
    ):
        offload.attach(model, num_slots=2, device="cpu")
    assert plain_tiny(tiny("qwen3"))[0] == plain_loss()


@pytest.mark.usefixtures("one_thread")
@pytest.mark.thorough
def test_micro_batches_in_another_form_give_the_same_step() -> None:
    model = tiny("qwen3")
    engine = offload.attach(model, num_slots=2, device="cpu")
    expected = engine.forward_backward(tiny_batches()).loss
    others: tuple[Any, ...] = (
        iter(tiny_batches()),
        tuple(tiny_batches()),
        [{n: t.int() for n, t in batch.items()} for batch in tiny_batches()],
        [batch | {"position_ids": None} for batch in tiny_batches()],
    )
    for other in others:
        assert engine.forward_backward(other).loss == expected
    engine.detach()


@pytest.mark.usefixtures("one_thread")
def test_a_forward_of_what_is_no_batch_is_refused() -> None:
    engine = offload.attach(tiny("qwen3"), num_slots=2, device="cpu")
    with pytest.raises(offload.OffloadError, match="the batch is a list"):
        engine.forward([BATCH])  # type: ignore[arg-type] # what is wrong with it
    with pytest.raises(offload.OffloadError, match=r"`input_ids` of the batch is \(0, 12\)"):
        engine.forward({"input_ids": IDS[:0]})
    engine.detach()


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("block", [torch.no_grad, torch.inference_mode])
def test_a_step_where_gradients_are_switched_off_is_refused(block: Callable[[], Any]) -> None:
    engine = offload.attach(tiny("qwen3"), num_slots=2, device="cpu")
    name = re.escape(f"`torch.{block.__name__}()`")
    with block(), pytest.raises(offload.OffloadError, match=rf"in {name}.*\n\nhint: leave"):
        engine.forward_backward(tiny_batches())
    engine.detach()


@pytest.mark.usefixtures("one_thread")
def test_attaching_in_inference_mode_is_refused() -> None:
    model = tiny("qwen3")
    with torch.inference_mode(), pytest.raises(offload.OffloadError, match="inference_mode"):
        offload.attach(model, num_slots=2, device="cpu")


@pytest.mark.usefixtures("one_thread")
@pytest.mark.thorough
def test_an_evaluation_in_inference_mode_leaves_nothing_that_a_step_cannot_use() -> None:
    model = tiny("qwen3")
    engine = offload.attach(model, num_slots=2, device="cpu")
    with torch.inference_mode():
        engine.forward(BATCH)
    assert engine.forward_backward(tiny_batches()).loss == pytest.approx(plain_loss(), rel=1e-5)
    engine.detach()


def plain_loss() -> float:
    return plain_tiny(tiny("qwen3"))[0]


@pytest.mark.usefixtures("one_thread")
@pytest.mark.thorough
@pytest.mark.parametrize("device", mostly_slow(["cuda:99", "mps", "gpu", ""], "gpu", ""))
def test_a_device_that_is_not_there_is_refused(device: str) -> None:
    model = tiny("qwen3")
    with pytest.raises(offload.OffloadError, match=rf"device is '{device}'.*\n\nhint: `device="):
        offload.attach(model, num_slots=2, device=device)
    assert plain_tiny(model)[0] == plain_loss()


@pytest.mark.usefixtures("one_thread")
@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_cuda_without_a_gpu_is_refused() -> None:
    with pytest.raises(offload.OffloadError, match=r"device is 'cuda'; torch finds no CUDA"):
        offload.attach(tiny("qwen3"), num_slots=2)


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("model", [nn.Linear(3, 3), nn.Sequential(nn.Linear(3, 3))])
def test_a_module_that_is_no_language_model_is_refused(model: nn.Module) -> None:
    with pytest.raises(offload.UnsupportedModelError, match=r"is no causal .*\n\nhint: attach the"):
        offload.attach(model, num_slots=2, device="cpu")


@pytest.mark.usefixtures("one_thread")
def test_a_model_without_a_head_is_refused_before_any_gradient() -> None:
    model = MODELS["qwen3"]().model
    model.requires_grad_(False)
    model.layers[0].requires_grad_(True)
    engine = offload.attach(model, num_slots=2, device="cpu")
    with pytest.raises(offload.UnsupportedModelError, match="returns no logits"):
        engine.forward_backward(tiny_batches())
    assert all(p.grad is None for p in model.parameters())
    engine.detach()


@pytest.mark.usefixtures("one_thread")
def test_a_model_that_skips_layers_at_random_is_refused_at_attach() -> None:
    config = OPTConfig(
        vocab_size=64,
        hidden_size=32,
        ffn_dim=48,
        num_hidden_layers=4,
        num_attention_heads=4,
        max_position_embeddings=64,
        word_embed_proj_dim=32,
        dropout=0.0,
        layerdrop=0.1,
    )
    model = get_peft_model(OPTForCausalLM(config), LoraConfig(target_modules=["q_proj"]))
    with pytest.raises(
        offload.UnsupportedModelError,
        match=r"`model.decoder.layerdrop` is 0.1.*\n\nhint: `get_submodule\('model.decoder'\)",
    ):
        offload.attach(model, num_slots=2, device="cpu")
    decoder: Any = model.get_base_model().get_submodule("model.decoder")
    decoder.layerdrop = 0.0
    offload.attach(model, num_slots=2, device="cpu").detach()


@pytest.mark.usefixtures("one_thread")
@pytest.mark.thorough
def test_reorder_a_config_without_named_outputs_trains_like_the_plain_model() -> None:
    model = tiny("qwen3")
    loss, expected = plain_tiny(model)
    model.config.return_dict = False
    engine = offload.attach(model, num_slots=2, device="cpu", head_chunk_tokens=7)
    assert engine.forward_backward(tiny_batches()).loss == pytest.approx(loss, rel=1e-5)
    assert rel_error(gradients(model), expected) < 1e-5
    engine.detach()
    assert model.config.return_dict is False


# ------------------------------------------------------------------- layers that detach


class Detached(nn.Module):
    """A layer whose output does not depend on its input, for autograd."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, hidden: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        return self.inner(hidden.detach(), *args, **kwargs)


@pytest.mark.usefixtures("one_thread")
@pytest.mark.thorough
@pytest.mark.parametrize("kept_graphs", [0, 3])
@pytest.mark.parametrize("is_frozen", [False, True])
def test_reorder_below_a_layer_that_detaches_there_are_no_gradients(
    is_frozen: bool, kept_graphs: int
) -> None:
    """None, as in plain autograd, and not zero: a weight decay would act on those."""
    model: Any = tiny("qwen3")
    layers = model.get_base_model().model.layers
    layers[2] = Detached(layers[2])
    layers[2].attention_type = "full_attention"
    if is_frozen:
        layers[2].requires_grad_(False)
    loss, expected = reference(model)
    engine = offload.attach(
        model, num_slots=2, device="cpu", head_chunk_tokens=7, kept_graphs=kept_graphs
    )
    assert engine.forward_backward(tiny_batches()).loss == pytest.approx(loss, rel=1e-5)
    found = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    engine.detach()
    assert found.keys() == expected.keys()
    assert not any("layers.1." in name for name in found)
    assert any("layers.2." in name for name in found) is not is_frozen
    assert rel_error(found, expected) < 1e-5


def reference(model: nn.Module) -> tuple[float, dict[str, torch.Tensor]]:
    batches = tiny_batches()
    num_items = sum((batch["labels"][:, 1:] != -100).sum() for batch in batches)
    loss = 0.0
    for batch in batches:
        part = model(**batch, use_cache=False, num_items_in_batch=num_items).loss
        part.backward()
        loss += part.item()
    found = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    return loss, found


@pytest.mark.usefixtures("one_thread")
def test_a_layer_that_detaches_where_weights_train_on_the_host_is_refused() -> None:
    model: Any = MODELS["qwen3"]().train()
    model.model.layers[3] = Detached(model.model.layers[3])
    model.model.layers[3].attention_type = "full_attention"
    engine = offload.attach(model, num_slots=2, device="cpu", trained_weights="host")
    with pytest.raises(offload.UnsupportedModelError, match="layer 3 passes no gradient on"):
        engine.forward_backward(tiny_batches())
    engine.detach()


# ------------------------------------------------------------------------------------------- rotary


ORIGINAL = 24
LENS = (16, 40, ORIGINAL, ORIGINAL + 1, 60)
FACTORS = {
    "short_factor": [1.0, 1.02, 1.1, 1.2],
    "long_factor": [1.0, 3.0, 11.0, 40.0],
    "original_max_position_embeddings": ORIGINAL,
}
BANDS = {"low_freq_factor": 1.0, "high_freq_factor": 4.0}
ROPES: dict[str, dict[str, Any]] = {
    "default": {},
    "linear": {"factor": 4.0},
    "dynamic": {"factor": 4.0},
    "yarn": {"factor": 4.0, "original_max_position_embeddings": ORIGINAL},
    "longrope": {"factor": 4.0, **FACTORS},
    "llama3": {"factor": 4.0, **BANDS, "original_max_position_embeddings": ORIGINAL},
    "proportional": {"factor": 4.0, "partial_rotary_factor": 0.5},
}
KINDS = {
    "llama": {},
    "phi3": {"original_max_position_embeddings": ORIGINAL},
    "gemma2": {},
    "olmo2": {},
    "mistral": {},
    "qwen3": {},
}
ONLY = {"phi3": {"default", "longrope"}}  # of the others, those that transformers allows


def built(kind: str, rope: str) -> nn.Module:
    torch.manual_seed(0)
    parameters = {"rope_type": rope, "rope_theta": 10000.0, **ROPES[rope]}
    config = AutoConfig.for_model(
        kind,
        vocab_size=64,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        pad_token_id=None,
        max_position_embeddings=96 if rope == "longrope" else ORIGINAL,
        **KINDS[kind],
        rope_parameters=parameters,
        attn_implementation="eager",
    )
    model = get_peft_model(
        AutoModelForCausalLM.from_config(config, dtype=torch.float32),
        LoraConfig(r=4, target_modules="all-linear"),
    )
    with torch.no_grad():
        for p in model.parameters():
            if p.requires_grad:
                p.add_(0.05 * torch.randn_like(p))
    return model


def grads(model: nn.Module) -> torch.Tensor:
    return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])


def rows_of() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(3, 64, (1, n), generator=generator) for n in LENS]


def padded_rotary(rows: list[torch.Tensor]) -> dict[str, torch.Tensor]:
    """Rows of one micro-batch, padded on the right with a token that is in none of them."""
    most = max(row.shape[1] for row in rows)
    ids, labels, mask = (torch.full((len(rows), most), fill) for fill in (0, -100, 0))
    for b, row in enumerate(rows):
        n = row.shape[1]
        ids[b, :n], labels[b, :n], mask[b, :n] = row[0], row[0], 1
    return {"input_ids": ids, "labels": labels, "attention_mask": mask}


def packed_rotary(rows: list[torch.Tensor]) -> dict[str, torch.Tensor]:
    labels = [torch.cat((torch.full((1, 1), -100), row[:, 1:]), 1) for row in rows]
    lens = torch.tensor([row.shape[1] for row in rows])
    return {"input_ids": torch.cat(rows, 1), "labels": torch.cat(labels, 1), "row_lens": lens}


FORMS = {
    "padded": lambda rows: [padded_rotary(rows)],
    "packed": lambda rows: [packed_rotary(rows)],
    "each alone": lambda rows: [{"input_ids": row, "labels": row} for row in rows],
    "long before short": lambda rows: [padded_rotary(rows[3:]), padded_rotary(rows[:3])],
}
CASES = [
    (kind, rope, form)
    for kind in KINDS
    for rope in ROPES
    if rope in ONLY.get(kind, ROPES)
    for form in FORMS
]
DEFAULT = (("phi3", "longrope", "padded"), ("llama", "dynamic", "packed"))


def test_every_type_of_transformers_is_tried() -> None:
    assert set(ROPE_INIT_FUNCTIONS) | {"default"} == set(ROPES)


@pytest.mark.parametrize(
    ("kind", "rope", "form"),
    mostly_slow(CASES, *DEFAULT, rest=pytest.mark.thorough),
)
def test_rows_on_both_sides_of_the_original_length_are_computed_as_each_alone(
    kind: str, rope: str, form: str
) -> None:
    rows = rows_of()
    total, loss = sum(row.shape[1] - 1 for row in rows), 0.0
    wanted = torch.zeros(())
    for row in rows:
        plain = built(kind, rope)
        own = plain(input_ids=row, labels=row, use_cache=False).loss * (row.shape[1] - 1) / total
        own.backward()
        loss, wanted = loss + own.item(), wanted + grads(plain)
    streamed = built(kind, rope)
    engine = offload.attach(streamed, num_slots=2, device="cpu")
    for _ in range(2):  # a second step finds what the first has left
        streamed.zero_grad()
        result = engine.forward_backward(FORMS[form](rows))
        assert result.loss == pytest.approx(loss, rel=1e-6)
        assert float((grads(streamed) - wanted).norm() / wanted.norm()) < 2e-6


@pytest.mark.parametrize("num_prompt", [ORIGINAL - 6, ORIGINAL - 1, ORIGINAL, ORIGINAL + 3])
@pytest.mark.parametrize("kind", ["phi3", "llama"])
def test_an_answer_that_grows_past_the_original_length_is_computed_as_a_whole_row(
    kind: str, num_prompt: int
) -> None:
    model = built(kind, "longrope").eval()
    ids = torch.randint(3, 64, (2, num_prompt), generator=torch.Generator().manual_seed(2))
    plain: Any = copy.deepcopy(model)
    engine = offload.attach(model, num_slots=2, device="cpu")
    with engine.generation() as generation:
        new = ids
        for _ in range(10):
            logits = generation.next_logits({0: new})[0]
            with torch.no_grad():
                whole = copy.deepcopy(plain)(input_ids=ids, use_cache=False).logits[:, -1]
            assert float((logits - whole).abs().max() / whole.abs().max()) < 1e-5
            new = logits.argmax(-1, keepdim=True)
            ids = torch.cat([ids, new], dim=1)
    if kind == "phi3":  # whose `generate` drops its cache there too
        greedy = {"max_new_tokens": 10, "do_sample": False, "eos_token_id": None}
        mask = torch.ones(2, num_prompt, dtype=torch.long)
        own = plain.generate(input_ids=ids[:, :num_prompt], attention_mask=mask, **greedy)
        assert torch.equal(own, ids)


# -------------------------------------------------------------------------------------------- split


LENGTHS = (17, 12, 11, 9, 6, 4)


def cut(size: int) -> list[dict[str, torch.Tensor]]:
    """Return six sequences of unequal length and number of labels in micro-batches of `size`."""
    generator = torch.Generator().manual_seed(0)
    rows = [torch.randint(3, VOCABULARY, (length,), generator=generator) for length in LENGTHS]
    batches = []
    for first in range(0, len(rows), size):
        part = rows[first : first + size]
        batch = {
            name: torch.full((len(part), len(part[0])), fill)
            for name, fill in (("input_ids", 0), ("labels", -100), ("attention_mask", 0))
        }
        for number, row in enumerate(part):
            num_unlabelled = len(row) % 4
            batch["input_ids"][number, : len(row)] = row
            batch["attention_mask"][number, : len(row)] = 1
            batch["labels"][number, num_unlabelled : len(row)] = row[num_unlabelled:]
        batches.append(batch)
    return batches


def step(model: torch.nn.Module, size: int) -> tuple[float, Gradients]:
    return streamed(model, cut(size), num_slots=2)


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("model_type", mostly_slow(["llama", "qwen3_moe"], "llama"))
def test_any_cut_of_a_step_gives_its_loss_and_gradients(model_type: str) -> None:
    model = adapted(tiny_model(model_type))
    whole_loss, whole = plain(model, cut(len(LENGTHS)))
    for size in (1, 2, 3, 6):
        loss, ours = step(model, size)
        assert loss == pytest.approx(whole_loss, rel=2e-6)
        assert rel_error(ours, whole) < 2e-6


# -------------------------------------------------------------------------------------- shared step


def in_shares(*shares: int, keeps_ids: bool) -> tuple[float, dict[str, torch.Tensor]]:
    """Run each rank's share on an engine of its own; return the sums."""
    batches = tiny_batches()
    num_label_tokens = sum(int((batch["labels"][:, 1:] != -100).sum()) for batch in batches)
    losses, found = [], []
    for index in range(len(shares)):
        model = copy.deepcopy(tiny("llama", dropout=0.3))
        own = micro_batches_by_shares(len(batches), index=index, shares=shares)
        engine = offload.attach(model, num_slots=2, device="cpu", head_chunk_tokens=7)
        try:
            result = engine.forward_backward(
                [batches[i] for i in own],
                dropout_seed=5,
                num_label_tokens=num_label_tokens,
                micro_batch_ids=own if keeps_ids else None,
            )
            losses.append(result.loss)
            found.append(gradients(model))
        finally:
            engine.detach()
    return sum(losses), {name: first + found[1][name] for name, first in found[0].items()}


@pytest.mark.thorough
@pytest.mark.parametrize("shares", [(1, 1), (1, 2)])
def test_reorder_the_shares_of_a_step_add_up_to_the_step_with_its_dropout(
    shares: tuple[int, int],
) -> None:
    whole_loss, whole = streamed_tiny(tiny("llama", dropout=0.3), num_slots=NUM_LAYERS, seed=5)
    loss, shared = in_shares(*shares, keeps_ids=True)
    assert abs(loss - whole_loss) <= 1e-6 * whole_loss
    for name, gradient in whole.items():
        assert torch.allclose(shared[name], gradient, rtol=1e-5, atol=1e-7), name


def test_shares_that_number_their_micro_batches_anew_drop_out_other_features() -> None:
    whole_loss, _ = streamed_tiny(tiny("llama", dropout=0.3), num_slots=NUM_LAYERS, seed=5)
    loss, _ = in_shares(1, 1, keeps_ids=False)
    assert abs(loss - whole_loss) > 1e-3 * whole_loss
