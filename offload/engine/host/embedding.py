"""The input embedding in host memory, and the rows of it that are on the device.

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

A weight that trains has its gradient on the host too. A front looks tokens up in a leaf over its
rows. Autograd adds up the gradients of a token's places in these rows as it would in the whole
weight: in the same order and the same type, since the order of rows is that of tokens. They leave
from the buffer that the rows came to, and are added to `RowSums`.

Several processes may share the weight's memory. Then each adds up its own gradients for the rows of
its step alone, and those that update the weight add up the sums of all.
"""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol, cast

import torch
from torch import nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from offload.engine.host.stash import Stash
from offload.engine.memory_meter import Arena
from offload.engine.streams import Device
from offload.errors import OffloadError, UnsupportedModelError
from offload.plan.facts.codec import aligned
from offload.plan.facts.embedding import TOKEN_BYTES, rows_bytes
from offload.plan.facts.layer_layout import to_pages
from offload.plan.memory.memory import EMBEDDING_GRADIENTS, EMBEDDINGS
from offload.plan.schedule.lookups import NUM_ROW_BUFFERS
from offload.plan.schedule.op import Op

PLACES = ("embeddings", "head")
"""The settings that say where the weights of the input embedding and the output head are."""
_ROWS = 2**12  # of which another type takes memory for a moment


class OtherRows(Protocol):
    """The processes that train an embedding together, each with gradients by rows of its own."""

    def num_bytes(self, num_rows: int) -> int:
        """Return the bytes that an owner receives if each process has so many rows; above 0."""

    def gather(
        self,
        tokens_N: torch.Tensor,
        rows_ND: torch.Tensor,
        add: Callable[[torch.Tensor, torch.Tensor], None],
    ) -> None:
        """Send this process's rows to those that update the embedding; waits for the others.

        Args:
            tokens_N: Whose rows; ascending, each once.
            rows_ND: The gradients by them, on the host, in fp32.
            add: Called on a process that updates it, with tokens and rows of all processes: with
                those of each token in the order of the processes.
        """


class RowSums:
    """A gradient as large as the weight of an embedding on the host, zero where no token was.

    Of a micro-batch only the rows of its tokens have a gradient. These come from the device and are
    added, row by row and one micro-batch after the other. The other rows are zero as in plain
    PyTorch: an optimizer that keeps means of gradients lets them decay there.

    Of several processes each adds them to its own `_StepRows`, and those that update the weight
    have the sum of all.

    Attributes:
        total: (V, D), on the host; (0, D) where another process of this machine has it.
    """

    def __init__(self, weight: torch.Tensor) -> None:
        """Begin with zeros, in the weight's type; no memory is touched yet.

        Args:
            weight: (V, D), on the host.
        """
        self.total = torch.zeros_like(weight, requires_grad=False)
        self._tokens: list[torch.Tensor] = []
        self._version_shown: int | None = None
        self._others: OtherRows | None = None
        self._of_step = _StepRows(self.total.shape[1])

    def keep_in_fp32(self) -> None:
        """Add up in fp32 from here on: 16 bits would round small gradients away in a large sum."""
        assert not self._tokens
        self.total = torch.zeros(self.total.shape)

    def share_with(self, others: OtherRows, *, is_own: bool) -> None:
        """Add up with other processes from here on, in fp32.

        Args:
            others: All of them.
            is_own: Whether this one updates the weight.
        """
        self.keep_in_fp32()
        self._others = others
        if not is_own:
            self.total = self.total.new_zeros(0, self.total.shape[1])

    @property
    def is_shared(self) -> bool:
        """Whether several processes add up."""
        return self._others is not None

    @property
    def blocks(self) -> list[torch.Tensor]:
        """Its memory."""
        return [self.total, *self._of_step.blocks]

    def begin(self, tokens: Sequence[torch.Tensor]) -> None:
        """Make room for a step's own sums if there are other processes.

        Args:
            tokens: Of its micro-batches that are trained on, whose gradients will be added.
        """
        if self._others is not None:
            self._of_step.begin(tokens)

    @property
    def reduced_bytes(self) -> int:
        """What of a step's sums other processes add; 0 if there is none."""
        return 0 if self._others is None else self._others.num_bytes(len(self._of_step.tokens_N))

    def add(self, tokens_N: torch.Tensor, rows_ND: torch.Tensor) -> None:
        """Add the gradients by some rows: of a micro-batch of this process.

        Args:
            tokens_N: Whose rows; each once.
            rows_ND: The gradients, on the host.
        """
        (self._add if self._others is None else self._of_step.add)(tokens_N, rows_ND)

    def reduce(self) -> None:
        """Add up the sums of all processes, where this one updates the weight; waits for them."""
        assert self._others is not None
        self._others.gather(self._of_step.tokens_N, self._of_step.rows_ND, self._add)

    def _add(self, tokens_N: torch.Tensor, rows_ND: torch.Tensor) -> None:
        self._tokens.append(tokens_N)
        _add_rows(self.total, tokens_N, rows_ND)

    def shown(self) -> torch.Tensor:
        """Return the sum as a weight's gradient, which its user may change."""
        self._version_shown = self.total._version
        return self.total

    def clear(self) -> None:
        """Set all rows to zero that were added to; all, if somebody else wrote to the sum."""
        if self._version_shown not in (None, self.total._version):
            self.total.zero_()
        for tokens_N in self._tokens:
            self.total.index_fill_(0, tokens_N, 0.0)
        self._tokens.clear()
        self._version_shown = None


