from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.modules import module as torch_module
from transformers import PreTrainedModel, Qwen3Config, Qwen3ForCausalLM

from offload.engine.host.slab import Record, Slab
from offload.engine.model.hooks import CaptureWeights
from offload.errors import UnsupportedModelError

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
        pytest.raises(UnsupportedModelError, match="num_kv_shared_layers"),
        CaptureWeights(NotedSlab),
    ):
        give(build(num_kv_shared_layers=1), "model.norm.weight")
