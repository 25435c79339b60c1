"""The input embedding and the output head in host memory, and what of them is on the device.

Problem. The embedding of a large vocabulary takes a gigabyte or more of device memory, and of it a
step reads the rows of its tokens.

Idea. Its weight stays in host memory. The rows of a micro-batch's tokens, each once and in the
order of the tokens, are gathered into a page-locked buffer and copied to the device, and its front
looks tokens up in these. Only `functional.embedding` of the weight is answered otherwise: all that
the embedding's own code does before and after it runs as it is, such as Gemma's scale, so the bits
are those of a lookup on the device.

Layout of a buffer: the tokens, int64, ascending; a row of NaN; the rows of the tokens. A token is
found by a binary search on the device. One that is not there, which a front could look up that
changes its tokens, gets the row of NaN: the loss shows it, and nothing waits for the device.

Passes that wait for their result anyway, such as those of generation, bring no rows ahead of time:
each lookup gathers its own. Norm and head are run on dummy tokens, whose embeddings nobody reads.

A frozen weight that is the output head's too is kept once, in the page-locked memory that the head
is copied from. While the head computes, the parameter refers to the device. So lookups read the
values on the host, and never what the parameter refers to.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from offload.engine.host.slab import HostBlocks, Stash
from offload.engine.internals import bare, refer
from offload.engine.memory_meter import Arena
from offload.engine.streams import Device
from offload.engine.visit_cache import patched
from offload.errors import OffloadError, UnsupportedModelError
from offload.plan.facts.codec import aligned
from offload.plan.facts.workload import TOKEN_BYTES, WeightPlace, rows_bytes, to_pages
from offload.plan.memory.memory import EMBEDDINGS, HEAD
from offload.plan.schedule.op import Kind, Op
from offload.plan.schedule.schedule import NUM_ROW_BUFFERS

if TYPE_CHECKING:
    from transformers import PreTrainedModel

PLACES = ("embeddings", "head")
"""The settings that say where the weights of the input embedding and the output head are."""


class HostEmbedding:
    """A model's input embedding whose weight stays in host memory.

    Attributes:
        weight: The parameter.
        weights: All parameters that are looked up in host memory.
    """

    def __init__(
        self,
        model: nn.Module,
        embedding: nn.Module,
        *,
        rows: Stash,
        head: nn.Module | None,
        is_head_on_host: bool,
    ) -> None:
        """Keep the weight in host memory, and take over the lookups in it.

        Args:
            model: The model, which may use the weight nowhere else than in a head on the host.
            embedding: Its input embedding.
            rows: Room for rows, on the host and on the device.
            head: Its output head, without an adapter; None if it has none.
            is_head_on_host: Whether that one's weight has been moved to host memory.

        Raises:
            UnsupportedModelError: The weight trains, something else uses it, or it is
                no plain embedding.
        """
        hint = _on_device(embedding, head, PLACES, is_other_on_host=is_head_on_host)
        _require_plain(model, embedding, hint=hint)
        assert isinstance(embedding, nn.Embedding)
        self.weight = cast("nn.Parameter", embedding.weight)
        self.weights = [self.weight]
        _require_alone(
            model, self.weight, embedding, head, "head", is_other_on_host=is_head_on_host, hint=hint
        )
        self._module, self._rows = embedding, rows
        self._tokens: Mapping[int, torch.Tensor] = {}
        self._present: tuple[torch.Tensor, torch.Tensor] | None = None
        self._is_read = True
        is_tied = head is not None and any(p is self.weight for p in head.parameters(recurse=False))
        self._held_by_head: torch.Tensor | None = bare(self.weight) if is_tied else None
        if not is_tied:
            refer(self.weight, _alone_on_host(bare(self.weight)))
        vars(embedding)["forward"] = self._forward

    @property
    def arenas(self) -> tuple[Arena, ...]:
        """The weight, unless the head holds it; the page-locked buffers of rows."""
        if self._held_by_head is not None:
            return (self._rows.arena,)
        return (Arena(name=EMBEDDINGS, blocks=[bare(self.weight)]), self._rows.arena)

    @property
    def values(self) -> torch.Tensor:
        """The weight's values on the host (V, D), wherever a head lets the parameter refer to."""
        return bare(self.weight) if self._held_by_head is None else self._held_by_head

    def let_go(self) -> None:
        """Give the lookups back; the weight stays where it is."""
        vars(self._module).pop("forward", None)

    def prepare(self, tokens: Mapping[int, torch.Tensor]) -> tuple[int, ...]:
        """Make room for the rows of a step, and return their bytes, by pass.

        Args:
            tokens: Of each pass (B, T), numbered from 0; best on the host. Those that stand for
                something else than tokens have no rows.
        """
        own = {number: ids[ids < len(self.weight)] for number, ids in tokens.items()}
        self._tokens = {number: ids.cpu().long().unique() for number, ids in own.items()}
        sizes = [self._num_bytes(len(self._tokens[number])) for number in range(len(tokens))]
        most = -(-max(sizes, default=0) // TOKEN_BYTES) * TOKEN_BYTES  # tokens begin each buffer
        buffers = {(0, buffer): most for buffer in range(NUM_ROW_BUFFERS)}
        self._rows.prepare(buffers, num_buffers=NUM_ROW_BUFFERS)
        return tuple(sizes)

    def look_up(self, op: Op) -> None:
        """Gather the rows of a pass into a page-locked buffer, on the running thread."""
        tokens_N = self._tokens[op.micro_batch_index]
        ids_N, rows_ND = self._views(self._rows.place(0, op.buffer_index), len(tokens_N))
        with torch.no_grad():
            ids_N.copy_(tokens_N)
            rows_ND[0] = torch.nan
            torch.index_select(self.values, 0, tokens_N, out=rows_ND[1:])

    def bring(self, op: Op, device: Device) -> None:
        """Copy them to the device, on the running lane."""
        num_bytes = self._num_bytes(len(self._tokens[op.micro_batch_index]))
        target = self._rows.buffer(op.buffer_index, num_bytes)
        device.copy(target, self._rows.place(0, op.buffer_index)[:num_bytes])

    @contextmanager
    def present(self, op: Op) -> Iterator[None]:
        """Look up tokens in the rows that a front's pass has brought, in a block."""
        tokens_N = self._tokens[op.micro_batch_index]
        memory = self._rows.buffer(op.buffer_index, self._num_bytes(len(tokens_N)))
        self._present = self._views(memory, len(tokens_N))
        try:
            yield
        finally:
            self._present = None

    @contextmanager
    def unread(self) -> Iterator[None]:
        """Return zeros from lookups in a block, in which nothing reads them."""
        before, self._is_read = self._is_read, False
        try:
            yield
        finally:
            self._is_read = before

    def found(self, ids: torch.Tensor) -> torch.Tensor:
        """Return the rows of some tokens (..., D), where the tokens are.

        Args:
            ids: The tokens (...).
        """
        if not self._is_read:
            return torch.zeros(
                *ids.shape, self.weight.shape[1], dtype=self.weight.dtype, device=ids.device
            )
        if self._present is None:
            return functional.embedding(ids.cpu(), self.values).to(ids.device)
        (ids_N, rows_ND), ids = self._present, ids.long()
        places = torch.searchsorted(ids_N, ids).clamp_(max=len(ids_N) - 1)
        return functional.embedding((places + 1).where(ids_N[places] == ids, 0), rows_ND)

    def _num_bytes(self, num: int) -> int:
        return rows_bytes(num, self.weight.shape[1] * self.weight.dtype.itemsize)

    def _views(self, memory: torch.Tensor, num: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the tokens (N,) and the rows (1 + N, D) in a buffer, uint8."""
        start, end = aligned(TOKEN_BYTES * num), self._num_bytes(num)
        rows = memory[start:end].view(self.weight.dtype).view(1 + num, -1)
        return memory[: TOKEN_BYTES * num].view(torch.int64), rows

    def _forward(self, *args: Any, **kwargs: Any) -> Any:
        with _Lookups(self):
            return type(self._module).forward(self._module, *args, **kwargs)


class _Lookups(TorchFunctionMode):
    """Answers lookups in the weight of an embedding, while its own code runs."""

    def __init__(self, embedding: HostEmbedding) -> None:
        super().__init__()
        self._embedding = embedding

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if func is functional.embedding and args[1] is self._embedding.weight:
            return self._embedding.found(args[0])
        return func(*args, **(kwargs or {}))


def _alone_on_host(weight: torch.Tensor) -> torch.Tensor:
    """Return a weight in host memory that nothing else is in, which would stay there with it."""
    is_alone = weight.untyped_storage().nbytes() <= to_pages(weight.nbytes)
    return weight if weight.device.type == "cpu" and is_alone else weight.to("cpu", copy=True)


def _require_plain(model: nn.Module, embedding: nn.Module, *, hint: str) -> None:
    """Check that an embedding can be looked up in rows of it.

    Raises:
        UnsupportedModelError: It cannot.
    """
    name = next((name for name, module in model.named_modules() if module is embedding), "it")
    if not isinstance(embedding, nn.Embedding) or "forward" in vars(embedding):
        of = "has another forward than" if isinstance(embedding, nn.Embedding) else "is"
        raise _refused(
            f"`{name}` {of} {type(embedding).__name__}", "a plain embedding is looked up", hint
        )
    if embedding.max_norm is not None:
        raise _refused(f"`{name}` has a max_norm", "a lookup would write to its weight", hint)
    if any(parameter.requires_grad for parameter in embedding.parameters()):
        raise _refused(f"`{name}` trains", "an embedding in host memory is frozen", hint)


def _require_alone(
    model: nn.Module,
    weight: nn.Parameter,
    own: nn.Module,
    other: nn.Module | None,
    other_setting: str,
    *,
    is_other_on_host: bool,
    hint: str,
) -> None:
    """Check that a weight on the host is one module's, or of embedding and head there.

    Args:
        model: All modules that may have the weight.
        weight: The weight.
        own: The module whose weight is to be on the host.
        other: The head of an embedding, or the embedding of a head; None if there is none.
        other_setting: The setting that says where the other has its weight.
        is_other_on_host: Whether the other's is on the host.
        hint: The settings that leave the weight on the device.

    Raises:
        UnsupportedModelError: Something else has it, or only one is on the host.
    """
    users = {
        module: path
        for path, module in model.named_modules()
        if any(p is weight for p in module.parameters(recurse=False))
    }
    name = users.pop(own, "it")
    if not users:
        return
    limit = "it is on the device for it"
    user = next((module for module in users if module is not other), other)
    if user is other and is_other_on_host:
        return
    if user is other:
        limit = "a weight of both is in one place"
        hint = f'`{other_setting}="host"` too, or {hint}'
    assert user is not None
    raise UnsupportedModelError(
        f"`{users[user]}` has the same weight as `{name}`", limit=limit, hint=hint
    )


def _on_device(
    own: nn.Module, other: nn.Module | None, settings: tuple[str, str], *, is_other_on_host: bool
) -> str:
    """Return the settings that leave a module's weight on the device, for a hint.

    A weight that the other has too is there for both.
    """
    hint, others = (f'`{setting}="device"`' for setting in settings)
    known = set() if other is None else {id(parameter) for parameter in other.parameters()}
    is_shared = any(id(parameter) in known for parameter in own.parameters())
    return f"{hint} with {others}" if is_shared and is_other_on_host else hint


# ---------------------------------------------------------------------------------------------
# The output head in host memory, and the slots that it computes in.
#
# Its weight stays in page-locked host memory. A step copies it once over the slots of layers that
# are needed again last (`offload.plan.schedule.head`), and the ops after the last layer compute
# from there. Between these ops the parameter has its values on the host, so it may be read at any
# time, and it is never one of a layer's. A weight that is the input embedding's too is here as
# well, once for both: see `offload.engine.host.embedding`.
#
# A backward reads what the parameter refers to when it runs, so an op that computes gradients ends
# them before the parameter refers to host memory again.

READERS = (Kind.SCORE, Kind.TAIL)
"""Ops that compute with the head."""


class HostHead:
    """A model's output head whose weight stays in host memory.

    Attributes:
        num_bytes: Size of the weight.
        weight: The parameter.
    """

    def __init__(
        self,
        model: "PreTrainedModel",
        head: nn.Module | None,
        *,
        blocks: HostBlocks,
        embeddings: WeightPlace,
    ) -> None:
        """Let the weight be in memory that a device can copy from.

        Args:
            model: The model, which may use the weight nowhere else than in an input embedding on
                the host.
            head: Its output head, with or without an adapter; None if it has none.
            blocks: Such memory.
            embeddings: Where its input embedding's weight is to be.

        Raises:
            UnsupportedModelError: The weight trains, something else uses it, or it is
                no plain linear layer's.
            TransferError: The system refuses to page-lock the memory.
        """
        self.weight = own_weight(model, head, embeddings=embeddings)
        self._name = next(name for name, p in model.named_parameters() if p is self.weight)
        self._module = head
        values = bare(self.weight)
        self.num_bytes = values.nbytes
        self._on_host = blocks.hold(values)
        self._on_device: torch.Tensor | None = None
        refer(self.weight, self._on_host.view(values.dtype).view(values.shape))

    @property
    def arena(self) -> Arena:
        """The weight on the host; on the device it is in the slots."""
        return Arena(name=HEAD, blocks=[self._on_host])

    def compute_in(self, memory: torch.Tensor) -> None:
        """Compute from now on in this memory, which layers use too."""
        self._on_device = memory

    def bring(self, op: Op, device: Device) -> None:
        """Copy a piece to the device, on the running lane."""
        assert self._on_device is not None
        piece = slice(op.offset, op.offset + op.num_bytes)
        device.copy(self._on_device[piece], self._on_host[piece])

    @contextmanager
    def present(self) -> Iterator[None]:
        """Let the parameter refer to the device in a block; the weight must be there.

        Raises:
            OffloadError: The parameter refers to other memory than what is copied to the device.
        """
        assert self._on_device is not None
        on_host = bare(self.weight)
        if on_host.data_ptr() != self._on_host.data_ptr():
            raise OffloadError(
                f"`{self._name}` was given other memory since the model was attached",
                limit="a head in host memory is copied from where `offload.attach` has put it",
                hint="write to it, `weight.copy_(...)`; or `engine.detach()`, and attach again",
            )
        refer(self.weight, self._on_device.view(on_host.dtype).view(on_host.shape))
        try:
            yield
        finally:
            refer(self.weight, on_host)

    def unread(self) -> AbstractContextManager[None]:
        """Return zeros from the head in a block, in which nothing reads them."""
        return patched((vars(self._module), {"forward": self._zeros}))

    def _zeros(self, hidden_BTD: torch.Tensor) -> torch.Tensor:
        return hidden_BTD.new_zeros(*hidden_BTD.shape[:-1], len(self.weight))

    def computing(self, body: Callable[[], None]) -> None:
        """Run an op with the weight on the device."""
        with self.present():
            body()


def without_adapter(head: nn.Module | None) -> nn.Module | None:
    """Return the head that an adapter is put on, or the head itself."""
    unwrap: Any = getattr(head, "get_base_layer", None)
    return head if unwrap is None else unwrap()


def own_weight(
    model: "PreTrainedModel", head: nn.Module | None, *, embeddings: WeightPlace
) -> nn.Parameter:
    """Return the weight of a head that nothing else has but an embedding on the host.

    Raises:
        UnsupportedModelError: It has none.
    """
    own = without_adapter(head)
    if own is None:
        raise _refused(f"{type(model).__name__} has no output head", "a head's weight is moved")
    name = next((name for name, module in model.named_modules() if module is own), "it")
    embedding, settings = model.get_input_embeddings(), PLACES[::-1]
    is_held = embeddings == "host"
    hint = _on_device(own, embedding, settings, is_other_on_host=is_held)
    if not isinstance(own, nn.Linear):
        raise _refused(f"`{name}` is {type(own).__name__}", "the head is a linear layer", hint)
    weight = own.weight
    assert isinstance(weight, nn.Parameter)
    _require_alone(
        model,
        weight,
        own,
        embedding,
        "embeddings",
        is_other_on_host=is_held,
        hint=hint,
    )
    if weight.requires_grad:
        raise _refused(f"`{name}` trains", "a head in host memory is frozen", hint)
    if not weight.is_contiguous():
        raise _refused(f"`{name}` has a weight that is not contiguous", "its bytes are copied")
    return weight


def _refused(what: str, limit: str, hint: str = '`head="device"`') -> UnsupportedModelError:
    return UnsupportedModelError(what, limit=limit, hint=hint)
