"""What attention computes, keeps and costs, by kind: against torch's own counts, and by hand."""

import copy
import warnings
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoConfig, AutoModelForCausalLM

from finetune.adapter.lora import add_lora, linear_names
from finetune.model.empty import compute_exactly
from offload.plan.facts.facts import AdapterSpec, LayerFacts, adapted_linears, model_facts
from offload.plan.facts.linears import (
    DELTA_CHUNK_TOKENS,
    DeltaAttention,
    Recurrence,
    SoftmaxAttention,
    seen_tokens,
)
from offload.plan.machine.machine import named_machine
from offload.plan.memory.memory import recorded_bytes
from offload.plan.memory.visit import adapter_input_bytes, cast_bytes, saved_bytes_per_token
from offload.plan.time.attention import attention_work
from offload.plan.time.roofline import layer_flops
from tests.builders import adapter, workload
from tests.tiers import mostly_slow

Config = dict[str, Any]

SMALL: Config = {
    "hidden_size": 128,
    "intermediate_size": 384,
    "num_hidden_layers": 1,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 32,
    "vocab_size": 32,
    "pad_token_id": 0,
}
LATENT: Config = {key: SMALL[key] for key in SMALL if key != "head_dim"} | {
    "model_type": "deepseek_v3",
    "num_key_value_heads": 8,
    "q_lora_rank": 48,
    "kv_lora_rank": 40,
    "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 16,
    "v_head_dim": 24,
    "moe_intermediate_size": 64,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
}
DELTA: Config = SMALL | {
    "model_type": "qwen3_5_text",
    "layer_types": ["linear_attention"],
    "linear_num_key_heads": 4,
    "linear_num_value_heads": 8,
    "linear_key_head_dim": 24,
    "linear_value_head_dim": 48,
    "linear_conv_kernel_dim": 4,
}
EXPERTS: Config = {"num_local_experts": 4, "num_experts_per_tok": 2}
KINDS: dict[str, Config] = {
    "plain": SMALL | {"model_type": "qwen3"},
    "fused projections": SMALL | {"model_type": "phi3"},
    "latent": LATENT,
    "latent, plain queries": LATENT | {"q_lora_rank": None},
    "latent, experts": LATENT | {"first_k_dense_replace": 0},
    "soft caps": SMALL | {"model_type": "gemma2", "layer_types": ["full_attention"]},
    "sinks": SMALL | EXPERTS | {"model_type": "gpt_oss", "layer_types": ["full_attention"]},
    "output gate": DELTA | {"layer_types": ["full_attention"]},
    "delta rule": DELTA,
    "delta rule, equal heads": DELTA | {"linear_num_key_heads": 8},
}
NUM_TOKENS = 512


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of transformers, about rotary settings of tiny models
        yield


def built(config: Config, dtype: torch.dtype = torch.float32) -> Any:
    made = AutoConfig.for_model(**copy.deepcopy(config))
    torch.manual_seed(0)
    model: Any = AutoModelForCausalLM.from_config(made, dtype=dtype).requires_grad_(False)
    compute_exactly(model)  # as it is when it trains
    return model


# ------------------------------------------------------------------------------------------- FLOPs


def executed_flops(layer: LayerFacts, seq_len: int) -> float:
    """What torch counts: all pairs of tokens, no triangular systems, a convolution's ends."""
    kind, tokens = layer.attention, float(seq_len)
    flops = 2.0 * tokens * sum(x.active * x.d_in * x.d_out for x in layer.linears)
    if isinstance(kind, SoftmaxAttention):
        return flops + 4 * kind.width * tokens * tokens
    assert isinstance(kind, DeltaAttention)
    ends = 2 * kind.conv_tokens * kind.conv_features * (kind.conv_tokens - 1)
    return flops + tokens * kind.flops_per_token(seq_len) - system_flops(kind, seq_len) + ends


def system_flops(kind: DeltaAttention, seq_len: int) -> float:
    width = kind.num_value_heads * (kind.key_dim + kind.value_dim)
    return float(seq_len * DELTA_CHUNK_TOKENS * width)


def table_flops(counter: FlopCounterMode) -> int:
    """Return those of rotary angles: some versions of transformers make them by a product.

    It is made once for all layers, before them, and is no part of any.
    """
    counts = counter.get_flop_counts()
    tables = [name for name in counts if name.endswith(".model.rotary_emb")]
    return sum(sum(counts[name].values()) for name in tables)


