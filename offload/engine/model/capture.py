"""Intercepts the weights of decoder layers while a model is loaded, tensor by tensor.

Problem. A loader gives every parameter memory of its own, and the engine would then copy the
layers into its slab: the model is in memory twice. A loader of our own would have to know each
architecture's tensor names, and which tensors are fused and tied.

Idea. Leave loading to the model's library and use torch's own hook on the registration of
parameters. The model is built without values first, so when the first parameter with values
arrives, the module tree is complete: the layers are found and laid out, and a backing is made.
From then on each parameter of a layer is stored in the backing as it arrives and aliases it, and
its original memory is free at once. A parameter that does not fit the layout (another dtype than
the module was built with) keeps its memory, and is resident later.

Cost. Mapped shards are read as pages are touched. In addition to the backing, memory is needed
only to convert one tensor, provided the library converts one tensor after the other.
"""

from collections.abc import Callable, Collection, Sequence
from types import TracebackType
from typing import Any, Generic, Protocol, TypeVar, cast

import torch
from torch import nn
from torch.nn.modules import module as torch_module

from offload.engine.host.pagelock import trim_heap
from offload.engine.host.slab import Field, Record, lay_out
from offload.engine.internals import bare, refer
from offload.engine.model.encoding import Encoding
from offload.engine.model.layers import LayeredModel

_Places = dict[tuple[nn.Module, str], tuple[int, int, Field]]
"""Layer, field index and field of each module and attribute."""

OnPut = Callable[[int, int], None]
"""Called with the number of weight bytes put so far and the total, both before encoding."""


class LoadTarget(Protocol):
    """Where weights are stored while they are loaded."""

    def put(self, layer: int, index: int, values: torch.Tensor) -> torch.Tensor:
        """Store the values of a layer's field; return the tensor that its parameter aliases."""

    def close(self) -> None:
        """Give everything back."""


H = TypeVar("H", bound=LoadTarget)


class CaptureWeights(Generic[H]):
    """Puts the layers' weights of the one model that is loaded in this context into a backing.

    Attributes:
        backing: None until the first parameter of a layer arrives, and if none does.
    """

    def __init__(
        self,
        make_backing: Callable[[Sequence[Record], Sequence[Sequence[str]]], H],
        *,
        codec: str = "native",
        kept: Callable[[nn.Module], Collection[str]] | None = None,
        is_loaded: Callable[[nn.Parameter], bool] = lambda _: True,
        on_put: OnPut = lambda _done, _all: None,
    ) -> None:
        """Start without a backing.

        Args:
            make_backing: Makes the backing, given each layer's record and the names of its fields.
            codec: How the layers' matrices are encoded.
            kept: Returns the names of a model's parameters that the codec encodes; None for all
                matrices.
            is_loaded: Whether a parameter has its final values when it is registered. If not,
                because it will be initialised, it keeps its memory.
            on_put: Called after each stored parameter, with the progress of loading.
        """
        self.backing: H | None = None
        self._is_loaded = is_loaded
        self._make_backing = make_backing
        self._codec, self._kept = codec, kept
        self._on_put = on_put
        self._done_bytes = self._all_bytes = 0
        self._newest = -1
        self._parents: dict[nn.Module, nn.Module] = {}
        self._places: _Places | None = None

    def __enter__(self) -> "CaptureWeights[H]":
        self._hooks = (
            torch_module.register_module_module_registration_hook(self._note),
            torch_module.register_module_parameter_registration_hook(self._catch),
        )
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for hook in self._hooks:
            hook.remove()
        self._parents.clear()
        self._places = None
        trim_heap()
        if kind is not None and self.backing is not None:
            self.backing.close()

    def _note(self, parent: nn.Module, _name: str, child: nn.Module | None) -> None:
        if child is not None:
            self._parents[child] = parent

    def _catch(self, module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        if parameter is None or parameter.is_meta or not self._is_loaded(parameter):
            return
        if self._places is None:
            self._places = self._plan(module)
        place = self._places.get((module, name))
        if place is None:
            return
        layer, index, field = place
        if (field.shape, field.dtype) != (parameter.shape, parameter.dtype):
            return
        del self._places[module, name]
        assert self.backing is not None
        if layer != self._newest:
            self._newest = layer
            trim_heap()
        num_bytes = parameter.nbytes
        refer(parameter, self.backing.put(layer, index, bare(parameter)))
        self._done_bytes += num_bytes
        self._on_put(self._done_bytes, self._all_bytes)

    def _plan(self, module: nn.Module) -> _Places:
        """Lay out the layers of the model that a module belongs to, and make the backing."""
        while module in self._parents:
            module = self._parents[module]
        layered = LayeredModel(module)
        kept = self._kept and self._kept(module)
        encoding = Encoding(layered, self._codec, names=kept)
        tied = cast("Any", module).all_tied_weights_keys
        shared = {*tied, *tied.values()}
        names = {
            parameter: name for name, parameter in module.named_parameters() if name not in shared
        }
        places: _Places = {}
        records, fields = [], []
        for number, layer in enumerate(layered.layers):
            own = {
                parameter: (owner, attribute)
                for owner in layer.modules()
                for attribute, parameter in owner.named_parameters(recurse=False)
                if parameter in names
            }
            record = lay_out(list(own), encoding.codecs(list(own)))
            records.append(record)
            fields.append([names[parameter] for parameter in own])
            places |= {
                own[field.parameter]: (number, index, field)
                for index, field in enumerate(record.fields)
            }
        self._all_bytes = sum(field.parameter.nbytes for _, _, field in places.values())
        self.backing = self._make_backing(records, fields)
        return places
