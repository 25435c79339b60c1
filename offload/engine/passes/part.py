"""What one run contributes to a step: its micro-batches, checked and on the compute device."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import nn

from offload.engine.batch import (
    Batch,
    LabelledBatch,
    Vocabulary,
    checked_batches,
    checked_scored,
    require_an_id_each,
    require_divisor,
    require_labels,
    rows_of_labels,
    with_labels,
)
from offload.engine.host.embedding import PLACES, on_device, require_alone
from offload.engine.host.slab import HostBlocks
from offload.engine.memory_meter import Arena
from offload.engine.model.layers import LayeredModel
from offload.engine.model.router import alone, require_whole_step
from offload.engine.objective import Objective, OutputObjective
from offload.engine.passes.reference import SwitchedModel, require_owners
from offload.engine.passes.scoring import ScoredTail, Scoring
from offload.engine.recompute.attention_outputs import NOTHING
from offload.engine.results import PassState, Places, RunState
from offload.engine.seeding import visit_seed
from offload.engine.streams import Device, copy_on_host
from offload.engine.visit_cache import VISIT_CACHE
from offload.errors import OffloadError, UnsupportedModelError
from offload.plan.facts.workload import WeightPlace
from offload.plan.memory.memory import HEAD
from offload.plan.schedule.op import Kind, Op
from offload.plan.schedule.schedule import Passes, Reduced, Schedule, numbered

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class Reducer(Protocol):
    """Adds up a run's gradients over its processes, in ops of the step's network lane.

    All processes do the same ops in the same order, whatever micro-batches each has.
    """

    @property
    def reduced(self) -> Reduced:
        """What is sent of each layer, and of all else; equal on all processes."""

    def reduce(self, layer: int | None) -> None:
        """Replace gradients by their sums, on the running lane; waits for the other processes.

        Args:
            layer: Whose; None for those that no layer has alone.
        """


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class RunStep:
    """What one run computes in a step that it may share with others.

    Attributes:
        micro_batches: As for `Engine.forward_backward`.
        adapter: Name of the adapter that it trains; None for those that are active, which only a
            run that shares its step with no other can have.
        objective: The loss of the run's step; None for the cross-entropy.
        scored: Micro-batches that the objective's loss reads and does not train on.
        dropout_seed: Seeds dropout; None draws one from torch's generator.
        num_label_tokens: Divisor of the sum of the losses; None counts the label tokens of the
            micro-batches. If several processes share a step, pass their total. An objective divides
            as it defines.
        micro_batch_ids: Number of each micro-batch in the run's whole step, so that its dropout
            does not depend on the process that computes it; None numbers them from 0.
        add_up: Adds up a vector over the processes that share the step, in each of them alike; a
            router loss calls it once per step.
        reducer: Adds up the gradients over the processes that share the step, while it runs; None
            leaves those of this process.
        loss_scale: Factor of all gradients, and not of the loss that is returned: a power of two
            keeps small ones in float16.
    """

    micro_batches: Sequence[Batch]
    adapter: str | None = None
    objective: Objective | None = None
    scored: Sequence[Batch] = ()
    dropout_seed: int | None = None
    num_label_tokens: int | None = None
    micro_batch_ids: Sequence[int] | None = None
    add_up: Callable[[torch.Tensor], torch.Tensor] = alone
    reducer: Reducer | None = None
    loss_scale: float = 1.0


Table = dict[Kind, Callable[[Op], None]]
"""The function that runs each kind of op in a pass."""


class Transfers:
    """Moves weights, layer inputs, graphs and gradients between their places."""

    def __init__(self, places: Places, device: Device) -> None:
        """Keep the parts; nothing is moved."""
        self._source, self._slots = places.source, places.slots
        self._stash, self._sent = places.stash, places.sent
        self._host_gradients = places.host_gradients
        self._updates = places.updates
        self._embedding, self._head = places.embedding, places.head
        self._device = device

    def table(self, state: PassState) -> Table:
        """Return what runs each kind of transfer in a pass."""
        looked_up: Table = {}
        if self._embedding is not None:
            looked_up[Kind.LOOK_UP] = self._embedding.look_up
            looked_up[Kind.ROWS] = partial(self._embedding.bring, device=self._device)
        if self._head is not None:
            looked_up[Kind.HEAD] = partial(self._head.bring, device=self._device)
        return looked_up | {
            Kind.READ: self._read,
            Kind.LOAD: self._load,
            Kind.DECODE: self._decode,
            Kind.STASH: partial(self._stash_input, state),
            Kind.FETCH: partial(self._fetch_input, state),
            Kind.SEND: partial(self._send, state),
            Kind.RETURN: partial(self._return, state),
            Kind.GRADIENT: self._gradient,
            Kind.UPDATE: lambda op: self._updates.run(op.layer_index),
        }

    def _read(self, op: Op) -> None:
        target = self._slots.staging(op.buffer_index, op.num_bytes)
        self._source.deliver(op.layer_index, op.offset, target, copy_on_host)

    def _load(self, op: Op) -> None:
        target = self._slots.target(op.slot_index, op.offset, op.num_bytes)
        if op.buffer is None:
            self._source.deliver(op.layer_index, op.offset, target, self._device.copy)
        else:
            self._device.copy(target, self._slots.staging(op.buffer, op.num_bytes))

    def _decode(self, op: Op) -> None:
        with torch.no_grad():
            self._slots.decode(op.layer_index, op.slot_index)

    def _stash_input(self, state: PassState, op: Op) -> None:
        layer, m = op.layer_index, op.micro_batch_index
        input_BTD, place = state.inputs[layer, m], self._stash.place(layer, m)
        if input_BTD.nbytes != place.nbytes:
            raise UnsupportedModelError(
                f"layer {layer} is given {tuple(input_BTD.shape)} of {input_BTD.dtype}",
                limit="inputs that wait on the host are (B, T, hidden_size) of the model's type",
                hint='`stash="device"`',
            )
        self._device.copy(place, _bytes(input_BTD))

    def _fetch_input(self, state: PassState, op: Op) -> None:
        layer, m = op.layer_index, op.micro_batch_index
        target = self._stash.buffer(op.buffer_index, op.num_bytes)
        self._device.copy(target, self._stash.place(layer, m))
        like_BTD = state.fronts[m].hidden_BTD
        state.fetched[layer, m] = target.view(like_BTD.dtype).view(like_BTD.shape)

    def _send(self, state: PassState, op: Op) -> None:
        place, buffer = self._sent_places(state, op)
        self._device.copy(place, buffer)

    def _return(self, state: PassState, op: Op) -> None:
        place, buffer = self._sent_places(state, op)
        self._device.copy(buffer, place)
        at = op.layer_index, op.micro_batch_index
        if at in state.sent:
            state.sent[at].is_in(buffer)
        else:
            state.attention[at] = state.attention.get(at, NOTHING).at(buffer)

    def _sent_places(self, state: PassState, op: Op) -> tuple[torch.Tensor, torch.Tensor]:
        """Return host and device memory of what was sent; none if it could not be."""
        at = op.layer_index, op.micro_batch_index
        num_bytes = (state.sent.get(at) or state.attention.get(at, NOTHING)).num_bytes
        return self._sent.place(*at)[:num_bytes], self._sent.buffer(op.carrier_index, num_bytes)

    def _gradient(self, op: Op) -> None:
        if not op.offset:
            self._host_gradients.measure(op.layer_index, op.buffer_index)
        sink, gradient = self._host_gradients.leaving(
            op.layer_index, op.buffer_index, op.offset, op.num_bytes
        )
        self._device.copy(sink, gradient)


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view(-1).view(torch.uint8)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Part:
    """What one run contributes to a step.

    Attributes:
        passes: Its passes through the layers, numbered in the step.
        batches: Those that are trained on, on the compute device.
        model: How they are computed.
        adapter: The adapter that computes them; None for those that are active.
        num_label_tokens: Divisor of the sum of the losses; an objective divides by itself.
        scoring: What is scored, with an objective.
        seed: Dropout is seeded by (seed, layer, id), so that the recompute repeats it.
        ids: Number in the run's whole step of each micro-batch that is trained on.
        add_up: As of `RunStep`.
        reducer: Adds up its gradients over processes; None if there is one.
        loss_scale: Factor of all gradients.
        state: What its ops find out.
    """

    passes: Passes
    batches: Sequence[LabelledBatch]
    model: SwitchedModel
    adapter: str | None = None
    num_label_tokens: int
    scoring: Scoring | None = None
    seed: int = 0
    ids: Sequence[int] = ()
    add_up: Callable[[torch.Tensor], torch.Tensor] = alone
    reducer: Reducer | None = None
    loss_scale: float = 1.0
    state: RunState = field(default_factory=RunState)

    @property
    def labelled(self) -> Sequence[LabelledBatch]:
        """All of the run's micro-batches, those that are only scored last."""
        return self.batches if self.scoring is None else self.scoring.batches

    def given_ids(self, number: int) -> torch.Tensor:
        """Return the tokens (B, T) of a pass, as they were given."""
        return self.labelled[self.passes.micro_batch(number)].given_ids

    @property
    def scored(self) -> Scoring:
        """What is scored, of a run with an objective."""
        assert self.scoring is not None
        return self.scoring

    def visit_seed(self, layer: int, number: int) -> int:
        """Return the dropout seed of one visit of a micro-batch that is trained on."""
        return visit_seed(self.seed, layer, self.ids[self.passes.micro_batch(number)])

    def begin(self, model: LayeredModel, schedule: Schedule) -> None:
        """Begin the router loss of a step, if the model has one.

        Raises:
            OffloadError: Its micro-batches pass the layers one after another.
        """
        if model.router_loss is not None and self.batches:
            require_whole_step(schedule)
            self.state.balance = model.router_loss.balance(self.batches, self.add_up)

    def hear(self, layer: int, number: int, logits: Sequence[torch.Tensor]) -> None:
        """Note the router logits of a forward visit."""
        if logits and self.state.balance is not None:
            self.state.balance.hear(layer, self.passes.micro_batch(number), logits)

    def router_gradients(
        self, layer: int, number: int, logits: Sequence[torch.Tensor]
    ) -> list[torch.Tensor]:
        """Return the gradients of the router loss by the router logits of a backward visit."""
        if self.state.balance is None:
            return []
        found = self.state.balance.gradients(layer, self.passes.micro_batch(number), logits)
        return found if self.loss_scale == 1 else [self.loss_scale * one for one in found]


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class _Given:
    """A run's batches, checked and on the compute device."""

    run: RunStep
    batches: list[Batch]
    labelled: list[LabelledBatch]
    num_trained: int
    is_shifted: bool

    @classmethod
    def of(
        cls, run: RunStep, vocabulary: Vocabulary, torch_device: torch.device, *, is_trained: bool
    ) -> "_Given":
        is_shifted = not isinstance(run.objective, OutputObjective)
        if not is_shifted:  # labels mark tokens, and are none of the head's
            vocabulary = replace(vocabulary, num_predicted=None)
        trained = checked_batches(run.micro_batches, vocabulary)
        scored = checked_scored(run.scored, vocabulary, has_objective=run.objective is not None)
        batches = [*trained, *scored]
        return cls(
            run=run,
            batches=batches,
            labelled=[with_labels(one, torch_device, is_shifted=is_shifted) for one in batches],
            num_trained=len(trained) if is_trained else 0,
            is_shifted=is_shifted,
        )

    @property
    def passes(self) -> Passes:
        objective = self.run.objective
        return Passes(
            num_trained=self.num_trained,
            num_scored=len(self.batches) - self.num_trained,
            has_reference=objective is not None and objective.reference is not None,
            has_objective=objective is not None,
        )

    def part(
        self,
        model: LayeredModel,
        passes: Passes,
        switched: Callable[[str | None], SwitchedModel],
    ) -> Part:
        run, trained = self.run, self.labelled[: self.num_trained]
        require_divisor(run.num_label_tokens)
        ids = tuple(range(len(trained)) if run.micro_batch_ids is None else run.micro_batch_ids)
        require_an_id_each(len(ids), len(trained))
        num_label_tokens = run.num_label_tokens
        if num_label_tokens is None:
            counted = trained if self.num_trained else self.labelled
            num_label_tokens = sum(batch.num_label_tokens for batch in counted)
        require_labels(num_label_tokens, len(self.labelled))
        scoring = None
        if run.objective is not None:
            scoring = Scoring.of(
                model,
                run.objective,
                rows_of_labels(self.batches, is_shifted=self.is_shifted),
                self.labelled,
                passes=passes,
                adapter=run.adapter,
            )
        seed = run.dropout_seed
        if seed is None:
            seed = int(torch.randint(2**31, ()).item())
        return Part(
            passes=passes,
            batches=trained,
            model=switched(run.adapter),
            adapter=run.adapter,
            num_label_tokens=num_label_tokens,
            scoring=scoring,
            seed=seed,
            ids=ids,
            add_up=run.add_up,
            reducer=run.reducer,
            loss_scale=run.loss_scale,
        )


