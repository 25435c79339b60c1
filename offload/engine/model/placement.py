"""Which of a model's tensors are streamed, and the requirements on the others."""

from collections import Counter
from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import nn

from offload.engine.host.slab import Record, is_stand_in
from offload.engine.internals import bare, refer
from offload.engine.model.layers import LayeredModel, homes_of
from offload.errors import UnsupportedModelError


def streamed_parameters(
    layered: LayeredModel, *, are_trained_streamed: bool
) -> list[list[nn.Parameter]]:
    """Return each layer's parameters that nothing else uses: the frozen ones, or all.

    Args:
        layered: The model.
        are_trained_streamed: Whether weights that train are streamed too.

    Raises:
        UnsupportedModelError: There is nothing to stream, or a tensor that cannot be.
    """
    homes = homes_of(layered.layers, layered.around)
    owners = Counter(
        id(p) for module in layered.model.modules() for p in module.parameters(recurse=False)
    )
    groups = [
        [
            p
            for p in layer.parameters()
            if (are_trained_streamed or not p.requires_grad)
            and id(p) in homes
            and owners[id(p)] == 1
        ]
        for layer in layered.layers
    ]
    _require_strided(layered, groups)
    if not any(groups):
        raise UnsupportedModelError(
            f"{type(layered.model).__name__} has no frozen parameter in its layers",
            limit="only frozen weights are streamed",
            hint="freeze the base model and add an adapter, e.g. `peft.get_peft_model(model, ...)`,"
            ' or train its weights on the host: `trained_weights="host"`',
        )
    return groups


def _require_strided(layered: LayeredModel, groups: Sequence[Sequence[nn.Parameter]]) -> None:
    """Check that streamed tensors are plain, strided and contiguous."""
    streamed = {id(parameter) for group in groups for parameter in group}
    for name, parameter in layered.model.named_parameters():
        if id(parameter) in streamed and parameter.layout is not torch.strided:
            raise UnsupportedModelError(
                f"{name} is of {parameter.layout}",
                limit="only tensors of torch.strided are streamed",
                hint="`to_dense()` before `offload.attach`; or make it a buffer, which stays on the"
                " device",
            )


def only_device(layered: LayeredModel) -> torch.device:
    """Return the device that a model is on; towers may be without values.

    Raises:
        UnsupportedModelError: There are several, or it has no values.
    """
    modules = modules_on_device(layered)
    devices = {p.device for module in modules for p in module.parameters(recurse=False)}
    if len(devices) != 1 or torch.device("meta") in devices:
        raise UnsupportedModelError(
            f"the model's parameters are on {sorted(map(str, devices))}",
            limit="they must be on one device, with values",
            hint='load it on the host: `from_pretrained(..., device_map="cpu")`',
        )
    return devices.pop()


def require_values(model: nn.Module, records: Sequence[Record]) -> None:
    """Check that trained parameters and all that are not streamed have values of their own.

    Before they are streamed, encoded weights show placeholders, which are all NaN; so are copies
    of them and anything computed from them.

    Raises:
        UnsupportedModelError: A parameter has none, or was made from one that has none.
    """
    if not any(record.decoded_bytes for record in records):
        return
    frozen = {id(f.parameter) for r in records for f in r.fields if not f.parameter.requires_grad}
    for name, parameter in model.named_parameters():
        if id(parameter) in frozen or parameter.is_meta:
            continue
        values = bare(parameter)
        if is_stand_in(values) or (
            parameter.requires_grad and values.numel() and bool(values.isnan().all())
        ):
            raise UnsupportedModelError(
                f"{name} has no values: it was loaded encoded",
                limit="only frozen weights of the layers may wait encoded, and nothing be copied"
                " from them",
                hint='load it as it is: `offload.codec: native`, or `codec="native"`',
            )


def move_the_rest(
    layered: LayeredModel,
    records: Sequence[Record],
    torch_device: torch.device,
    *,
    on_host: Sequence[int] = (),
) -> None:
    """Move parameters outside the slots, and buffers, to the compute device.

    Args:
        layered: The model.
        records: What is streamed.
        torch_device: The compute device.
        on_host: Ids of other parameters that stay where they are.
    """
    streamed = {id(field.parameter) for record in records for field in record.fields}
    streamed |= set(on_host)
    for module in modules_on_device(layered):
        for parameter in module.parameters(recurse=False):
            if id(parameter) not in streamed:
                refer(parameter, bare(parameter).to(torch_device))
        for name, buffer in module.named_buffers(recurse=False):
            setattr(module, name, buffer.to(torch_device))


def modules_on_device(layered: LayeredModel) -> list[nn.Module]:
    """Return all modules except towers, which text does not pass through."""
    left = {module for tower in layered.towers for module in tower.modules()}
    return [module for module in layered.model.modules() if module not in left]


def trains_front(layered: LayeredModel) -> bool:
    """Return whether anything outside the layers trains."""
    in_layers = {id(parameter) for parameter in layered.layers.parameters()}
    return any(p.requires_grad and id(p) not in in_layers for p in layered.model.parameters())


def switch_off_checkpointing(model: nn.Module) -> list[nn.Module]:
    """Disable Hugging Face's gradient checkpointing, since visits recompute; return its modules."""
    switched = [m for m in model.modules() if getattr(m, "gradient_checkpointing", False) is True]
    for module in switched:
        set_checkpointing(module, is_on=False)
    return switched


def set_checkpointing(module: nn.Module, *, is_on: bool) -> None:
    """Enable or disable one module's checkpointing."""
    cast("Any", module).gradient_checkpointing = is_on
