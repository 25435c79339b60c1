"""Taking stock: every parameter once, in its class and in the form in which it waits."""

import re
from collections import Counter

import pytest
from peft import LoraConfig, get_peft_model
from torch import nn

import offload
from offload.engine.codecs.codec import codec_named
from offload.plan.facts.codec import CodecName
from offload.plan.facts.facts import WeightInventory
from tests.parity.tiny_models import tiny_model
from tests.tiers import mostly_slow

NAMES = (
    "llama",
    "gpt2",
    "qwen3_moe",
    "mixtral",
    "olmoe",
    "gpt_oss",
    "deepseek_v3",
    "glm4_moe",
    "qwen2_moe",
)
BY_NAME = (  # the truth, by what these models' parameters are called
    ("adapters and other trained", r"lora_"),
    ("biases", r"bias$"),
    ("norms", r"norm|\.ln_"),
    ("embeddings", r"embed_tokens|wte|wpe"),
    ("head", r"lm_head"),
    ("router", r"\.(gate|router|shared_expert_gate)\."),
    ("shared experts", r"\.shared_expert"),
    ("experts", r"\.experts\."),
    ("attention", r"\.self_attn\.|\.attn\."),
    ("dense MLP", r"\.mlp\."),
)
MATRICES = {"attention", "dense MLP", "experts", "shared experts"}


def kind_of(name: str) -> str:
    return next(kind for kind, pattern in BY_NAME if re.search(pattern, name))


def adapted(name: str) -> nn.Module:
    targets = r".*\.0\..*(\.q_proj|\.q_a_proj|c_attn)$"
    return get_peft_model(tiny_model(name), LoraConfig(r=2, target_modules=targets))


def stock_of(model: nn.Module, codec: CodecName) -> WeightInventory:
    engine = offload.attach(model, num_slots=2, device="cpu", codec=codec)
    try:
        return engine.weights
    finally:
        engine.close()


@pytest.mark.filterwarnings("ignore:fan_in_fan_out is set")
@pytest.mark.parametrize("codec", mostly_slow(["native", "nf4"], "nf4"))
@pytest.mark.parametrize("name", NAMES)
def test_every_parameter_is_counted_once_in_its_class(name: str, codec: CodecName) -> None:
    model = adapted(name)
    numbers, decoded_bytes = Counter[str](), Counter[str]()
    for parameter_name, parameter in model.named_parameters():
        numbers[kind_of(parameter_name)] += parameter.numel()
        decoded_bytes[kind_of(parameter_name)] += parameter.nbytes
    stock = stock_of(model, codec)
    found_numbers, found_bytes = Counter[str](), Counter[str]()
    for row in stock.rows:
        found_numbers[row.kind] += row.num_parameters
        found_bytes[row.kind] += row.decoded_bytes
    assert found_numbers == numbers
    assert found_bytes == decoded_bytes
    assert stock.num_parameters == sum(p.numel() for p in model.parameters())
    assert stock.decoded_bytes == sum(p.nbytes for p in model.parameters())


@pytest.mark.filterwarnings("ignore:fan_in_fan_out is set")
@pytest.mark.parametrize("name", NAMES)
def test_what_is_encoded_is_counted_as_it_waits(name: str) -> None:
    model, codec = adapted(name), codec_named("nf4")
    encoded = {
        parameter_name: codec.num_bytes(parameter.shape, parameter.dtype)
        for parameter_name, parameter in model.named_parameters()
        if kind_of(parameter_name) in MATRICES and parameter.dim() > 1
    }
    weights = {key: p for key, p in model.named_parameters() if key in encoded}
    in_layers = sum(
        p.nbytes
        for key, p in model.named_parameters()
        if re.search(r"\.(layers|h)\.", key) and not p.requires_grad
    )
    num_all = sum(p.numel() for p in model.parameters())
    stock = stock_of(model, "nf4")
    rows = [row for row in stock.rows if row.codec == "nf4"]
    assert sum(row.encoded_bytes for row in rows) == sum(encoded.values())
    assert stock.encoded_frac == sum(p.numel() for p in weights.values()) / num_all
    assert stock.layers_encoded_frac == sum(p.nbytes for p in weights.values()) / in_layers
    assert stock.decoded_bytes - stock.encoded_bytes == sum(
        p.nbytes - encoded[key] for key, p in weights.items()
    )


def test_nothing_is_called_encoded_that_waits_as_it_is() -> None:
    stock = stock_of(adapted("qwen3_moe"), "native")
    assert stock.encoded_frac == stock.layers_encoded_frac == 0.0
    assert stock.encoded_bytes == stock.decoded_bytes
