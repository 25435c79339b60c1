"""Ways in which layer by layer gives the right loss and wrong gradients: each exact, or refused.

"Exact" here is against plain transformers, peft and autograd on the same model and micro-batches.
"""

import copy
import math
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import pytest
import torch
from peft import LoraConfig, PromptTuningConfig, TaskType, get_peft_model
from torch import nn
from transformers import (
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    Gemma4ForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
)

import offload
from offload.engine.layers import LayeredModel
from tests.parity.architectures import gradients, micro_batches, plain, rel_error, streamed, truth
from tests.parity.tiny_models import tiny_model, with_adapters

Batches = Sequence[dict[str, torch.Tensor]]


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def adapted(base: PreTrainedModel) -> nn.Module:
    return with_adapters(base, LayeredModel(base).layers)


def llama(**changes: Any) -> nn.Module:
    return adapted(tiny_model("llama", **changes))


def assert_exact(
    model: nn.Module, batches: Batches | None = None, *, limit: float = 2e-6
) -> Mapping[str, torch.Tensor]:
    """Check streamed against resident to the bit, and against the plain model within rounding."""
    batches = micro_batches() if batches is None else batches
    loss, ours = streamed(model, batches, num_slots=2)
    resident_loss, resident = streamed(model, batches, num_slots=8)
    assert loss == resident_loss
    assert all(torch.equal(ours[name], resident[name]) for name in ours)
    plain_loss, reference = plain(model, batches)
    assert loss == pytest.approx(plain_loss, rel=limit)
    assert rel_error(ours, reference) < limit
    return ours


def assert_refused(model: nn.Module, match: str) -> None:
    """Check that a step is refused before any gradient is touched."""

    def attach_and_step() -> None:
        engine = offload.attach(model, num_slots=2, device="cpu")
        try:
            engine.forward_backward(micro_batches())
        finally:
            engine.detach()

    with pytest.raises(offload.UnsupportedModelError, match=match):
        attach_and_step()
    assert all(parameter.grad is None for parameter in model.parameters())


# -------------------------------------------------------------------------------- left switched on


def test_a_cache_left_on_in_the_config_changes_no_gradient() -> None:
    assert_exact(llama(use_cache=True))


def test_a_cache_left_on_for_generation_changes_no_gradient() -> None:
    base = tiny_model("llama")
    assert base.generation_config is not None
    base.generation_config.use_cache = True
    assert_exact(adapted(base))


def test_checkpointing_left_on_changes_no_gradient_and_is_on_again_after_detach() -> None:
    model: Any = llama()
    expected = assert_exact(model)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it is about to be renamed
        model.get_base_model().gradient_checkpointing_enable()
    engine = offload.attach(model, num_slots=2, device="cpu", head_chunk_tokens=7)
    assert not model.get_base_model().is_gradient_checkpointing
    engine.forward_backward(micro_batches(), dropout_seed=0)
    found = gradients(model)
    engine.detach()
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    assert model.get_base_model().is_gradient_checkpointing


def test_hidden_states_that_a_config_asks_for_are_not_collected_and_come_back_after_detach() -> (
    None
):
    model: Any = llama(output_hidden_states=True)
    assert_exact(model)
    engine = offload.attach(model, num_slots=2, device="cpu")
    engine.forward_backward(micro_batches())
    engine.detach()
    with torch.no_grad():
        output = model(input_ids=torch.tensor([[3, 4, 5]]))
    assert len(output.hidden_states) == 5


# -------------------------------------------------------------------------- trained outside layers


@pytest.mark.parametrize("is_tied", [True, False])
def test_trained_embeddings_and_head_get_their_gradients_tied_or_not(is_tied: bool) -> None:
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=4,
        num_attention_heads=4,
        vocab_size=64,
        tie_word_embeddings=is_tied,
    )
    model = adapted(LlamaForCausalLM(config).requires_grad_(False))
    base: Any = model
    base.get_base_model().get_input_embeddings().weight.requires_grad_(True)
    base.get_base_model().get_output_embeddings().weight.requires_grad_(True)
    found = assert_exact(model)
    assert any("embed_tokens" in name for name in found)
    assert any("lm_head" in name for name in found) is not is_tied


def test_a_head_saved_with_the_adapter_gets_its_gradient() -> None:
    base = tiny_model("llama")
    config = LoraConfig(r=2, target_modules=["q_proj"], modules_to_save=["lm_head", "embed_tokens"])
    found = assert_exact(get_peft_model(base, config).train())
    assert any("lm_head" in name for name in found)
    assert any("embed_tokens" in name for name in found)