def parts_of(
    model: LayeredModel,
    runs: Sequence[RunStep],
    vocabulary: Vocabulary,
    torch_device: torch.device,
    *,
    switched: Callable[[str | None], SwitchedModel],
    is_trained: bool,
) -> list[Part]:
    """Check what runs are given for a step, and move it to the compute device.

    Args:
        model: The model.
        runs: The runs.
        vocabulary: The model's.
        torch_device: Where it computes.
        switched: Returns the model as a run with this adapter computes it.
        is_trained: Whether micro-batches are trained on, and only scored if not.

    Raises:
        OffloadError: Something is invalid, or the model has no such reference.
    """
    given = [_Given.of(run, vocabulary, torch_device, is_trained=is_trained) for run in runs]
    passes = numbered([one.passes for one in given])
    return [one.part(model, of, switched) for one, of in zip(given, passes, strict=True)]


def require_apart(model: LayeredModel, runs: Sequence[RunStep], *, are_on_host: bool) -> None:
    """Check that runs share no weight that trains: each has an adapter of its own.

    Args:
        model: The model.
        runs: The runs.
        are_on_host: Whether weights of the layers train on the host.

    Raises:
        OffloadError: They do not.
    """
    adapters = [run.adapter for run in runs if run.adapter is not None]
    if not runs or len(adapters) < len(runs) > 1:
        raise OffloadError(
            f"{len(runs) - len(adapters)} of {len(runs)} runs name no adapter",
            limit="a step has at least one run, and runs that share it train an adapter each",
            hint="`RunStep(micro_batches=..., adapter=...)`",
        )
    double = next((one for one in adapters if adapters.count(one) > 1), None)
    if double is not None:
        raise OffloadError(
            f"two runs train the adapter {double!r}",
            limit="their gradients would be added to each other",
            hint="give their micro-batches to one run, or add an adapter",
        )
    if len(runs) > 1 and are_on_host:
        raise OffloadError(
            f"{len(runs)} runs share a step, and weights of the layers train on the host",
            limit="their gradients leave a layer once per step, for one run",
            hint='`trained_weights="device"`, or train one run at a time',
        )
    if adapters:
        require_owners(model, adapters)