@pytest.mark.parametrize("config", KINDS.values(), ids=KINDS)
def test_flops_are_those_that_torch_counts(config: Config) -> None:
    seq_len = 2 * DELTA_CHUNK_TOKENS
    config = config | {"num_hidden_layers": 2}
    if "layer_types" in config:
        config["layer_types"] = 2 * config["layer_types"]
    facts, model = model_facts(config), built(config)
    model.set_attn_implementation("eager")  # of fused attention torch counts no FLOPs on a CPU
    model.set_experts_implementation("eager")
    tokens = torch.randint(0, 32, (1, seq_len))
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model(tokens, use_cache=False)
    head = 2.0 * seq_len * facts.hidden_size * facts.vocab_size
    expected = head + sum(executed_flops(layer, seq_len) for layer in facts.layers)
    extra = counter.get_total_flops() - table_flops(counter) - expected
    kinds = [layer.attention for layer in facts.layers]
    deltas = [kind for kind in kinds if isinstance(kind, DeltaAttention)]
    # other versions of transformers multiply by a system's inverse: twice the work, and counted
    assert extra in (0, 2 * sum(system_flops(kind, seq_len) for kind in deltas))


@pytest.mark.parametrize("name", ["plain", "latent, experts"])
def test_flops_of_a_token_are_the_products_and_half_of_all_pairs(name: str) -> None:
    facts = model_facts(KINDS[name])
    (layer,) = facts.layers
    assert isinstance(layer.attention, SoftmaxAttention)
    attention = 2 * layer.attention.width * 64
    products = 2 * sum(linear.active * linear.d_in * linear.d_out for linear in layer.linears)
    whole = layer_flops(facts, layer, num_tokens=64, context_tokens=64, count="causal")
    assert whole == 64 * (products + attention)


def test_latent_attention_by_hand() -> None:
    """DeepSeek-V3: 128 heads, queries and keys of 128 + 64, values of 128."""
    kind = SoftmaxAttention(
        num_heads=128,
        num_kv_heads=128,
        qk_dim=192,
        v_dim=128,
        rotary_dim=64,
        num_rotated_heads=129,
    )
    assert kind.flops_per_token(4096) == 2 * 128 * (192 + 128) * 2048


def test_a_delta_rule_by_hand() -> None:
    """Qwen3-Next: 32 value heads, 128 features each, chunks of 64, 8,192 convolved features."""
    kind = DeltaAttention(
        num_key_heads=16, num_value_heads=32, key_dim=128, value_dim=128, conv_tokens=4
    )
    head = 2 * 64 * 128 * 2 + 64 * 256 + 2 * 64 * 128 + 3 * 2 * 128 * 128
    assert kind.flops_per_token(4096) == 32 * head + 2 * 4 * 8192
    assert kind.flops_per_token(65) * 65 == 32 * head * 128 + 65 * 2 * 4 * 8192


def test_a_window_bounds_what_a_token_sees() -> None:
    mean = sum(min(i, 16) for i in range(1, 65)) / 64
    assert seen_tokens(64, 16) == pytest.approx(mean - 0.5, abs=0.5)
    assert seen_tokens(64, 64) == seen_tokens(64, None) == 32
    plain = model_facts(KINDS["plain"]).layers[0].attention
    assert isinstance(plain, SoftmaxAttention)
    kind = replace(plain, window=16)
    assert kind.flops_per_token(64) == 4 * kind.width * seen_tokens(64, 16)


# ------------------------------------------------------------------------------------------ memory


class _CaughtError(Exception):
    pass


def arguments_of(model: Any, layer: Any, hidden: torch.Tensor) -> tuple[Any, Any]:
    """Return the arguments that the model gives its first layer."""
    caught: list[tuple[Any, Any]] = []

    def catch(_module: Any, args: Any, kwargs: Any) -> None:
        caught.append((args, kwargs))
        raise _CaughtError

    hook = layer.register_forward_pre_hook(catch, with_kwargs=True)
    with pytest.raises(_CaughtError), torch.no_grad():
        model(inputs_embeds=hidden.detach(), use_cache=False)
    hook.remove()
    args, kwargs = caught[0]
    if args:
        return (hidden, *args[1:]), kwargs
    return (), kwargs | {"hidden_states": hidden}


def storages(values: Any) -> Iterator[int]:
    if isinstance(values, torch.Tensor):
        yield values.untyped_storage().data_ptr()
    elif isinstance(values, dict):
        yield from storages(tuple(values.values()))
    elif isinstance(values, tuple | list):
        for value in values:
            yield from storages(value)


