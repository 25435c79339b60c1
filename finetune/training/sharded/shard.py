"""A model cut into parts, one for each rank, by torch's `fully_shard`.

Each layer is a group of its own: gathered before it computes, and let go of afterwards. What is
around the layers is one more group. Layers are cut one after the other as they move to the device,
so no rank's device ever holds a whole model.

Weights that train are fp32 in each rank's part. Where the model computes in 16 bits they are
rounded as they are gathered, and their gradients are added up in fp32.
"""

from typing import TYPE_CHECKING

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

from offload.engine.internals import bare, refer
from offload.engine.model.layers import LayeredModel

if TYPE_CHECKING:
    from peft import PeftModel
    from transformers import PreTrainedModel


def shard(
    model: "PeftModel | PreTrainedModel", *, device: torch.device, world_size: int
) -> FSDPModule:
    """Cut a model in place, and move this rank's part to the device.

    Args:
        model: On the host, with what trains; it stays the same object.
        device: The device that this rank computes on.
        world_size: The processes that share it, which all call this.

    Returns:
        The model, as torch's type for it.
    """
    if device.type == "cuda":
        torch.cuda.set_device(device)
    mesh = init_device_mesh(device.type, (world_size,))
    layered = LayeredModel(model)
    policy = _policy(model)
    in_towers = {p for tower in layered.towers for p in tower.parameters()}
    for module in (*layered.layers, model):
        if policy.param_dtype is not None:
            _widen(module)
        fully_shard(module, mesh=mesh, mp_policy=policy, ignored_params=in_towers)
    assert isinstance(model, FSDPModule)
    for one in model.modules():
        if isinstance(one, FSDPModule):  # losses are divided by the labels of all ranks: sums
            one.set_force_sum_reduction_for_comms(True)
            one.set_gradient_divide_factor(1.0)
    return model


def _policy(model: nn.Module) -> MixedPrecisionPolicy:
    """Return what is gathered in which type: adapters as they are, trained weights as they compute.

    Arguments of layers, such as tables of rotations, keep their types.
    """
    halves = {
        p.dtype for p in model.parameters() if p.requires_grad and p.dtype is not torch.float32
    }
    if not halves:
        return MixedPrecisionPolicy(cast_forward_inputs=False)
    (dtype,) = halves
    return MixedPrecisionPolicy(
        param_dtype=dtype, reduce_dtype=torch.float32, cast_forward_inputs=False
    )


def _widen(module: nn.Module) -> None:
    """Make fp32 masters of what trains in a module that is about to be cut."""
    for parameter in module.parameters():
        if parameter.requires_grad:
            refer(parameter, bare(parameter).float())
