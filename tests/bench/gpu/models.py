"""Models of real shapes with random weights, made where they will wait: one copy, no checkpoint.

The model is built without memory. Its layers' weights are written into the slab, encoded on the
way where they are to be; embeddings, norm and head get memory of their own. Values are cut from one
block of random numbers, about N(0, 0.02), at a place that depends on a parameter's name alone: made
at the rate of a copy, and the same ones in any library that uses the same names.
"""

import time
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
import yaml
from accelerate import init_empty_weights
from peft import LoraConfig, PeftModel, get_peft_model
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from finetune.adapter.linear_lora import compute_beside, compute_in_base_dtype
from offload.engine.codec import NATIVE
from offload.engine.experts.autotune import use
from offload.engine.experts.products import goes_through_interface
from offload.engine.host.numa import bind_memory, place_near, thread_on
from offload.engine.host.slab import Slab, lay_out
from offload.engine.model.encoding import Encoding
from offload.engine.model.layers import LayeredModel
from offload.plan.facts.facts import AdapterSpec
from offload.plan.machine.machine import ExpertsImplementation
from tests.bench.record import ROOT

STD = 0.02
POOL_LEN = 2**22 + 3
INIT = "random, cut from one block by each parameter's name"
ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
EXPERTS = ("mlp.experts.gate_up_proj", "mlp.experts.down_proj")


def fields(shape: str, *, num_layers: int | None = None, **other: Any) -> dict[str, Any]:
    """Return the config of a shape in recipes/shapes, with some of it changed."""
    text = (ROOT / "recipes/shapes" / f"{shape}.yaml").read_text()
    found: dict[str, Any] = yaml.safe_load(text)
    return found | other | ({} if num_layers is None else {"num_hidden_layers": num_layers})


@cache
def _pool(dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    drawn = torch.randn(POOL_LEN, generator=torch.Generator().manual_seed(0))
    return drawn.mul_(STD).to(dtype).to(device)


@torch.no_grad()
def fill(name: str, target: torch.Tensor) -> None:
    """Give a contiguous tensor the values that belong to a parameter's name; norms are about 1.

    Args:
        name: As the plain model calls it, such as model.layers.0.mlp.up_proj.weight.
        target: Floating point, on any device.
    """
    pool, flat = _pool(target.dtype, target.device), target.view(-1)
    start, done = zlib.crc32(name.encode()) % POOL_LEN, 0
    while done < flat.numel():
        part = pool[start : start + flat.numel() - done]
        flat[done : done + part.numel()].copy_(part)
        start, done = 0, done + part.numel()
    if "norm" in name.rsplit(".", 2)[-2]:
        target += 1


@dataclass(frozen=True, kw_only=True, slots=True)
class Made:
    """A model with adapters, its layers in a slab.

    Attributes:
        model: Frozen but for its adapters.
        slab: Where its layers' weights lie.
        seconds: What it took.
    """

    model: PeftModel
    slab: Slab
    seconds: float


def make(
    config: Mapping[str, Any],
    *,
    dtype: torch.dtype,
    codec: str,
    device: torch.device,
    adapter: AdapterSpec,
    experts_implementation: ExpertsImplementation | None,
) -> Made:
    """Make a model whose layers wait in a slab, written by a codec.

    Args:
        config: From `fields`.
        dtype: Of its weights as they compute.
        codec: How the layers' matrices wait.
        device: Where they are encoded, and will compute.
        adapter: Its rank, linears, and whether experts have one.
        experts_implementation: How experts are multiplied.
    """
    start_s = time.perf_counter()
    place = place_near(device)
    with thread_on(place.cpus):
        base = empty(config, dtype)
        slab = _stowed(base, codec, device, place.node)
    if experts_implementation is not None:
        for module in base.modules():
            if goes_through_interface(module):
                use(experts_implementation, module)
    lora = LoraConfig(
        r=adapter.rank,
        lora_alpha=2 * adapter.rank,
        target_modules=list(adapter.targets),
        target_parameters=list(EXPERTS) if adapter.experts else None,
        task_type="CAUSAL_LM",
    )
    torch.manual_seed(0)
    model: Any = compute_beside(get_peft_model(base, lora))
    if adapter.is_in_base_dtype:
        compute_in_base_dtype(model)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:  # zero to begin with, which would leave A without gradients
            nn.init.normal_(parameter, std=STD / 10)
    model.train()
    return Made(model=model, slab=slab, seconds=time.perf_counter() - start_s)


def empty(config: Mapping[str, Any], dtype: torch.dtype) -> PreTrainedModel:
    """Return a model whose parameters are on the meta device and whose buffers are not."""
    given = dict(config)
    kind = AutoConfig.for_model(given.pop("model_type"), **given, use_cache=False)
    with init_empty_weights(include_buffers=False):
        model: PreTrainedModel = AutoModelForCausalLM.from_config(
            kind, dtype=dtype, attn_implementation="sdpa"
        )
    return model.requires_grad_(requires_grad=False)


def with_values(base: PreTrainedModel) -> PreTrainedModel:
    """Give an empty model memory on the host, and the values that belong to its names.

    Buffers, such as a rotation's frequencies, have their values already: `to_empty` would lose
    them.
    """
    for path, module in base.named_modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            values = torch.empty(parameter.shape, dtype=parameter.dtype)
            fill(f"{path}.{name}", values)
            setattr(module, name, nn.Parameter(values, requires_grad=False))
    base.tie_weights()
    return base


def _stowed(base: PreTrainedModel, codec: str, device: torch.device, node: int | None) -> Slab:
    """Give an empty model values: its layers' in a slab, all others memory of their own."""
    names: dict[int, str] = {}
    for path, module in base.named_modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            place = _placeholder(parameter)
            setattr(module, name, place)
            names[id(place)] = f"{path}.{name}"
    base.tie_weights()
    layered = LayeredModel(base)
    encoding, groups = Encoding(layered, codec), [list(x.parameters()) for x in layered.layers]
    slab = Slab(
        [lay_out(group, encoding.codecs(group)) for group in groups],
        before_touch=lambda address, num_bytes: bind_memory(address, num_bytes, node),
        encoding_device=device,
    )
    for layer, record in enumerate(slab.records):
        for index, field in enumerate(record.fields):
            name = names[id(field.parameter)]
            if field.codec is NATIVE:  # where it will lie, and nowhere else
                fill(name, field.view(slab.layer(layer)))
            else:
                values = torch.empty(field.shape, dtype=field.dtype, device=device)
                fill(name, values)
                slab.put(layer, index, values)
        slab.alias(layer)
    own = {id(p) for group in groups for p in group}
    for parameter in base.parameters():
        if id(parameter) not in own:
            parameter.data = torch.empty(parameter.shape, dtype=parameter.dtype)
            fill(names[id(parameter)], parameter.data)
    return slab


def _placeholder(parameter: nn.Parameter) -> nn.Parameter:
    """Return a parameter of that shape and type in the memory of one value."""
    values = torch.zeros((), dtype=parameter.dtype).expand(parameter.shape)
    return nn.Parameter(values, requires_grad=False)