@pytest.mark.parametrize(
    "dtype", mostly_slow([torch.float32, torch.bfloat16], torch.bfloat16), ids=str
)
@pytest.mark.parametrize(
    ("name", "is_adapted", "dropout"),
    [
        pytest.param(
            *(name, is_adapted, dropout),
            marks=() if is_adapted and not dropout else pytest.mark.slow,
        )
        for name in KINDS
        for is_adapted, dropout in ((False, 0.0), (True, 0.0), (True, 0.1))
        if not (dropout and name.startswith("latent"))  # refused: peft adapts it as a parameter
    ],
)
def test_saved_bytes_are_those_that_autograd_saves(
    name: str, is_adapted: bool, dropout: float, dtype: torch.dtype
) -> None:
    config = KINDS[name]
    facts, base = model_facts(config), built(config, dtype)
    (layer,) = facts.layers
    targets, cast = linear_names(base), 0
    if is_adapted:
        add_lora(base, adapter(rank=2, dropout=dropout), seed=0)
        base.train()
    hidden = torch.randn(1, NUM_TOKENS, 128, dtype=dtype, requires_grad=True)
    module = base.model.layers[0]
    args, kwargs = arguments_of(base, module, hidden)
    known = {*storages([hidden, *base.parameters(), *base.buffers()]), *storages([args, kwargs])}
    saved: dict[int, int] = {}

    def note(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in known:
            saved[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        output = module(*args, **kwargs)
    assert output.requires_grad
    predicted = saved_bytes_per_token(
        facts,
        layer,
        seq_len=NUM_TOKENS,
        dtype_bytes=dtype.itemsize,
        is_masked=False,
        form="plain",
        is_cpu=True,
    )
    if is_adapted:
        spec = AdapterSpec(
            rank=2,
            targets=targets,
            experts=False,
            is_in_base_dtype=True,
            has_dropout=dropout > 0,
        )
        adapted = adapted_linears(layer, spec)
        b = dtype.itemsize
        predicted += adapter_input_bytes(adapted, spec=spec, dtype_bytes=b, is_cpu=True)
        cast = cast_bytes(adapted, spec=spec, dtype_bytes=dtype.itemsize)
    assert NUM_TOKENS * predicted + cast == pytest.approx(
        sum(saved.values()), rel=0.1 if is_adapted else 0.05
    )


def test_masks_of_scores_that_are_written_out_and_inputs_of_layers_are_recorded() -> None:
    spec = AdapterSpec(rank=2, targets=("q_proj",), experts=False)
    micro_batch = workload(seq_len=512, head_chunk_tokens=512, adapter=spec)
    recorded = {
        name: recorded_bytes(model_facts(KINDS[name]), micro_batch, is_padded=False) / 512
        for name in ("plain", "soft caps", "delta rule")
    }
    tables = 2 * 32 * 2
    assert recorded == {"plain": 8 + tables, "soft caps": 8 + tables + 512 * 2, "delta rule": 8}
    gemma4 = SMALL | {"model_type": "gemma4_text", "layer_types": ["full_attention"]}
    sizes = [
        recorded_bytes(
            model_facts(gemma4 | {"hidden_size_per_layer_input": size}),
            micro_batch,
            is_padded=False,
        )
        for size in (0, 8)
    ]
    assert sizes[1] - sizes[0] == 512 * 8 * 2


def test_on_a_card_latent_attention_keeps_no_scores() -> None:
    facts = model_facts(LATENT)
    sizes = [
        saved_bytes_per_token(
            facts,
            facts.layers[0],
            seq_len=seq_len,
            dtype_bytes=2,
            is_masked=False,
            form="plain",
            is_cpu=is_cpu,
        )
        for seq_len, is_cpu in ((512, False), (1024, False), (512, True), (1024, True))
    ]
    assert sizes[0] == sizes[1] < sizes[2]
    assert sizes[3] - sizes[2] == 8 * 512 * 4


# -------------------------------------------------------------------------------------------- time


def work(kind: Any, seq_len: int = 4096) -> Any:
    card = named_machine("rtx4090")
    return attention_work(kind, card, num_tokens=seq_len, seq_len=seq_len, dtype_bytes=2)


def test_on_a_cpu_latent_attention_is_not_fused() -> None:
    kind = model_facts(LATENT).layers[0].attention
    cpu = replace(named_machine("rtx4090"), device="cpu")
    there = attention_work(kind, cpu, num_tokens=512, seq_len=512, dtype_bytes=4)
    assert there.flops == 2 * work(kind, 512).flops
    assert there.memory_s > 0 == work(kind, 512).memory_s


def test_attention_is_priced_by_kind() -> None:
    softmax = model_facts(KINDS["plain"]).layers[0].attention
    assert isinstance(softmax, SoftmaxAttention)
    fused, written = work(softmax), work(replace(softmax, scores="sinks"))
    assert written.flops == 2 * fused.flops
    assert written.memory_s > 0 == fused.memory_s
    delta = model_facts(DELTA).layers[0].attention
    assert work(delta, 8192).compute_s == pytest.approx(2 * work(delta).compute_s)
    assert work(softmax, 8192).compute_s == pytest.approx(4 * fused.compute_s)
    nothing = work(Recurrence(width=0, state_size=0))
    assert nothing.flops == nothing.memory_s == 0
    assert work(Recurrence(width=64, state_size=16)).flops == 6 * 64 * 16 * 4096
