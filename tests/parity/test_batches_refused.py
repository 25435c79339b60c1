"""Batches, devices, blocks and models that a step cannot be run with: errors with a hint."""

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn
from transformers import OPTConfig, OPTForCausalLM

import offload
from tests.parity.steps import MODELS, gradients, micro_batches, plain, rel_error, tiny
from tests.tiers import mostly_slow

pytestmark = pytest.mark.usefixtures("one_thread")

BATCH = micro_batches()[0]
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


@pytest.mark.parametrize(("arguments", "what"), ARGUMENTS.values(), ids=ARGUMENTS)
def test_other_arguments_that_a_step_cannot_take_are_refused(
    arguments: dict[str, Any], what: str
) -> None:
    model = tiny("qwen3")
    engine = offload.attach(model, num_slots=2, device="cpu")
    with pytest.raises(offload.OffloadError, match=rf"(?s){what}.*\n\nhint: "):
        engine.forward_backward(micro_batches(), **arguments)
    assert all(p.grad is None for p in model.parameters())
    engine.detach()


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
        assert engine.forward_backward(micro_batches()).loss > 0
        engine.detach()


def test_a_label_of_the_first_token_is_not_looked_at() -> None:
    engine = offload.attach(tiny("qwen3"), num_slots=2, device="cpu")
    expected = engine.forward_backward([BATCH], dropout_seed=0).loss
    batch = changed("labels", -1, (1, 0))
    assert engine.forward_backward([batch], dropout_seed=0).loss == expected
    engine.detach()


def test_a_row_of_positions_is_that_of_all_rows() -> None:
    engine = offload.attach(tiny("qwen3"), num_slots=2, device="cpu")
    positions = torch.arange(12).flip(0)[None]
    each = BATCH | {"position_ids": positions.expand(2, 12)}
    expected = engine.forward_backward([each], dropout_seed=0).loss
    one = BATCH | {"position_ids": positions}
    assert engine.forward_backward([one], dropout_seed=0).loss == expected
    engine.detach()


def test_a_forward_of_a_token_that_the_model_does_not_know_is_refused() -> None:
    engine = offload.attach(tiny("qwen3"), num_slots=2, device="cpu")
    with pytest.raises(offload.OffloadError, match="`input_ids` of the batch holds 64"):
        engine.forward({"input_ids": changed("input_ids", 64)["input_ids"]})
    engine.detach()


def test_a_frozen_sparse_weight_of_a_layer_is_refused_at_attach() -> None:
    model: Any = tiny("qwen3")
    layer = model.get_base_model().model.layers[1]
    layer.sparse = nn.Parameter(torch.eye(4).to_sparse(), requires_grad=False)
    with pytest.raises(
        offload.UnsupportedModelError,
        match=r"model.layers.1.sparse is of torch.sparse_coo.*\n\nhint: `to_dense\(\)` before",
    ):
        offload.attach(model, num_slots=2, device="cpu")
    assert plain(tiny("qwen3"))[0] == plain_loss()


@pytest.mark.thorough
def test_micro_batches_in_another_form_give_the_same_step() -> None:
    model = tiny("qwen3")
    engine = offload.attach(model, num_slots=2, device="cpu")
    expected = engine.forward_backward(micro_batches()).loss
    others: tuple[Any, ...] = (
        iter(micro_batches()),
        tuple(micro_batches()),
        [{n: t.int() for n, t in batch.items()} for batch in micro_batches()],
        [batch | {"position_ids": None} for batch in micro_batches()],
    )
    for other in others:
        assert engine.forward_backward(other).loss == expected
    engine.detach()


def test_a_forward_of_what_is_no_batch_is_refused() -> None:
    engine = offload.attach(tiny("qwen3"), num_slots=2, device="cpu")
    with pytest.raises(offload.OffloadError, match="the batch is a list"):
        engine.forward([BATCH])  # type: ignore[arg-type] # what is wrong with it
    with pytest.raises(offload.OffloadError, match=r"`input_ids` of the batch is \(0, 12\)"):
        engine.forward({"input_ids": IDS[:0]})
    engine.detach()


