"""Which of a model's weights a codec may round: matrices, but no norms, biases or routers."""

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

from torch import nn

from offload.engine.codec import NATIVE, Form, form_named
from offload.engine.model.layers import LayeredModel
from offload.plan.facts.codec import CODECS

_NUM_EXPERTS = re.compile(r"(^|_)n(um)?_(\w+_)?experts$")


class Encoding:
    """How each weight of a model's layers is encoded.

    The codec encodes weights of linear layers and of fused experts, or of these alone. Norms,
    biases, routers and all unknown parameters are not encoded, nor is anything that trains.
    """

    def __init__(
        self, layered: LayeredModel, codec: str, *, names: Collection[str] | None = None
    ) -> None:
        """Find the matrices.

        Args:
            layered: The model; it may have no values, and adapters around its layers.
            codec: The codec for them.
            names: Names of the parameters that were published in a form that the codec keeps; None
                for all that may be.
        """
        self._codec, self._same_as = form_named(codec), CODECS[codec].same_as
        fits, sizes = CODECS[codec].fits, _router_sizes(layered)
        named = {id(p): name for name, p in layered.model.named_parameters()}
        self._matrices = {
            id(parameter)
            for layer in layered.layers
            for module in layer.modules()
            for name, parameter in module.named_parameters(recurse=False)
            if _is_matrix(module, name, parameter, router_sizes=sizes)
            and fits(parameter.shape)
            and (names is None or named[id(parameter)] in names)
        }

    def codecs(self, parameters: Sequence[nn.Parameter]) -> list[Form]:
        """Return each parameter's codec during loading, when nothing is frozen yet."""
        return [self._codec if self._is_written(p) else NATIVE for p in parameters]

    def of_layers(self, groups: Sequence[Sequence[nn.Parameter]]) -> list[list[Form]]:
        """Return the codecs of each layer's parameters once it is known what trains."""
        return [
            [
                NATIVE if parameter.requires_grad else codec
                for parameter, codec in zip(group, self.codecs(group), strict=True)
            ]
            for group in groups
        ]

    def _is_written(self, parameter: nn.Parameter) -> bool:
        is_matrix = id(parameter) in self._matrices and parameter.is_floating_point()
        return is_matrix and str(parameter.dtype) != f"torch.{self._same_as}"


def _is_matrix(
    module: nn.Module, name: str, parameter: nn.Parameter, *, router_sizes: Collection[int]
) -> bool:
    kind = type(module).__name__
    if isinstance(module, nn.Linear) or kind == "Conv1D":
        is_router = "Router" in kind or "Gate" in kind or parameter.shape[0] in router_sizes
        return name == "weight" and not is_router
    return "Expert" in kind and parameter.dim() >= 2 and not name.endswith("bias")


def _router_sizes(layered: LayeredModel) -> set[int]:
    """Return the output sizes that identify a linear layer as a router: one per expert, or 1."""
    return {1, *_expert_counts(layered.model.config.get_text_config().to_dict())}


def _expert_counts(config: Mapping[Any, Any]) -> Iterator[Any]:
    """Yield the numbers of experts in a config and in its nested configs."""
    for key, value in config.items():
        if isinstance(value, Mapping):
            yield from _expert_counts(value)
        elif _NUM_EXPERTS.search(str(key)):
            yield from value if isinstance(value, list | tuple) else [value]
