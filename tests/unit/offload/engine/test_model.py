"""A model's parts, as the engine finds, loads and reads them."""

import random
import re
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn
from torch.nn.modules import module as torch_module
from transformers import PreTrainedModel, Qwen3Config, Qwen3ForCausalLM

import offload
from offload.engine.codec import form_named
from offload.engine.host.slab import Record, Slab
from offload.engine.model.capture import CaptureWeights
from offload.engine.model.visits import Graph
from offload.engine.recompute import Unread, left_out
from offload.engine.safety.parts import candidates, unread_products
from offload.errors import UnsupportedModelError
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


def stock_of(model: nn.Module, codec: str) -> WeightInventory:
    engine = offload.attach(model, num_slots=2, device="cpu", codec=codec)
    try:
        return engine.weights
    finally:
        engine.close()


@pytest.mark.filterwarnings("ignore:fan_in_fan_out is set")
@pytest.mark.parametrize("codec", mostly_slow(["native", "nf4"], "nf4"))
@pytest.mark.parametrize("name", NAMES)
def test_every_parameter_is_counted_once_in_its_class(name: str, codec: str) -> None:
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
    model, codec = adapted(name), form_named("nf4")
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


# ---------------------------------------------------------------------------------------- load hook


SHAPE: dict[str, Any] = {
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 8,
    "vocab_size": 32,
}


class NotedSlab(Slab):
    """A slab that notes how it is used."""

    def __init__(self, records: Sequence[Record], names: Sequence[Sequence[str]]) -> None:
        super().__init__(records)
        self.names = names
        self.is_closed = False

    def close(self) -> None:
        super().close()
        self.is_closed = True


def build(**changes: Any) -> PreTrainedModel:
    """Build a model without values, as a loader does first."""
    with torch.device("meta"):
        return Qwen3ForCausalLM(Qwen3Config(**SHAPE, **changes))


def give(model: nn.Module, name: str, *, dtype: torch.dtype = torch.float32) -> nn.Parameter:
    """Give a parameter values of its own, as a loader does."""
    owner, _, attribute = name.rpartition(".")
    module = model.get_submodule(owner)
    old = getattr(module, attribute)
    setattr(module, attribute, nn.Parameter(torch.randn(old.shape, dtype=dtype)))
    new: nn.Parameter = getattr(module, attribute)
    return new


def test_weights_of_layers_are_put_as_they_come_and_others_are_left_alone() -> None:
    with CaptureWeights(NotedSlab) as captured:
        model = build()
        assert captured.backing is None
        torch.manual_seed(0)
        found = {name: give(model, name) for name, _ in list(model.named_parameters())}
    slab = captured.backing
    assert slab is not None
    assert [name for names in slab.names for name in names] == [n for n in found if "layers." in n]
    torch.manual_seed(0)
    for parameter in found.values():
        assert torch.equal(parameter, torch.randn(parameter.shape))
    slab.adopt([list(layer.parameters()) for layer in model.model.layers])
    assert [len(r.fields) for r in slab.records] == [len(names) for names in slab.names]
    assert not slab.is_closed


def test_a_parameter_of_another_dtype_than_its_module_keeps_its_memory() -> None:
    with CaptureWeights(NotedSlab) as captured:
        model = build()
        odd = give(model, "model.layers.1.mlp.up_proj.weight", dtype=torch.bfloat16)
        even = give(model, "model.layers.1.mlp.down_proj.weight")
    assert captured.backing is not None
    captured.backing.adopt([[odd, even], [odd, even], [odd, even]])
    fields = [field for record in captured.backing.records for field in record.fields]
    assert [field.parameter for field in fields] == [even]


def test_a_parameter_that_has_no_values_yet_keeps_its_memory() -> None:
    with CaptureWeights(NotedSlab, is_loaded=lambda p: p.requires_grad) as captured:
        model = build()
        layer = model.model.layers[0].mlp
        layer.up_proj.weight = nn.Parameter(torch.ones(32, 16), requires_grad=False)
        assert captured.backing is None
        layer.up_proj.weight = nn.Parameter(torch.ones(32, 16))
    assert captured.backing is not None


