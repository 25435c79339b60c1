"""Traced bytes against those that a step of the engine takes on a CPU, tensor by tensor.

Exact but where experts are computed in a loop: a trace takes routing for even, and what stands for
the expert with the most rows is then more than was traced.
"""

import gc
import itertools
from collections.abc import Callable, Mapping
from typing import Any
from unittest import mock

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import AutoConfig, AutoModelForCausalLM

from finetune.adapter.linear_lora import compute_beside
from offload.engine.bound import EngineOptions, LayerKernels
from offload.engine.engine import Engine
from offload.engine.experts import fused
from offload.engine.experts.lora import register
from offload.engine.model.layers import LayeredModel
from offload.engine.tracing.tracer import LiveBytes, Tracer
from offload.engine.tracing.visits import SilentLauncher, trace_visits
from offload.engine.visit_cache import VISIT_CACHE
from offload.plan.memory.memory import TracedBytes
from offload.plan.schedule.op import Kind, Lane
from tests.doubles import HookedDevice
from tests.tiers import mostly_slow, tiered

NUM_LAYERS, VOCABULARY, HIDDEN = 2, 512, 64
DENSE: Mapping[str, Any] = {
    "model_type": "qwen3",
    "hidden_size": HIDDEN,
    "intermediate_size": 3 * HIDDEN,
    "num_hidden_layers": NUM_LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": VOCABULARY,
}
MOE = {**DENSE, "model_type": "qwen3_moe", "moe_intermediate_size": 32, "num_experts": 8}
MOE |= {"num_experts_per_tok": 2}
CONFIGS: Mapping[str, Mapping[str, Any]] = {
    "dense": DENSE,
    "windows": {
        **DENSE,
        "model_type": "gemma3_text",
        "sliding_window": 8,
        "layer_types": ["sliding_attention", "full_attention"],
    },
    "moe": MOE,
    "sinks": {
        **DENSE,
        "model_type": "gpt_oss",
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "sliding_window": 8,
    },
}
ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]
EXPERTS = ["experts.gate_up_proj", "experts.down_proj"]


def built(
    name: str, dtype: torch.dtype, *, path: str = "", experts: bool = False, scale: int = 1
) -> PeftModel:
    sizes = {k: scale * v for k, v in CONFIGS[name].items() if k.endswith(("_size", "head_dim"))}
    torch.manual_seed(0)
    base = AutoModelForCausalLM.from_config(
        AutoConfig.for_model(**{**CONFIGS[name], **sizes}), dtype=dtype
    )
    if path:
        register()
        base.config._experts_implementation = path
    dense = ["gate_proj", "up_proj", "down_proj"] if name == "dense" else []
    lora = LoraConfig(
        r=4, target_modules=ATTENTION + dense, target_parameters=EXPERTS if experts else None
    )
    return compute_beside(get_peft_model(base, lora)).train()


def traced(
    model: PeftModel,
    *,
    rows: int,
    width: int,
    is_padded: bool,
    chunk: int,
    layer_kernels: LayerKernels = "plain",
    tile: int | None = None,
) -> TracedBytes:
    return trace_visits(
        model,
        batch_size=rows,
        seq_len=width,
        is_padded=is_padded,
        head_chunk_tokens=chunk,
        capability=None,
        plain_parts=frozenset() if layer_kernels == "fused" else None,
        mlp_chunk_tokens=tile,
    )


