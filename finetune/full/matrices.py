"""The matrices inside the weights of a model's layers, for Muon."""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import nn

from offload.engine.experts.interface import goes_through_interface
from offload.engine.model.layers import LayeredModel
from offload.plan.facts.matrices import GATE_UP, OUTPUT, blocks_of, require_separable

MATRIX, STACK = 2, 3  # dimensions


@dataclass(frozen=True, kw_only=True, slots=True)
class Matrices:
    """How the matrices in a weight are found.

    Attributes:
        blocks: The rows of each, one after the other.
        is_interleaved: Whether columns of two matrices take turns instead.
    """

    blocks: tuple[int, ...] = ()
    is_interleaved: bool = False

    def views(self, weight: torch.Tensor) -> Iterator[torch.Tensor]:
        """Yield the matrices of a weight, or of what has its shape."""
        for matrix in weight.unbind() if weight.dim() == STACK else (weight,):
            if self.is_interleaved:
                yield from (matrix[:, 0::2], matrix[:, 1::2])
            else:
                yield from matrix.split(self.blocks)


def matrices_of(model: nn.Module) -> dict[str, Matrices]:
    """Return the matrices of the layers' weights, by name; norms, biases and others have none.

    Raises:
        UnsupportedModelError: A projection holds several in an order that is not known.
    """
    layered = LayeredModel(model)
    within = {id(p) for layer in layered.layers for p in layer.parameters()}
    found: dict[str, Matrices] = {}
    for path, module in model.named_modules():
        for name, parameter in module.named_parameters(recurse=False):
            if id(parameter) not in within:
                continue
            one = _of_experts(module, name, parameter)
            if one is None and parameter.dim() == MATRIX and name == "weight":
                one = _of_linear(model, path, module, parameter)
            if one is not None:
                found[f"{path}.{name}"] = one
    return found


def _of_experts(module: nn.Module, name: str, parameter: nn.Parameter) -> Matrices | None:
    if parameter.dim() != STACK or not goes_through_interface(module):
        return None
    num_rows = parameter.shape[1]
    if name != GATE_UP:
        return Matrices(blocks=(num_rows,))
    if getattr(module, "is_concatenated", True):
        assert not module.is_transposed, "halves of columns: no such experts are known"
        return Matrices(blocks=blocks_of(name, num_rows, num_queries=0))
    return Matrices(is_interleaved=True)


def _of_linear(
    model: nn.Module, path: str, module: nn.Module, parameter: nn.Parameter
) -> Matrices | None:
    if isinstance(module, nn.Embedding):
        return None
    parent, _, name = path.rpartition(".")
    require_separable([name])
    output = getattr(model.get_submodule(parent), OUTPUT, None)
    num_queries = output.in_features if isinstance(output, nn.Linear) else 0
    return Matrices(blocks=blocks_of(name, parameter.shape[0], num_queries=num_queries))