class _StepRows:
    """Sums of one process's gradients by the rows of a step, in fp32.

    Attributes:
        tokens_N: Whose rows; ascending, each once.
        rows_ND: The sums.
    """

    def __init__(self, width: int) -> None:
        self.tokens_N = torch.empty(0, dtype=torch.int64)
        self.rows_ND = self._memory_ND = torch.empty(0, width)

    @property
    def blocks(self) -> list[torch.Tensor]:
        return [self._memory_ND, self.tokens_N] if len(self._memory_ND) else []

    def begin(self, tokens: Sequence[torch.Tensor]) -> None:
        """Set the rows of these tokens to zero; memory grows to the largest step."""
        self.tokens_N = torch.cat([self.tokens_N[:0], *tokens]).unique()
        num, width = len(self.tokens_N), self._memory_ND.shape[1]
        if num > len(self._memory_ND):
            self.rows_ND = self._memory_ND = torch.empty(0, width)  # frees the old one first
            self._memory_ND = torch.empty(num, width)
        self.rows_ND = self._memory_ND[:num].zero_()

    def add(self, tokens_N: torch.Tensor, rows_ND: torch.Tensor) -> None:
        _add_rows(self.rows_ND, torch.searchsorted(self.tokens_N, tokens_N), rows_ND)


@torch.no_grad()
def _add_rows(sums_ND: torch.Tensor, places_N: torch.Tensor, rows_ND: torch.Tensor) -> None:
    """Add rows to others at these places, some at a time, as another type takes memory."""
    for some_N, some_ND in zip(places_N.split(_ROWS), rows_ND.split(_ROWS), strict=True):
        sums_ND.index_add_(0, some_N, some_ND.to(sums_ND.dtype))