@pytest.mark.parametrize("block", [torch.no_grad, torch.inference_mode])
def test_a_step_where_gradients_are_switched_off_is_refused(block: Callable[[], Any]) -> None:
    engine = offload.attach(tiny("qwen3"), num_slots=2, device="cpu")
    name = re.escape(f"`torch.{block.__name__}()`")
    with block(), pytest.raises(offload.OffloadError, match=rf"in {name}.*\n\nhint: leave"):
        engine.forward_backward(micro_batches())
    engine.detach()


def test_attaching_in_inference_mode_is_refused() -> None:
    model = tiny("qwen3")
    with torch.inference_mode(), pytest.raises(offload.OffloadError, match="inference_mode"):
        offload.attach(model, num_slots=2, device="cpu")


@pytest.mark.thorough
def test_an_evaluation_in_inference_mode_leaves_nothing_that_a_step_cannot_use() -> None:
    model = tiny("qwen3")
    engine = offload.attach(model, num_slots=2, device="cpu")
    with torch.inference_mode():
        engine.forward(BATCH)
    assert engine.forward_backward(micro_batches()).loss == pytest.approx(plain_loss(), rel=1e-5)
    engine.detach()


def plain_loss() -> float:
    return plain(tiny("qwen3"))[0]


@pytest.mark.thorough
@pytest.mark.parametrize("device", mostly_slow(["cuda:99", "mps", "gpu", ""], "gpu", ""))
def test_a_device_that_is_not_there_is_refused(device: str) -> None:
    model = tiny("qwen3")
    with pytest.raises(offload.OffloadError, match=rf"device is '{device}'.*\n\nhint: `device="):
        offload.attach(model, num_slots=2, device=device)
    assert plain(model)[0] == plain_loss()


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_cuda_without_a_gpu_is_refused() -> None:
    with pytest.raises(offload.OffloadError, match=r"device is 'cuda'; torch finds no CUDA"):
        offload.attach(tiny("qwen3"), num_slots=2)


@pytest.mark.parametrize("model", [nn.Linear(3, 3), nn.Sequential(nn.Linear(3, 3))])
def test_a_module_that_is_no_language_model_is_refused(model: nn.Module) -> None:
    with pytest.raises(offload.UnsupportedModelError, match=r"is no causal .*\n\nhint: attach the"):
        offload.attach(model, num_slots=2, device="cpu")


def test_a_model_without_a_head_is_refused_before_any_gradient() -> None:
    model = MODELS["qwen3"]().model
    model.requires_grad_(False)
    model.layers[0].requires_grad_(True)
    engine = offload.attach(model, num_slots=2, device="cpu")
    with pytest.raises(offload.UnsupportedModelError, match="returns no logits"):
        engine.forward_backward(micro_batches())
    assert all(p.grad is None for p in model.parameters())
    engine.detach()


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


@pytest.mark.thorough
def test_reorder_a_config_without_named_outputs_trains_like_the_plain_model() -> None:
    model = tiny("qwen3")
    loss, expected = plain(model)
    model.config.return_dict = False
    engine = offload.attach(model, num_slots=2, device="cpu", head_chunk_tokens=7)
    assert engine.forward_backward(micro_batches()).loss == pytest.approx(loss, rel=1e-5)
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
    assert engine.forward_backward(micro_batches()).loss == pytest.approx(loss, rel=1e-5)
    found = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    engine.detach()
    assert found.keys() == expected.keys()
    assert not any("layers.1." in name for name in found)
    assert any("layers.2." in name for name in found) is not is_frozen
    assert rel_error(found, expected) < 1e-5


def reference(model: nn.Module) -> tuple[float, dict[str, torch.Tensor]]:
    batches = micro_batches()
    num_items = sum((batch["labels"][:, 1:] != -100).sum() for batch in batches)
    loss = 0.0
    for batch in batches:
        part = model(**batch, use_cache=False, num_items_in_batch=num_items).loss
        part.backward()
        loss += part.item()
    found = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    return loss, found


def test_a_layer_that_detaches_where_weights_train_on_the_host_is_refused() -> None:
    model: Any = MODELS["qwen3"]().train()
    model.model.layers[3] = Detached(model.model.layers[3])
    model.model.layers[3].attention_type = "full_attention"
    engine = offload.attach(model, num_slots=2, device="cpu", trained_weights="host")
    with pytest.raises(offload.UnsupportedModelError, match="layer 3 passes no gradient on"):
        engine.forward_backward(micro_batches())
    engine.detach()