class Tail:
    """Computes the loss of a pass, and its gradient by the last layer's output."""

    def __init__(
        self, model: LayeredModel, *, head_chunk_tokens: int, loss_scale: float = 1.0
    ) -> None:
        """Keep the model, of how many tokens logits exist at a time, and a gradient's factor."""
        self._model, self._loss_scale = model, loss_scale
        self._chunk_tokens = head_chunk_tokens
        self._last = len(model.layers)

    def train(
        self,
        state: PassState,
        run: RunState,
        m: int,
        batch: LabelledBatch,
        num_items: torch.Tensor,
    ) -> None:
        """Add the loss of a micro-batch, and keep its gradient for the backward visits.

        Args:
            state: Of the pass.
            run: Of its run.
            m: Which micro-batch of the step.
            batch: The micro-batch.
            num_items: Divisor of the sum of the losses, on the device.
        """
        hidden_BTD = state.inputs.pop((self._last, m))
        gradient_BTD = torch.zeros_like(hidden_BTD)
        self.loss(run, hidden_BTD, batch, num_items, gradient_BTD.flatten(0, 1))
        state.gradient[m] = gradient_BTD

    def loss(
        self,
        run: RunState,
        hidden_BTD: torch.Tensor,
        batch: LabelledBatch,
        num_items: torch.Tensor,
        gradient_ND: torch.Tensor | None,
    ) -> None:
        """Add the loss of the labelled tokens by chunks, and write its gradient if requested."""
        flat_ND = hidden_BTD.flatten(0, 1)
        chunks = zip(
            batch.positions.split(self._chunk_tokens),
            batch.next_tokens.split(self._chunk_tokens),
            strict=True,
        )
        for positions_N, next_N in chunks:
            if not positions_N.numel():
                continue
            loss = self._model.tail_loss(
                flat_ND,
                positions_N=positions_N,
                next_N=next_N,
                num_items=num_items,
                gradient_ND=gradient_ND,
                loss_scale=self._loss_scale,
            )
            run.losses.append(loss)