class HostEmbedding:
    """A model's input embedding whose weight stays in host memory.

    Attributes:
        weight: The parameter.
        name: Its name in the model.
        sums: Of gradients by it; None if it is frozen.
    """

    def __init__(
        self,
        model: nn.Module,
        embedding: nn.Module,
        *,
        rows: Stash,
        may_train: bool,
        head: nn.Module | None,
        is_head_on_host: bool,
    ) -> None:
        """Keep the weight in host memory, and take over the lookups in it.

        Args:
            model: The model, which may use the weight nowhere else than in a head on the host.
            embedding: Its input embedding.
            rows: Room for rows, on the host and on the device.
            may_train: Whether weights that train are on the host.
            head: Its output head, without an adapter; None if it has none.
            is_head_on_host: Whether that one's weight has been moved to host memory.

        Raises:
            UnsupportedModelError: The weight trains and may not, something else uses it, or it is
                no plain embedding.
        """
        hint = on_device(embedding, head, PLACES, is_other_on_host=is_head_on_host)
        _require_plain(model, embedding, may_train=may_train, hint=hint)
        assert isinstance(embedding, nn.Embedding)
        self.weight = cast("nn.Parameter", embedding.weight)
        require_alone(
            model,
            self.weight,
            embedding,
            head,
            PLACES,
            is_other_on_host=is_head_on_host,
        )
        self._module, self._rows = embedding, rows
        self._tokens: Mapping[int, torch.Tensor] = {}
        self._present: _Rows | None = None
        self._leaves: dict[int, torch.Tensor] = {}
        self._is_read = True
        self.name = next(n for n, p in model.named_parameters() if p is self.weight)
        is_tied = head is not None and any(p is self.weight for p in head._parameters.values())
        self._held_by_head: torch.Tensor | None = self.weight.data if is_tied else None
        if not is_tied:
            self.weight.data = _alone_on_host(self.weight.data)
        self.sums = RowSums(self.weight.data) if self.weight.requires_grad else None
        vars(embedding)["forward"] = self._forward

    @property
    def arenas(self) -> tuple[Arena, ...]:
        """The weight, unless the head holds it; the page-locked buffers of rows; its gradients."""
        if self._held_by_head is not None:
            return (self._rows.arena,)
        held = Arena(name=EMBEDDINGS, blocks=[self.weight.data]), self._rows.arena
        if self.sums is None:
            return held
        return (*held, Arena(name=EMBEDDING_GRADIENTS, blocks=self.sums.blocks))

    @property
    def values(self) -> torch.Tensor:
        """The weight's values on the host (V, D), wherever a head lets the parameter refer to."""
        return self.weight.data if self._held_by_head is None else self._held_by_head

    def let_go(self) -> None:
        """Give the lookups back; the weight stays where it is."""
        vars(self._module).pop("forward", None)

    def begin_step(self) -> None:
        """Forget the gradients of the step before.

        Raises:
            OffloadError: The weight still has them.
        """
        if self.sums is not None:
            if self.weight.grad is not None:
                raise left_over(self.name)
            self.sums.clear()

    def publish(self) -> None:
        """Give the weight its gradient, unless that is of another type, or another process's."""
        if self.sums is None or self.sums.total.dtype is not self.weight.dtype:
            return
        if self.sums.total.shape == self.weight.shape:
            self.weight.grad = self.sums.shown()

    def prepare(
        self, tokens: Mapping[int, torch.Tensor], *, trained: Collection[int]
    ) -> tuple[int, ...]:
        """Make room for the rows of a step, and return their bytes, by pass.

        Args:
            tokens: Of each pass (B, T), numbered from 0; best on the host.
            trained: The passes that are trained on.
        """
        self._leaves.clear()  # of a step that has failed
        self._tokens = {number: ids.cpu().long().unique() for number, ids in tokens.items()}
        if self.sums is not None:
            self.sums.begin([self._tokens[number] for number in trained])
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
        target = self._rows.buffer(op.buffer_index, op.num_bytes)
        device.copy(target, self._rows.place(0, op.buffer_index)[: op.num_bytes])

    @contextmanager
    def present(self, op: Op) -> Iterator[None]:
        """Look up tokens in the rows that a front's pass has brought, in a block."""
        number = op.micro_batch_index
        tokens_N = self._tokens[number]
        memory = self._rows.buffer(op.buffer_index, self._num_bytes(len(tokens_N)))
        ids_N, rows_ND = self._views(memory, len(tokens_N))
        if self.sums is not None and torch.is_grad_enabled():
            self._leaves[number] = rows_ND = rows_ND.detach().requires_grad_()
        self._present = _Rows(tokens_N=tokens_N, ids_N=ids_N, rows_ND=rows_ND)
        try:
            yield
        finally:
            self._present = None

    def take_gradients(self, op: Op) -> None:
        """Put a micro-batch's gradients by its rows into the buffer of these, after its backward.

        Raises:
            UnsupportedModelError: The weight got a gradient in another way than by lookups.
        """
        if self.weight.grad is not None:
            raise _refused(
                f"`{self.name}` is read by something else than lookups in it",
                "only gradients by rows of a micro-batch's tokens come to the host",
            )
        number = op.micro_batch_index
        num, leaf = len(self._tokens[number]), self._leaves.pop(number)
        with torch.no_grad():
            _, rows_ND = self._views(self._rows.buffer(op.buffer_index, self._num_bytes(num)), num)
            rows_ND.zero_() if leaf.grad is None else rows_ND.copy_(leaf.grad)

    def send_back(self, op: Op, device: Device) -> None:
        """Copy them to host memory, on the running lane."""
        num = len(self._tokens[op.micro_batch_index])
        at = slice(self._num_bytes(num) - op.num_bytes, self._num_bytes(num))
        source = self._rows.buffer(op.buffer_index, self._num_bytes(num))
        device.copy(self._rows.place(0, op.buffer_index)[at], source[at])

    def add(self, op: Op) -> None:
        """Add them to the sums, on the running thread."""
        assert self.sums is not None
        tokens_N = self._tokens[op.micro_batch_index]
        _, rows_ND = self._views(self._rows.place(0, op.buffer_index), len(tokens_N))
        self.sums.add(tokens_N, rows_ND[1:])

    def reduce(self, _op: Op) -> None:
        """Add up the sums of all processes, on the running lane; waits for the others."""
        assert self.sums is not None
        self.sums.reduce()

    def gradient_bytes(self, row_bytes: Sequence[int]) -> tuple[int, ...]:
        """Return the bytes of gradients that each pass sends back if it trains; none if frozen.

        Args:
            row_bytes: As `prepare` returned them.
        """
        if self.sums is None:
            return ()
        return tuple(
            len(self._tokens[number]) * self._row_bytes for number in range(len(row_bytes))
        )

    @contextmanager
    def unread(self) -> Iterator[None]:
        """Return zeros from lookups in a block, in which nothing reads them."""
        before, self._is_read = self._is_read, False
        try:
            yield
        finally:
            self._is_read = before

    def found(
        self, ids: torch.Tensor, *, padding: int | None = None, is_scaled: bool = False
    ) -> torch.Tensor:
        """Return the rows of some tokens (..., D), where the tokens are.

        Args:
            ids: The tokens (...).
            padding: A token whose row gets no gradient by this lookup.
            is_scaled: Whether gradients are divided by how often a token is there.
        """
        if not self._is_read:
            return torch.zeros(
                *ids.shape, self.weight.shape[1], dtype=self.weight.dtype, device=ids.device
            )
        if self._present is None:
            return functional.embedding(ids.cpu(), self.values).to(ids.device)
        ids_N, ids = self._present.ids_N, ids.long()
        places = torch.searchsorted(ids_N, ids).clamp_(max=len(ids_N) - 1)
        return functional.embedding(
            (places + 1).where(ids_N[places] == ids, 0),
            self._present.rows_ND,
            None if padding is None else self._present.place_of(padding % len(self.weight)),
            scale_grad_by_freq=is_scaled,
        )

    @property
    def _row_bytes(self) -> int:
        return self.weight.shape[1] * self.weight.dtype.itemsize

    def _num_bytes(self, num: int) -> int:
        return rows_bytes(num, self._row_bytes)

    def _views(self, memory: torch.Tensor, num: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the tokens (N,) and the rows (1 + N, D) in a buffer, uint8."""
        start, end = aligned(TOKEN_BYTES * num), self._num_bytes(num)
        rows = memory[start:end].view(self.weight.dtype).view(1 + num, -1)
        return memory[: TOKEN_BYTES * num].view(torch.int64), rows

    def _forward(self, *args: Any, **kwargs: Any) -> Any:
        with _Lookups(self):
            return type(self._module).forward(self._module, *args, **kwargs)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class _Rows:
    """The rows that a front looks tokens up in.

    Attributes:
        tokens_N: Their tokens, ascending, on the host.
        ids_N: The same on the device.
        rows_ND: A row of NaN, and those of the tokens, on the device: (1 + N, D).
    """

    tokens_N: torch.Tensor
    ids_N: torch.Tensor
    rows_ND: torch.Tensor

    def place_of(self, token: int) -> int | None:
        """Return the row of a token; None if there is none."""
        place = int(torch.searchsorted(self.tokens_N, token))
        is_there = place < len(self.tokens_N) and int(self.tokens_N[place]) == token
        return place + 1 if is_there else None


class _Lookups(TorchFunctionMode):
    """Answers lookups in the weight of an embedding, while its own code runs."""

    def __init__(self, embedding: HostEmbedding) -> None:
        super().__init__()
        self._embedding = embedding

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is functional.embedding and args[1] is self._embedding.weight:
            return self._embedding.found(
                args[0], padding=kwargs["padding_idx"], is_scaled=kwargs["scale_grad_by_freq"]
            )
        return func(*args, **kwargs)


def _alone_on_host(weight: torch.Tensor) -> torch.Tensor:
    """Return a weight in host memory that nothing else is in, which would stay there with it."""
    is_alone = weight.untyped_storage().nbytes() <= to_pages(weight.nbytes)
    return weight if weight.device.type == "cpu" and is_alone else weight.to("cpu", copy=True)


def left_over(name: str) -> OffloadError:
    """Return the error for a weight on the host that still has the gradient of an earlier step."""
    return OffloadError(
        f"{name} still has the gradient of an earlier step",
        limit="gradients of weights on the host are written anew, not added",
        hint="`optimizer.zero_grad(set_to_none=True)` after `optimizer.step()`, of an optimizer"
        " over `engine.trained_parameters`; `model.zero_grad()` before `offload.attach`",
    )


def _require_plain(model: nn.Module, embedding: nn.Module, *, may_train: bool, hint: str) -> None:
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
    weight = embedding.weight
    trained = [parameter for parameter in embedding.parameters() if parameter.requires_grad]
    if trained and not may_train:
        raise _refused(f"`{name}` trains", 'it may if `trained_weights` is "host" too', hint)
    if any(parameter is not weight for parameter in trained):
        limit = "rows have gradients by that alone"
        raise _refused(f"`{name}` trains more than its weight", limit, hint)


def require_alone(
    model: nn.Module,
    weight: nn.Parameter,
    own: nn.Module,
    other: nn.Module | None,
    settings: tuple[str, str],
    *,
    is_other_on_host: bool,
) -> None:
    """Check that a weight on the host is one module's, or, frozen, of embedding and head there.

    Args:
        model: All modules that may have the weight.
        weight: The weight.
        own: The module whose weight is to be on the host.
        other: The head of an embedding, or the embedding of a head; None if there is none.
        settings: What says where each of the two has its weight.
        is_other_on_host: Whether the other's is on the host.

    Raises:
        UnsupportedModelError: Something else has it, both train it, or only one is on the host.
    """
    users = {
        module: path
        for path, module in model.named_modules()
        if any(p is weight for p in module._parameters.values())
    }
    name = users.pop(own, "it")
    if not users:
        return
    hint = on_device(own, other, settings, is_other_on_host=is_other_on_host)
    limit = "it is on the device for it"
    user = next((module for module in users if module is not other), other)
    if user is other and weight.requires_grad:
        limit = "a weight of both that trains is on the device"
    elif user is other and is_other_on_host:
        return
    elif user is other:
        limit = "a weight of both is in one place"
        hint = f'`{settings[1]}="host"` too, or {hint}'
    assert user is not None
    raise UnsupportedModelError(
        f"`{users[user]}` has the same weight as `{name}`", limit=limit, hint=hint
    )


def on_device(
    own: nn.Module, other: nn.Module | None, settings: tuple[str, str], *, is_other_on_host: bool
) -> str:
    """Return the settings that leave a module's weight on the device, for a hint.

    A weight that the other has too is there for both. Arguments are those of `require_alone`.
    """
    hint, others = (f'`{setting}="device"`' for setting in settings)
    known = set() if other is None else {id(parameter) for parameter in other.parameters()}
    is_shared = any(id(parameter) in known for parameter in own.parameters())
    return f"{hint} with {others}" if is_shared and is_other_on_host else hint


def _refused(what: str, limit: str, hint: str = '`embeddings="device"`') -> UnsupportedModelError:
    return UnsupportedModelError(what, limit=limit, hint=hint)