def measured(
    model: PeftModel,
    *,
    rows: int,
    width: int,
    is_padded: bool,
    chunk: int,
    layer_kernels: LayerKernels = "plain",
) -> dict[tuple[Kind, int | None, int | None], int]:
    """Return the most that each compute op of a step adds to what stood before it.

    Of the second step and micro-batch on, gradients are in place.
    """
    memory = LiveBytes()
    tracer, peaks = Tracer(memory), dict[int, int]()

    def around(number: int, lane: Lane, body: Callable[[], None]) -> None:
        if lane is not Lane.COMPUTE:
            body()
            return
        VISIT_CACHE.enter(None)  # a trace is of the visit's first micro-batch, which casts A and B
        # Triton's interpreter leaves garbage with tensors in it: neither starts a kernel.
        with tracer, mock.patch.object(fused, "Launcher", SilentLauncher):
            before = memory.live_bytes
            memory.reset_peak()
            body()
            peaks[number] = memory.peak_bytes - before

    options = EngineOptions(
        codec="native",
        tier="ram",
        store_dir=None,
        num_slots=2,
        stash="device",
        trained_weights="device",
        head_chunk_tokens=chunk,
        num_kept_graphs=0,
        layer_kernels=layer_kernels,
    )
    engine = Engine(model, device=HookedDevice(around), options=options)
    input_ids = torch.randint(0, VOCABULARY, (rows, width))
    attention_mask = torch.ones_like(input_ids)
    attention_mask[0, width - 3 :] = 0 if is_padded else 1
    batch = {"input_ids": input_ids, "labels": input_ids, "attention_mask": attention_mask}
    gc.collect()
    gc.disable()  # what it frees is no op's
    try:
        # Kernels that are not started leave whatever was in memory: no inspection can pass.
        with mock.patch.object(engine, "_inspect"):
            engine.forward_backward([batch])
            spans = engine.forward_backward([batch, batch]).timeline.spans
    finally:
        gc.enable()
        engine.detach()
    return {(s.kind, s.layer, s.micro_batch): peaks[i] for i, s in enumerate(spans) if i in peaks}


MODELS = (
    ("dense", "", False),
    ("windows", "", False),
    ("moe", "grouped_mm", False),
    ("moe", "grouped_mm", True),
    ("moe", "triton", False),
    ("moe", "triton", True),
    ("sinks", "grouped_mm", True),
)
BATCHES = ((torch.float32, False), (torch.bfloat16, True))


@pytest.mark.parametrize(
    ("name", "path", "experts", "dtype", "is_padded"),
    tiered(
        [(*model, *batches) for model in MODELS for batches in BATCHES],
        default=[("sinks", "grouped_mm", True, torch.bfloat16, True)],
        slow=[(*model, *BATCHES[i % 2]) for i, model in enumerate(MODELS)],
    ),
)
def test_traced_bytes_are_those_of_the_step(
    name: str, path: str, experts: bool, dtype: torch.dtype, is_padded: bool
) -> None:
    model = built(name, dtype, path=path, experts=experts)
    sizes: dict[str, Any] = {"rows": 2, "width": 24, "is_padded": is_padded, "chunk": 64}
    prediction, found = traced(model, **sizes), measured(model, **sizes)
    for layer in range(NUM_LAYERS):
        assert prediction.visits[layer] == found[Kind.BACKWARD, layer, 1]
    num_tokens = sizes["rows"] * sizes["width"]
    hidden_bytes = num_tokens * HIDDEN * dtype.itemsize
    # Gradients of all tokens stand beside the chunk of those with a label, one fewer per row.
    chunk = traced(model, **{**sizes, "chunk": num_tokens - sizes["rows"]}).head_chunk
    if path != "triton":  # without kernels nothing enters the tail that it would compute with
        assert found[Kind.TAIL, None, 1] == chunk + hidden_bytes
    assert prediction.recorded + hidden_bytes <= found[Kind.FRONT, None, 1]


@pytest.mark.slow
@pytest.mark.parametrize("experts", mostly_slow({"frozen": False, "adapted": True}, "adapted"))
def test_a_loop_over_experts_takes_what_its_routing_makes_of_it(experts: bool) -> None:
    model = built("moe", torch.bfloat16, path="eager", experts=experts)
    sizes: dict[str, Any] = {"rows": 2, "width": 256, "is_padded": False, "chunk": 64}
    prediction, found = traced(model, **sizes), measured(model, **sizes)
    for layer in range(NUM_LAYERS):
        expected = found[Kind.BACKWARD, layer, 1]
        assert prediction.visits[layer] == pytest.approx(expected, rel=0.01)