def test_a_soft_prompt_is_refused_because_it_is_not_in_the_model() -> None:
    base = tiny_model("llama")
    config = PromptTuningConfig(task_type=TaskType.CAUSAL_LM, num_virtual_tokens=4)
    assert_refused(get_peft_model(base, config), "prompt_encoder.* trains, but is no part of Llama")


# ------------------------------------------------------------------------- arguments of the layers


def gemma4(**changes: Any) -> Gemma4ForCausalLM:
    base = tiny_model("gemma4_text", **changes)
    assert isinstance(base, Gemma4ForCausalLM)
    return base


def test_trained_per_layer_embeddings_get_the_gradients_of_all_layers() -> None:
    model: Any = adapted(gemma4())
    trained = model.get_base_model().model
    for module in (trained.embed_tokens_per_layer, trained.per_layer_model_projection):
        module.weight.requires_grad_(True)
    found = assert_exact(model)
    assert sum("per_layer" in name for name in found) >= 2
    assert all(float(t.norm()) > 0 for name, t in found.items() if "tokens_per_layer" in name)


def test_shared_keys_and_values_are_refused_by_their_setting() -> None:
    base = gemma4()
    base.config.num_kv_shared_layers = 2
    assert_refused(base, "config.num_kv_shared_layers is 2; layers that read another layer's keys")


def test_shared_keys_and_values_are_refused_by_what_a_layer_writes() -> None:
    """As if their setting had another name."""
    base: Any = gemma4()
    base.model.layers[1].self_attn.store_full_length_kv = True
    assert_refused(adapted(base), "Gemma4ForCausalLM has a layer 1 that changes its arguments")


class Wrapped(nn.Module):
    """A layer with something done before or after it, in its own module."""

    def __init__(self, layer: nn.Module, change: Callable[..., Any]) -> None:
        super().__init__()
        self.layer = layer
        self.change = change
        self.register_buffer("calls", torch.zeros(1))

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(self.layer, name)

    def forward(self, hidden: torch.Tensor, **kwargs: Any) -> Any:
        return self.change(self, hidden, kwargs)


def with_changed_layer(change: Callable[..., Any]) -> nn.Module:
    model: Any = llama()
    layers = model.get_base_model().model.layers
    layers[2] = Wrapped(layers[2], change)
    return model


def write_to_input(own: Wrapped, hidden: torch.Tensor, kwargs: dict[str, Any]) -> Any:
    with torch.no_grad():
        hidden.mul_(2)
    return own.layer(hidden, **kwargs)


def write_to_argument(own: Wrapped, hidden: torch.Tensor, kwargs: dict[str, Any]) -> Any:
    kwargs["position_embeddings"][0].mul_(2)
    return own.layer(hidden, **kwargs)


def count_in_buffer(own: Wrapped, hidden: torch.Tensor, kwargs: dict[str, Any]) -> Any:
    own.get_buffer("calls").add_(1)
    return own.layer(hidden, **kwargs)


def replace_buffer(own: Wrapped, hidden: torch.Tensor, kwargs: dict[str, Any]) -> Any:
    own.calls = own.get_buffer("calls") + 1
    return own.layer(hidden, **kwargs)


@pytest.mark.parametrize(
    ("change", "what"),
    [
        (write_to_input, "its input"),
        (write_to_argument, "its arguments"),
        (count_in_buffer, "its buffers"),
        (replace_buffer, "its buffers"),
    ],
)
def test_a_layer_that_writes_what_others_or_its_recompute_read_is_refused(
    change: Callable[..., Any], what: str
) -> None:
    assert_refused(
        with_changed_layer(change), f"LlamaForCausalLM has a layer 2 that changes {what}"
    )


def test_a_container_that_no_layer_changes_may_be_passed() -> None:
    assert_exact(adapted(gemma4()))


# ------------------------------------------------------------------------------- around the layers


def test_a_model_that_drops_layers_at_random_is_refused() -> None:
    base: Any = tiny_model("bart")
    base.model.decoder.layerdrop = 1.0
    assert_refused(adapted(base), r"visits its layers in the order \[\]")