class PartTail:
    """Runs what comes after the last layer for one run."""

    def __init__(self, model: LayeredModel, part: Part, *, head_chunk_tokens: int) -> None:
        """Keep the parts; nothing is computed yet."""
        self._part = part
        self._plain = Tail(model, head_chunk_tokens=head_chunk_tokens, loss_scale=part.loss_scale)
        scoring = part.scoring
        self._scored: ScoredTail | None = None
        if scoring is not None:
            self._scored = ScoredTail(
                model, scoring, head_chunk_tokens=head_chunk_tokens, loss_scale=part.loss_scale
            )
        # Filled on the device: `torch.tensor` would copy the number and wait for the device.
        torch_device = part.batches[0].positions.device if part.batches else torch.device("cpu")
        self._num_items = torch.full((), part.num_label_tokens, device=torch_device)

    @property
    def scored(self) -> ScoredTail:
        """That of the run's objective."""
        assert self._scored is not None
        return self._scored

    def score(self, state: PassState, number: int) -> None:
        """Compute the log-probabilities of a pass."""
        if number in self._part.passes.trained:
            with self._part.model.around_layers():
                self.scored.score(state, number)
        else:
            self.scored.score(state, number)

    def weigh(self) -> None:
        """Compute the loss of an objective."""
        self.scored.weigh(self._part.state)

    def train(self, state: PassState, number: int) -> None:
        """Compute the gradient of the run's loss by a micro-batch's hidden states."""
        part, m = self._part, self._part.passes.micro_batch(number)
        with part.model.around_layers():
            if self._scored is not None:
                self._scored.train(state, number)
            else:
                VISIT_CACHE.enter(("tail", number))
                self._plain.train(state, part.state, number, part.batches[m], self._num_items)
        if part.state.balance is not None:
            part.state.losses.append(part.state.balance.loss(m))


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
        self.weight = _own_weight(model, head, embeddings=embeddings)
        self._name = next(name for name, p in model.named_parameters() if p is self.weight)
        self._module = head
        values = self.weight.data
        self.num_bytes = values.nbytes
        self._on_host = blocks.hold(values)
        self._on_device: torch.Tensor | None = None
        self.weight.data = self._on_host.view(values.dtype).view(values.shape)

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
        on_host = self.weight.data
        if on_host.data_ptr() != self._on_host.data_ptr():
            raise OffloadError(
                f"`{self._name}` was given other memory since the model was attached",
                limit="a head in host memory is copied from where `offload.attach` has put it",
                hint="write to it, `weight.copy_(...)`; or `engine.detach()`, and attach again",
            )
        self.weight.data = self._on_device.view(on_host.dtype).view(on_host.shape)
        try:
            yield
        finally:
            self.weight.data = on_host

    @contextmanager
    def unread(self) -> Iterator[None]:
        """Return zeros from the head in a block, in which nothing reads them."""
        assert self._module is not None
        own = vars(self._module)
        before = own.get("forward")
        own["forward"] = self._zeros
        try:
            yield
        finally:
            del own["forward"]
            if before is not None:
                own["forward"] = before

    def _zeros(self, hidden_BTD: torch.Tensor) -> torch.Tensor:
        return hidden_BTD.new_zeros(*hidden_BTD.shape[:-1], len(self.weight))

    def computing(self, body: Callable[[], None]) -> None:
        """Run an op with the weight on the device."""
        with self.present():
            body()