@pytest.mark.slow
@pytest.mark.parametrize(
    "dtype",
    [
        pytest.param(torch.float32, id="fp32", marks=pytest.mark.exhaustive),
        pytest.param(torch.bfloat16, id="bf16"),
    ],
)
@pytest.mark.parametrize(
    ("name", "path", "experts"),
    [("dense", "", False), ("moe", "grouped_mm", True), ("moe", "eager", False)],
)
def test_traced_bytes_are_those_of_the_step_in_a_medium_model(
    name: str, path: str, experts: bool, dtype: torch.dtype
) -> None:
    model = built(name, dtype, path=path, experts=experts, scale=8)
    sizes: dict[str, Any] = {"rows": 2, "width": 512, "is_padded": False, "chunk": 256}
    prediction, found = traced(model, **sizes), measured(model, **sizes)
    # A loop is traced with even routing; of grouped products 16 KiB of 32 MB are unexplained.
    slack = 0.03 if path == "eager" else 0.001
    for layer in range(NUM_LAYERS):
        expected = found[Kind.BACKWARD, layer, 1]
        assert prediction.visits[layer] == pytest.approx(expected, rel=slack)


@pytest.mark.thorough
def test_a_trace_leaves_the_model_as_it_was() -> None:
    model = built("moe", torch.float32, path="eager", experts=True)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    traced(model, rows=1, width=8, is_padded=True, chunk=8)
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, before[name])
        assert parameter.grad is None


@pytest.mark.thorough
@pytest.mark.parametrize("path", mostly_slow(["grouped_mm", "triton"], "grouped_mm"))
def test_weights_that_wait_encoded_are_traced_as_those_that_they_decode_to(path: str) -> None:
    sizes: dict[str, Any] = {"rows": 1, "width": 16, "is_padded": False, "chunk": 8}
    model = built("moe", torch.bfloat16, path=path, experts=True)
    whole = traced(model, **sizes)
    for layer in LayeredModel(model).layers:
        for parameter in layer.parameters():
            if not parameter.requires_grad:  # as a model shows what lies in a store
                parameter.data = torch.full((), float("nan")).bfloat16().expand(parameter.shape)
    assert traced(model, **sizes) == whole


@pytest.mark.thorough
def test_layers_that_differ_are_priced_one_by_one() -> None:
    config = {**MOE, "mlp_only_layers": [1], "intermediate_size": 8 * HIDDEN}
    with torch.device("meta"):
        base = AutoModelForCausalLM.from_config(AutoConfig.for_model(**config))
        base.config._experts_implementation = "grouped_mm"
        model = get_peft_model(base, LoraConfig(r=4, target_modules=ATTENTION)).train()
    visits = traced(model, rows=1, width=32, is_padded=False, chunk=8).visits
    assert len(set(visits)) == NUM_LAYERS


@pytest.mark.thorough
def test_a_card_s_attention_is_priced_by_the_kernel_that_it_takes() -> None:
    with torch.device("meta"):
        base = AutoModelForCausalLM.from_config(AutoConfig.for_model(**DENSE))  # fp32, grouped keys
        model = get_peft_model(base, LoraConfig(r=4, target_modules=ATTENTION)).train()

    def visit_bytes(width: int) -> int:
        return trace_visits(
            model,
            batch_size=1,
            seq_len=width,
            is_padded=False,
            head_chunk_tokens=8,
            capability=(8, 6),
        ).visits[0]

    assert visit_bytes(1024) - visit_bytes(512) > 2 * 4 * 4 * (1024**2 - 512**2)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "dtype"),
    mostly_slow(
        itertools.product(["dense", "windows"], [torch.float32, torch.bfloat16]),
        ("windows", torch.bfloat16),
    ),
)
def test_traced_bytes_are_those_of_a_step_with_fused_layers(name: str, dtype: torch.dtype) -> None:
    model = built(name, dtype)
    sizes: dict[str, Any] = {"rows": 2, "width": 24, "is_padded": False, "chunk": 64}
    plain = traced(model, **sizes)
    prediction = traced(model, **sizes, layer_kernels="fused")
    found = measured(model, **sizes, layer_kernels="fused")
    for layer in range(NUM_LAYERS):
        assert prediction.visits[layer] == found[Kind.BACKWARD, layer, 1]
        assert prediction.visits[layer] < plain.visits[layer]