def test_a_model_that_computes_between_its_layers_is_refused() -> None:
    base: Any = tiny_model("llama")
    original = base.model.layers.__class__.__getitem__
    assert original is nn.ModuleList.__getitem__
    forward = base.model.forward

    class Adding(nn.ModuleList):
        def __getitem__(self, index: Any) -> Any:
            layers = super().__getitem__(index)
            return [lambda h, layer=layer, **kw: layer(h, **kw) + 1 for layer in layers]

    def changed_forward(**kwargs: Any) -> Any:
        base.model._modules["layers"].__class__ = Adding
        return forward(**kwargs)

    model = adapted(base)
    base.model.forward = changed_forward
    assert_refused(model, "computes with the hidden state between its layers")


def test_a_tail_that_reads_other_tokens_is_refused() -> None:
    base: Any = tiny_model("llama")
    model = adapted(base)
    base.model.norm.register_forward_hook(lambda _m, _i, out: out + out.mean(dim=1, keepdim=True))
    base.lm_head.register_forward_hook(lambda _m, _i, out: out.cumsum(dim=1))
    assert_refused(model, "does not compute a token's logits from the last layer's output for it")


def test_a_head_that_forbids_part_of_the_vocabulary_is_exact() -> None:
    base: Any = tiny_model("llama")
    model = adapted(base)
    base.lm_head.register_forward_hook(
        lambda _m, _i, out: out.masked_fill(torch.arange(64) < 2, -torch.inf)
    )
    assert_exact(model)


def test_weights_that_are_no_numbers_show_in_the_loss() -> None:
    base: Any = tiny_model("llama")
    base.lm_head.weight[5] = torch.nan
    loss, _ = streamed(adapted(base), micro_batches(), num_slots=2)
    assert math.isnan(loss)


def test_a_tail_that_reads_the_embeddings_is_refused() -> None:
    base: Any = tiny_model("llama")
    model = adapted(base)
    seen: list[torch.Tensor] = []
    base.model.embed_tokens.register_forward_hook(lambda _m, _i, out: seen.append(out))
    base.model.norm.register_forward_hook(lambda _m, _i, out: out + seen[-1])
    assert_refused(model, "does not compute a token's logits from the last layer's output for it")


# -------------------------------------------------------------------------------- rotary and masks


def test_rotary_tables_that_follow_the_longest_row_seen_are_those_of_the_plain_model() -> None:
    """`dynamic` scaling keeps a table from call to call; the tail must not disturb it."""
    base: Any = tiny_model("llama")
    base.config.rope_parameters = {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 10000.0}
    base.config.max_position_embeddings = 13
    rebuilt = LlamaForCausalLM(base.config).requires_grad_(False).train()
    rebuilt.load_state_dict(base.state_dict())
    model = adapted(rebuilt)
    batches = micro_batches()
    long_then_short = [batches[2], batches[0], batches[1]]
    assert_exact(model, long_then_short)
    engine_model, plain_model = copy.deepcopy(model), copy.deepcopy(model)
    engine = offload.attach(engine_model, num_slots=2, device="cpu", head_chunk_tokens=7)
    for step in (
        long_then_short,
        long_then_short[1:],
    ):  # the second starts from what the first left
        engine.forward_backward(step)
        accumulate(plain_model, step)
    found = gradients(engine_model)
    engine.detach()
    assert rel_error(found, gradients(plain_model)) < 2e-6


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


@pytest.mark.parametrize("model_type", ["llama", "gemma3_text", "qwen3_next", "gpt2", "bloom"])
@pytest.mark.parametrize("side", ["left", "right", "none"])
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


@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
@pytest.mark.parametrize("model_type", ["llama", "gemma3_text", "gpt_oss", "qwen3_moe"])
def test_packed_rows_are_exact_and_their_sequences_apart(
    model_type: str, implementation: str
) -> None:
    if model_type == "gpt_oss" and implementation == "sdpa":
        pytest.skip("its attention sinks have no sdpa form")
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


def test_a_mask_that_micro_batches_share_is_exact() -> None:
    batches = micro_batches()[:1] * 3
    assert batches[0]["attention_mask"] is batches[2]["attention_mask"]
    assert_exact(llama(), batches)


@pytest.mark.parametrize("num_micro_batches", [1, 2, 3])
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
        _, resident = streamed(model, batches, num_slots=8)
        assert all(torch.equal(ours[name], resident[name]) for name in ours)
        ours_squared += rel_error(ours, true) ** 2
        plain_squared += rel_error(plain(model, batches)[1], true) ** 2
    assert ours_squared <= 1.05**2 * plain_squared


@pytest.mark.parametrize("num_micro_batches", [1, 2])
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