def bytes_to_lock(model: "PreTrainedModel", head: WeightPlace, embeddings: WeightPlace) -> int:
    """Return the page-locked memory that a model's head will take; 0 if the device has it.

    Args:
        model: The model.
        head: Where its output head's weight is to be.
        embeddings: Where its input embedding's weight is to be.

    Raises:
        UnsupportedModelError: As for `HostHead`.
    """
    if head == "device":
        return 0
    return _own_weight(model, model.get_output_embeddings(), embeddings=embeddings).data.nbytes


def without_adapter(head: nn.Module | None) -> nn.Module | None:
    """Return the head that an adapter is put on, or the head itself."""
    unwrap: Any = getattr(head, "get_base_layer", None)
    return head if unwrap is None else unwrap()


def _own_weight(
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
    is_embedding_on_host = embeddings == "host"
    hint = on_device(own, embedding, settings, is_other_on_host=is_embedding_on_host)
    if not isinstance(own, nn.Linear):
        raise _refused(f"`{name}` is {type(own).__name__}", "the head is a linear layer", hint)
    weight = own.weight
    assert isinstance(weight, nn.Parameter)
    require_alone(model, weight, own, embedding, settings, is_other_on_host=is_embedding_on_host)
    if weight.requires_grad:
        raise _refused(f"`{name}` trains", "a head in host memory is frozen", hint)
    if not weight.data.is_contiguous():
        raise _refused(f"`{name}` has a weight that is not contiguous", "its bytes are copied")
    return weight


def _refused(what: str, limit: str, hint: str = '`head="device"`') -> UnsupportedModelError:
    return UnsupportedModelError(what, limit=limit, hint=hint)