@pytest.mark.parametrize("fault", [KeyboardInterrupt, MemoryError])
def test_whatever_ends_loading_the_backing_is_closed_and_torch_is_left_as_it_was(
    fault: type[BaseException],
) -> None:
    before = (
        dict(torch_module._global_module_registration_hooks),
        dict(torch_module._global_parameter_registration_hooks),
    )
    captured = CaptureWeights(NotedSlab)

    def load() -> None:
        with captured:
            give(build(), "model.layers.0.mlp.up_proj.weight")
            raise fault

    with pytest.raises(fault):
        load()
    assert captured.backing is not None
    assert captured.backing.is_closed
    after = (
        torch_module._global_module_registration_hooks,
        torch_module._global_parameter_registration_hooks,
    )
    assert before == tuple(map(dict, after))


def test_a_model_whose_layers_cannot_be_streamed_is_refused_while_it_is_loaded() -> None:
    with (
        pytest.raises(UnsupportedModelError, match="encoder with a decoder"),
        CaptureWeights(NotedSlab),
    ):
        give(build(is_encoder_decoder=True), "model.norm.weight")


# ------------------------------------------------------------------------------------------ readers


KEPT: list[Any] = []
After = Callable[[nn.Module, torch.Tensor, torch.Tensor], torch.Tensor]


