"""What a layer moves outside products and attention: by the plan, and as it runs."""

import itertools
from contextlib import nullcontext
from dataclasses import replace
from typing import Any, get_args

import pytest
import torch
from transformers import AutoConfig, AutoModel

from offload.engine.pointwise.layers import FusedLayers
from offload.plan.facts.facts import AdapterSpec, model_facts
from offload.plan.facts.workload import LayerCode
from offload.plan.time.pointwise import pointwise_work
from offload.plan.time.pricer import Pricer
from offload.plan.time.roofline import VisitWork, Work
from tests.builders import byte_machine, workload
from tests.counted import SMALL, Counted
from tests.tiers import each_value, mostly_slow, tiered

T = 512
# Settings of each type, and how far off the plan may be: where norms and angles keep their weights
# in fp32 (olmo2), or keys and queries are joined from a part with a rotation and one without
# (phi3), there are passes that the plan does not know.
TYPES: dict[str, tuple[dict[str, object], float]] = {
    "qwen3": ({}, 0.1),
    "llama": ({}, 0.1),
    "mistral": ({"sliding_window": None}, 0.1),
    "qwen2": ({}, 0.1),
    "gemma3_text": ({}, 0.1),
    "phi3": ({"pad_token_id": 0}, 0.2),
    "olmo2": ({}, 0.2),
}


def counted(
    config: dict[str, Any], dtype: torch.dtype, *, is_fused: bool = False
) -> tuple[Counted, Counted]:
    """Count the forward and the backward of a frozen layer."""
    built = AutoConfig.for_model(**config)
    built._attn_implementation = "sdpa"
    model: Any = AutoModel.from_config(built, dtype=dtype).requires_grad_(requires_grad=False)
    hidden = torch.randn(1, T, built.hidden_size, dtype=dtype)
    calls: list[tuple[Any, Any]] = []
    layer = model.layers[0]
    hook = layer.register_forward_pre_hook(
        lambda _, args, kwargs: calls.append((args, kwargs)), with_kwargs=True
    )
    with torch.no_grad(), Counted(multiplies=False):
        model(inputs_embeds=hidden, use_cache=False)
    hook.remove()
    (args, kwargs) = calls[0]
    leaf = hidden.requires_grad_()
    forward, backward = Counted(multiplies=False), Counted(multiplies=False)
    ours = FusedLayers([layer]).visited(0) if is_fused else nullcontext()
    with ours, forward:
        output = layer(
            *((leaf, *args[1:]) if args else ()),
            **(kwargs if args else kwargs | {"hidden_states": leaf}),
        )
    output = output if isinstance(output, torch.Tensor) else output[0]
    gradient = torch.randn_like(output)
    with backward:
        output.backward(gradient)
    return forward, backward


def moved(found: Counted) -> int:
    return sum(
        n
        for name, n in found.num_bytes.items()
        if "attention" not in name and name not in ("mm", "addmm", "bmm")
    )


def priced(config: dict[str, Any], dtype: torch.dtype, code: LayerCode) -> VisitWork:
    facts, b = model_facts(config), dtype.itemsize
    load = replace(
        workload(),
        micro_batch_size=1,
        seq_len=T,
        dtype_bytes=b,
        adapter=AdapterSpec(rank=1, targets=(), experts=False),
        layer_code=code,
    )
    host = replace(byte_machine(b), device="cpu")  # where fused kernels are no faster
    at = Pricer(machine=host, facts=facts, workload=load)
    return pointwise_work(at, facts.layers[0])


DTYPES = (torch.bfloat16, torch.float32)
CASES = tiered(
    itertools.product(TYPES, DTYPES),
    default=[("qwen3", torch.float32)],
    slow=[("qwen3", torch.bfloat16), *each_value(tuple(TYPES), DTYPES)],
)


@pytest.mark.parametrize(("model_type", "dtype"), CASES, ids=str)
def test_a_layer_moves_what_the_plan_says_within_a_tenth(
    model_type: str, dtype: torch.dtype
) -> None:
    config: dict[str, Any] = {**SMALL, **TYPES[model_type][0], "model_type": model_type}
    facts, limit = model_facts(config), TYPES[model_type][1]
    said = priced(config, dtype, "plain")
    forward, backward = counted(config, dtype)
    assert said.forward.memory_s == pytest.approx(moved(forward), rel=limit), forward.num_bytes
    assert said.backward.memory_s == pytest.approx(moved(backward), rel=limit), backward.num_bytes
    if limit == 0.1:
        num_products = len(facts.layers[0].linears)
        assert said.forward.num_ops == forward.total_ops - num_products - 1  # attention
        assert said.backward.num_ops == backward.total_ops - num_products - 1


@pytest.mark.parametrize(("model_type", "dtype"), CASES, ids=str)
def test_a_fused_layer_moves_what_the_plan_says_within_a_tenth(
    model_type: str, dtype: torch.dtype
) -> None:
    config: dict[str, Any] = {**SMALL, **TYPES[model_type][0], "model_type": model_type}
    said, limit = priced(config, dtype, "fused"), 0.2 if model_type == "phi3" else 0.1
    forward, backward = counted(config, dtype, is_fused=True)
    assert said.forward.memory_s == pytest.approx(moved(forward), rel=limit), forward.num_bytes
    assert said.backward.memory_s == pytest.approx(moved(backward), rel=limit), backward.num_bytes
    if limit == 0.1:
        num_products = len(model_facts(config).layers[0].linears)
        assert said.forward.num_ops == forward.total_ops - num_products - 1  # attention
        assert said.backward.num_ops == backward.total_ops - num_products - 1


@pytest.mark.thorough
@pytest.mark.parametrize(
    "dtype", mostly_slow([torch.float32, torch.bfloat16], torch.float32), ids=str
)
def test_a_mixture_saves_by_fused_parts_what_the_plan_says_within_a_tenth(
    dtype: torch.dtype,
) -> None:
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 256}
    config: dict[str, Any] = {**SMALL, **experts, "model_type": "qwen3_moe"}
    plain, fused = (priced(config, dtype, code) for code in ("plain", "fused"))
    plain_found, fused_found = (counted(config, dtype, is_fused=x) for x in (False, True))
    for name, before, after in zip(("forward", "backward"), plain_found, fused_found, strict=True):
        said = getattr(plain, name).memory_s - getattr(fused, name).memory_s
        assert said == pytest.approx(moved(before) - moved(after), rel=0.1)
        num_ops = getattr(plain, name).num_ops - getattr(fused, name).num_ops
        assert num_ops == before.total_ops - after.total_ops


def test_compiled_layers_are_priced_as_fused_ones_and_those_of_auto_by_the_device() -> None:
    config: dict[str, Any] = {**SMALL, "model_type": "llama"}
    prices = {code: priced(config, torch.bfloat16, code) for code in get_args(LayerCode)}
    ours = prices["fused"].forward.num_calls  # torch's compiler makes one call of all that it fuses
    assert ours == 4
    calls = Work(num_calls=ours)
    assert prices["compiled"].forward + calls == prices["fused"].forward
    assert prices["compiled"].backward + calls == prices["fused"].backward
    assert prices["fused"].forward.memory_s < 0.5 * prices["plain"].forward.memory_s
    assert prices["auto"] == prices["plain"]  # on a CPU
    assert workload(layer_code="auto").code_on("cuda") == "fused"
