"""A table of inputs of each layer by token, in host memory next to the input embedding.

Gemma 3n and 4 look each token up twice: in the input embedding, and in a table whose row has
an input for each layer, which is the larger one. Both are read before the layers alone, by the same
tokens, so the rows of both are brought in one op, each table's in buffers of its own.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from offload.engine.host.embedding import HostEmbedding, without_adapter
from offload.engine.host.slab import Stash
from offload.engine.memory_meter import Arena
from offload.engine.streams import Device
from offload.plan.schedule.op import Op

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_NAME = "embed_tokens_per_layer"


def layer_table(model: nn.Module) -> Any:
    """Return the embedding of a model that has an input for each layer; None if it has none."""
    named = model.named_modules()
    return next((module for name, module in named if name.rpartition(".")[2] == _NAME), None)


def host_embedding(
    model: "PreTrainedModel", rows: Sequence[Stash], *, is_head_on_host: bool
) -> HostEmbedding:
    """Keep what a model looks its tokens up in in host memory.

    Args:
        model: The model.
        rows: Room for rows of the input embedding, and of a table of the layers' inputs.
        is_head_on_host: Whether the output head's weight has been moved to host memory.

    Raises:
        UnsupportedModelError: As for `HostEmbedding`.
    """
    head = without_adapter(model.get_output_embeddings())
    embedding, table = model.get_input_embeddings(), layer_table(model)
    found = HostEmbedding(
        model, embedding, rows=rows[0], head=head, is_head_on_host=is_head_on_host
    )
    if table is None:
        return found
    of_layers = HostEmbedding(model, table, rows=rows[1], head=None, is_head_on_host=False)
    return _Tables([found, of_layers])


class _Tables(HostEmbedding):
    """Embeddings that are looked up by the same tokens."""

    def __init__(self, tables: Sequence[HostEmbedding]) -> None:
        """Keep those that have taken over their lookups."""
        self._tables = tables
        self.weights = [weight for table in tables for weight in table.weights]

    @property
    def arenas(self) -> tuple[Arena, ...]:
        """The weights, and the page-locked buffers of rows."""
        blocks: dict[str, list[torch.Tensor]] = {}
        for arena in (arena for table in self._tables for arena in table.arenas):
            blocks.setdefault(arena.name, []).extend(arena.blocks)
        return tuple(Arena(name=name, blocks=some) for name, some in blocks.items())

    def let_go(self) -> None:
        """Give the lookups back."""
        for table in self._tables:
            table.let_go()

    def prepare(self, tokens: Mapping[int, torch.Tensor]) -> tuple[int, ...]:
        """Make room for the rows of a step, and return their bytes, by pass.

        A token that a table has no row for is looked up as token 0, as in Gemma 3n.
        """
        sizes = [
            one.prepare({number: x.where(x < len(one.weight), 0) for number, x in tokens.items()})
            for one in self._tables
        ]
        return tuple(map(sum, zip(*sizes, strict=True)))

    def look_up(self, op: Op) -> None:
        """Gather the rows of a pass into page-locked buffers, on the running thread."""
        for table in self._tables:
            table.look_up(op)

    def bring(self, op: Op, device: Device) -> None:
        """Copy them to the device, on the running lane."""
        for table in self._tables:
            table.bring(op, device)

    @contextmanager
    def present(self, op: Op) -> Iterator[None]:
        """Look up tokens in the rows that a front's pass has brought, in a block."""
        with ExitStack() as stack:
            for table in self._tables:
                stack.enter_context(table.present(op))
            yield

    @contextmanager
    def unread(self) -> Iterator[None]:
        """Return zeros from lookups in a block, in which nothing reads them."""
        with ExitStack() as stack:
            for table in self._tables:
                stack.enter_context(table.unread())
            yield