class Layer(nn.Module):
    """A small MLP; `after` is what becomes of its product."""

    def __init__(self, after: After) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up, self.down = nn.Linear(8, 8), nn.Linear(8, 8)
        self.norm, self.gate = nn.LayerNorm(8), nn.Parameter(torch.randn(8))
        self.total = nn.Buffer(torch.zeros(()))
        self.last: Any = None
        self.after = after
        for linear in (self.up, self.down):
            linear.requires_grad_(requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.after(self, x, self.down(torch.nn.functional.silu(self.up(x))))


class Keeps(torch.autograd.Function):
    """Keeps a tensor that autograd does not know of."""

    @staticmethod
    def forward(ctx: Any, y: torch.Tensor) -> torch.Tensor:
        ctx.y = y * 1.0
        return y + 0.0

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient


class Opaque(torch.autograd.Function):
    """Reads values past torch's dispatcher, as kernels do, and scales its gradient by them."""

    @staticmethod
    def forward(ctx: Any, y: torch.Tensor) -> torch.Tensor:
        ctx.scale = 1.0 + float(abs(y.detach().numpy()).mean())
        return y + 0.0

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient * ctx.scale


def kept_in_a_global(_: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    KEPT[:] = [y.detach().mean()]
    return x + y


def kept_in_an_attribute(layer: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    layer.last = (x + y).detach()
    return x + y


def added_to_a_buffer(layer: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    layer.total.copy_(y.detach().mean())
    return x + y


def branched_on(_: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return x + (y.clamp(max=1.0) if y.isinf().any() else y)


def seen_by_python(_: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    random.random() if y.detach().sum().item() > 0 else None
    return x + y


def written_in_place(_: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return y.add_(x)


READERS: list[After] = [
    kept_in_a_global,
    kept_in_an_attribute,
    added_to_a_buffer,
    branched_on,
    seen_by_python,
    written_in_place,
    lambda layer, x, y: x + layer.norm(y),  # type: ignore[operator]
    lambda layer, x, y: x + y * layer.gate,  # type: ignore[operator]
    lambda _, x, y: x + y.sigmoid(),
    lambda _, x, y: x * y,
    lambda _, x, y: x + y[y.abs() > 0].view_as(y),
    lambda _, x, y: x + Keeps.apply(y),
    lambda _, x, y: x + Opaque.apply(y),
    lambda _, x, y: x + y + y,
    lambda _, x, y: x + 0.0 * y.detach(),
    lambda _, x, y: torch.where(y > 0, x, x + y),
]
UNPROVED: list[After] = [
    lambda _, x, y: x + torch.nn.functional.dropout(y, 0.3),  # its mask is made like it
]
NOT_READERS: list[After] = [
    lambda _, x, y: x + y,
    lambda _, x, y: y + x,
    lambda _, x, y: x + 0.5 * y,
    lambda _, x, y: x + y.view(-1, 8).view(x.shape),
    lambda _, x, y: x + y.view(-1, 8).reshape(x.shape),
    lambda _, x, y: (x.float() + y.double()).to(x.dtype),
    lambda _, x, y: y,
]


def found_in(layer: nn.Module) -> set[str]:
    torch.manual_seed(1)
    input_BTD = torch.randn(2, 5, 8)

    def visit(unread: Sequence[Unread]) -> Graph:
        torch.manual_seed(2)
        leaf_BTD = input_BTD.clone().requires_grad_()
        with left_out(unread) as left:
            output = layer(leaf_BTD)
        return Graph(input_BTD=leaf_BTD, said=(output,), is_as_found=left.is_as_found(output))

    trained = [p for p in layer.parameters() if p.requires_grad]
    return set(unread_products(layer, visit, trained))


@pytest.mark.parametrize("after", [*READERS, *UNPROVED])
def test_a_product_with_a_reader_is_computed(after: After) -> None:
    layer = Layer(after)
    assert found_in(layer) == set()
    assert not any("forward" in vars(module) for module in layer.modules())
    assert all(parameter.grad is None for parameter in layer.parameters())


@pytest.mark.parametrize("after", NOT_READERS)
def test_a_product_that_is_only_added_is_found(after: After) -> None:
    assert found_in(Layer(after)) == {"down"}


def plain() -> Layer:
    return Layer(lambda _, x, y: x + y)


def test_a_linear_that_is_called_twice_is_computed() -> None:
    class Twice(Layer):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.down(x) + self.down(x)

    assert found_in(Twice(lambda _, _x, y: y)) == set()


def test_linears_beside_each_other_are_both_found() -> None:
    class Parallel(Layer):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + self.up(x) + self.down(x)

    assert found_in(Parallel(lambda _, _x, y: y)) == {"up", "down"}


def hook(*_: object) -> None:
    pass


@pytest.mark.parametrize(
    "register",
    [
        "register_forward_hook",
        "register_forward_pre_hook",
        "register_full_backward_hook",
        "register_full_backward_pre_hook",
    ],
)
@pytest.mark.parametrize("where", ["", "down", "norm"])
def test_a_layer_with_hooks_is_computed(register: str, where: str) -> None:
    layer = plain()
    handle = getattr(layer.get_submodule(where), register)(hook)
    assert candidates(layer) == {}
    handle.remove()
    assert found_in(layer) == {"down"}


def test_global_hooks_hooks_of_parameters_and_replaced_forwards_are_seen() -> None:
    layer = plain()
    handle = nn.modules.module.register_module_forward_hook(hook)
    assert candidates(layer) == {}
    handle.remove()
    handle = layer.gate.register_hook(hook)
    assert candidates(layer) == {}
    handle.remove()
    vars(layer.down)["forward"] = layer.down.forward
    assert set(candidates(layer)) == {"up"}


def test_compiled_layers_are_computed() -> None:
    for compiled in ("", "norm"):
        layer = plain()
        layer.get_submodule(compiled).compile(backend="eager")
        assert candidates(layer) == {}
    wrapped: Any = plain()
    wrapped.norm = torch.compile(wrapped.norm, backend="eager")
    assert candidates(wrapped) == {}


def test_a_linear_that_trains_is_computed() -> None:
    layer = plain()
    layer.down.requires_grad_()
    assert found_in(layer) == set()
