"""A layer as one flat record: the offset and the form of each of its parameters.

A record has one layout in storage and on the link. If any of its parameters is encoded, it has a
second one for compute, in which all parameters are stored decoded, one after the other.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import nn

from offload.engine.codecs.codec import NATIVE, Codec
from offload.errors import OffloadError
from offload.plan.facts.codec import aligned
from offload.plan.facts.layer_layout import to_pages


@dataclass(frozen=True, kw_only=True, slots=True)
class Field:
    """One parameter's place in its layer's record.

    Attributes:
        parameter: The parameter whose values these are.
        offset: First byte in the record.
        num_bytes: Size in the record.
        shape: Of the values.
        dtype: Of the values.
        codec: How they are encoded in the record.
        decoded_offset: First byte in the decoded record.
    """

    parameter: nn.Parameter
    offset: int
    num_bytes: int
    shape: torch.Size
    dtype: torch.dtype
    codec: Codec
    decoded_offset: int

    def written(self, record: torch.Tensor) -> torch.Tensor:
        """Return the bytes in a flat uint8 record."""
        return record[self.offset : self.offset + self.num_bytes]

    def view(self, record: torch.Tensor) -> torch.Tensor:
        """Return the tensor inside a flat uint8 record; only if it is not encoded."""
        assert self.codec is NATIVE
        return self.written(record).view(self.dtype).view(self.shape)

    def decoded(self, memory: torch.Tensor) -> torch.Tensor:
        """Return the tensor inside the flat uint8 memory of a decoded record."""
        end = self.decoded_offset + self.shape.numel() * self.dtype.itemsize
        return memory[self.decoded_offset : end].view(self.dtype).view(self.shape)

    def decode(self, record: torch.Tensor, memory: torch.Tensor) -> None:
        """Decode the tensor from a record into the memory of a decoded one, on the same device."""
        self.codec.decode(self.written(record), self.decoded(memory))


@dataclass(frozen=True, kw_only=True, slots=True)
class Record:
    """The fields of one layer.

    Attributes:
        fields: One per parameter.
        num_bytes: Size of the record, whole pages.
        decoded_bytes: Size of the decoded record, whole pages; 0 if no field is encoded.
    """

    fields: tuple[Field, ...]
    num_bytes: int
    decoded_bytes: int = 0

    @property
    def weight_bytes(self) -> int:
        """Bytes of the fields themselves, without alignment."""
        return sum(field.num_bytes for field in self.fields)


def lay_out(parameters: Sequence[nn.Parameter], codecs: Sequence[Codec] | None = None) -> Record:
    """Place the parameters of one layer one after the other; they may be on the meta device.

    Args:
        parameters: In the order of the record.
        codecs: How each is encoded; None encodes none.
    """
    fields = []
    offset = decoded_offset = 0
    for parameter, codec in zip(parameters, codecs or [NATIVE] * len(parameters), strict=True):
        num_bytes = codec.num_bytes(parameter.shape, parameter.dtype)
        fields.append(
            Field(
                parameter=parameter,
                offset=offset,
                num_bytes=num_bytes,
                shape=parameter.shape,
                dtype=parameter.dtype,
                codec=codec,
                decoded_offset=decoded_offset,
            )
        )
        offset += aligned(num_bytes)
        decoded_offset += aligned(parameter.numel() * parameter.element_size())
    is_encoded = any(field.codec is not NATIVE for field in fields)
    return Record(
        fields=tuple(fields),
        num_bytes=to_pages(offset),
        decoded_bytes=to_pages(decoded_offset) if is_encoded else 0,
    )


def stand_in(field: Field) -> torch.Tensor:
    """Return a placeholder for encoded values: all NaN, in the memory of one element."""
    return torch.full((), float("nan"), dtype=field.dtype).expand(field.shape)


def is_stand_in(values: torch.Tensor) -> bool:
    """Return whether a parameter shows a placeholder instead of values."""
    return values.numel() > 1 and not any(values.stride())


def adopt(
    records: Sequence[Record],
    shown: Sequence[Sequence[torch.Tensor]],
    groups: Sequence[Sequence[nn.Parameter]],
) -> tuple[Record, ...]:
    """Return the records of the parameters that alias tensors a backing has returned.

    They are matched by address, so modules that were wrapped around them since do not matter. A
    parameter with other memory is in no record.

    Args:
        records: The layers' layouts.
        shown: By layer and field, the tensors that the backing returned.
        groups: Each layer's parameters.

    Raises:
        OffloadError: None of them aliases any of these tensors.
    """
    adopted = tuple(map(_adopt_layer, records, shown, groups))
    if not any(record.fields for record in adopted):
        raise OffloadError(
            "no parameter of the model is where its layers were loaded to",
            limit="an engine that is closed or detached gives parameters other memory",
            hint="attach without `backing`, or load the model again",
        )
    return adopted


def _adopt_layer(
    record: Record, shown: Sequence[torch.Tensor], parameters: Sequence[nn.Parameter]
) -> Record:
    fields = {
        tensor.data_ptr(): field
        for tensor, field in zip(shown, record.fields, strict=True)
        if tensor.numel()
    }
    adopted = []
    for parameter in parameters:
        field = fields.get(parameter.data_ptr()) if parameter.numel() else None
        if field is None or (field.shape, field.dtype) != (parameter.shape, parameter.dtype):
            continue
        if parameter.is_contiguous() or is_stand_in(parameter.data):
            adopted.append(replace(field, parameter=parameter))
    return replace(record, fields=tuple(adopted))


def digest(records: Sequence[Record]) -> str:
    """Return a digest of the layout; equal layouts have equal digests."""
    places = [
        [(f.offset, tuple(f.shape), str(f.dtype), f.codec.name) for f in record.fields]
        for record in records
    ]
    return hashlib.sha256(repr(places).encode()).hexdigest()
