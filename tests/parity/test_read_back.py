"""What the host would wait for on a GPU: values of tensors that a step reads back."""

import traceback
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import offload
from tests.parity.steps import micro_batches, tiny
from tests.tiers import mostly_slow

READS_BACK = {"_local_scalar_dense", "nonzero", "equal", "masked_select", "_unique2"}


class Watch(TorchDispatchMode):
    """Notes the functions in whose call a value is read back, in the forward and the backward."""

    def __init__(self) -> None:
        super().__init__()
        self.readers: list[set[str]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.overloadpacket.__name__ in READS_BACK:
            self.readers.append({frame.name for frame in traceback.extract_stack()})
        return func(*args, **(kwargs or {}))


@pytest.mark.thorough
@pytest.mark.parametrize(
    "name", mostly_slow(["llama", "qwen3", "qwen3_moe", "gemma3_text", "gpt_oss"], "qwen3_moe")
)
def test_only_masks_and_labels_are_looked_at_inside_a_step(name: str) -> None:
    """transformers looks whether a mask is all ones, and whether positions are of packed rows.

    Both before the layers and before the head, so never inside or between visits. The labels are
    looked at on the host.
    """
    model = tiny(name)
    model.config._experts_implementation = "grouped_mm"
    engine = offload.attach(model, num_slots=2, device="cpu", head_chunk_tokens=7)
    batches = micro_batches()
    engine.forward_backward(batches, dropout_seed=0)
    with Watch() as watch:
        engine.forward_backward(batches, dropout_seed=0)
    engine.detach()
    looks = {"find_packed_sequence_indices", "_ignore_causal_mask_sdpa", "with_labels"}
    assert watch.readers, "labels are always looked at"
    assert [reader for reader in watch.readers if not reader & looks] == []
    assert not any("layer_forward" in reader for reader in watch.readers)


@pytest.mark.thorough
def test_a_value_read_back_in_a_visit_would_be_seen() -> None:
    model = tiny("qwen3")
    engine = offload.attach(model, num_slots=2, device="cpu", head_chunk_tokens=7)
    layer = model.get_base_model().get_submodule("model.layers.1.mlp")

    def look(_module: torch.nn.Module, _args: Any, output: torch.Tensor) -> None:
        assert output.sum().item() is not None

    layer.register_forward_hook(look)
    engine.forward_backward(micro_batches(), dropout_seed=0)
    with Watch() as watch:
        engine.forward_backward(micro_batches(), dropout_seed=0)
    engine.detach()
    assert sum("layer_forward" in reader for reader in watch.readers) == 6  # two visits of three
