"""What one run contributes to a step: its micro-batches, checked and on the compute device."""

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Protocol

import torch

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
from offload.engine.model.layers import LayeredModel
from offload.engine.model.router import alone, require_whole_step
from offload.engine.objective import Objective, OutputObjective
from offload.engine.passes.scoring import ScoredTail, Scoring, SwitchedModel, require_owners
from offload.engine.randomness import seed_of
from offload.engine.recompute import NOTHING
from offload.engine.results import PassState, Places, RunState
from offload.engine.streams import Device, copy_on_host
from offload.engine.visit_cache import VISIT_CACHE
from offload.errors import OffloadError, UnsupportedModelError
from offload.plan.schedule.op import Kind, Op
from offload.plan.schedule.schedule import Passes, Reduced, Schedule, numbered


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
    """What one run computes in a step that it may share with others."""

    # Rows that are trained on, as `Engine.forward_backward` takes them.
    micro_batches: Sequence[Batch]
    # Name of the adapter that it trains; None for those that are active, which only a run that
    # shares its step with no other can have.
    adapter: str | None = None
    objective: Objective | None = None  # the loss of the run's step; None for the cross-entropy
    # Micro-batches that the objective's loss reads and does not train on.
    scored: Sequence[Batch] = ()
    dropout_seed: int | None = None  # seeds dropout; None draws one from torch's generator
    # Divisor of the sum of the losses; None counts the label tokens of the micro-batches. If
    # several processes share a step, pass their total. An objective divides as it defines.
    num_label_tokens: int | None = None
    # Number of each micro-batch in the run's whole step, so that its dropout does not depend on the
    # process that computes it; None numbers them from 0.
    micro_batch_ids: Sequence[int] | None = None
    # Adds up a vector over the processes that share the step, in each of them alike; a router loss
    # calls it once per step.
    add_up: Callable[[torch.Tensor], torch.Tensor] = alone
    # Adds up the gradients over the processes that share the step, while it runs; None leaves those
    # of this process.
    reducer: Reducer | None = None
    # Factor of all gradients, and not of the loss that is returned: a power of two keeps small ones
    # in float16.
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
                limit="inputs that wait on the host are as large as those of the first tokens",
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
    """What one run contributes to a step."""

    run: RunStep  # the run
    passes: Passes  # its passes through the layers, numbered in the step
    batches: Sequence[LabelledBatch]  # the batches that are trained on, on the compute device
    model: SwitchedModel  # how they are computed
    num_label_tokens: int  # divisor of the sum of the losses; an objective divides by itself
    scoring: Scoring | None = None  # what is scored, with an objective
    seed: int = 0  # dropout is seeded by (seed, layer, id), so that the recompute repeats it
    ids: Sequence[int] = ()  # number in the run's whole step of each micro-batch that is trained on
    state: RunState = field(default_factory=RunState)  # what its ops find out

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
        return seed_of(self.seed, layer, self.ids[self.passes.micro_batch(number)])

    def begin(self, model: LayeredModel, schedule: Schedule) -> None:
        """Begin the router loss of a step, if the model has one.

        Raises:
            OffloadError: Its micro-batches pass the layers one after another.
        """
        if model.router_loss is not None and self.batches:
            require_whole_step(schedule)
            self.state.balance = model.router_loss.balance(self.batches, self.run.add_up)

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
        gradients = self.state.balance.gradients(layer, self.passes.micro_batch(number), logits)
        scale = self.run.loss_scale
        return gradients if scale == 1 else [scale * gradient for gradient in gradients]


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
    given = [_checked(run, vocabulary) for run in runs]
    passes = numbered(
        [
            Passes(
                num_trained=len(trained) if is_trained else 0,
                num_scored=len(scored) if is_trained else len(trained) + len(scored),
                has_reference=run.objective is not None and run.objective.reference is not None,
                has_objective=run.objective is not None,
            )
            for run, (trained, scored) in zip(runs, given, strict=True)
        ]
    )
    return [
        _part(model, run, [*trained, *scored], of, torch_device, switched)
        for run, (trained, scored), of in zip(runs, given, passes, strict=True)
    ]


def _checked(run: RunStep, vocabulary: Vocabulary) -> tuple[list[Batch], list[Batch]]:
    """Return the micro-batches that a run trains on, and those that it only scores, if valid."""
    if isinstance(run.objective, OutputObjective):  # labels mark tokens, and are none of the head's
        vocabulary = replace(vocabulary, num_predicted=None)
    trained = checked_batches(run.micro_batches, vocabulary)
    has_objective = run.objective is not None
    return trained, checked_scored(run.scored, vocabulary, has_objective=has_objective)


def _part(
    model: LayeredModel,
    run: RunStep,
    batches: Sequence[Batch],
    passes: Passes,
    torch_device: torch.device,
    switched: Callable[[str | None], SwitchedModel],
) -> Part:
    is_shifted = not isinstance(run.objective, OutputObjective)
    labelled = [with_labels(batch, torch_device, is_shifted=is_shifted) for batch in batches]
    trained = labelled[: passes.num_trained]
    require_divisor(run.num_label_tokens)
    ids = tuple(range(len(trained)) if run.micro_batch_ids is None else run.micro_batch_ids)
    require_an_id_each(len(ids), len(trained))
    num_label_tokens = run.num_label_tokens
    if num_label_tokens is None:
        num_label_tokens = sum(batch.num_label_tokens for batch in trained or labelled)
    require_labels(num_label_tokens, len(labelled))
    scoring = None
    if run.objective is not None:
        rows = rows_of_labels(batches, is_shifted=is_shifted)
        scoring = Scoring.of(
            model, run.objective, rows, labelled, passes=passes, adapter=run.adapter
        )
    seed = run.dropout_seed
    return Part(
        run=run,
        passes=passes,
        batches=trained,
        model=switched(run.adapter),
        num_label_tokens=num_label_tokens,
        scoring=scoring,
        seed=int(torch.randint(2**31, ()).item()) if seed is None else seed,
        ids=ids,
    )


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


def add_losses(
    model: LayeredModel,
    run: RunState,
    hidden_BTD: torch.Tensor,
    batch: LabelledBatch,
    num_items: torch.Tensor,
    *,
    chunk_tokens: int,
    gradient_BTD: torch.Tensor | None = None,
    loss_scale: float = 1.0,
) -> None:
    """Add the loss of the labelled tokens by chunks, and write its gradient if one is wanted.

    Args:
        model: The model.
        run: What the losses are added to.
        hidden_BTD: Output of the last layer.
        batch: The micro-batch.
        num_items: Divisor of the sum of the losses, on the device.
        chunk_tokens: Tokens whose logits exist at a time.
        gradient_BTD: Where the gradient by `hidden_BTD` goes.
        loss_scale: Factor of the gradient.
    """
    for positions_N, next_N in batch.chunks(chunk_tokens):
        if positions_N.numel():
            loss = model.tail_loss(
                hidden_BTD.flatten(0, 1),
                positions_N=positions_N,
                next_N=next_N,
                num_items=num_items,
                gradient_ND=None if gradient_BTD is None else gradient_BTD.flatten(0, 1),
                loss_scale=loss_scale,
            )
            run.losses.append(loss)


class PartTail:
    """What comes after the last layer for one run.

    Attributes:
        scored: The tail of the run's objective; None without one.
    """

    def __init__(self, model: LayeredModel, part: Part, *, head_chunk_tokens: int) -> None:
        """Keep the parts; nothing is computed yet."""
        self._model, self._part, self._chunk_tokens = model, part, head_chunk_tokens
        self.scored = (
            None
            if part.scoring is None
            else ScoredTail(
                model,
                part.scoring,
                head_chunk_tokens=head_chunk_tokens,
                loss_scale=part.run.loss_scale,
            )
        )
        # Filled on the device: `torch.tensor` would copy the number and wait for the device.
        torch_device = part.batches[0].positions.device if part.batches else torch.device("cpu")
        self._num_items = torch.full((), part.num_label_tokens, device=torch_device)

    def score(self, state: PassState, number: int) -> None:
        """Compute the log-probabilities of a pass."""
        is_trained = number in self._part.passes.trained
        assert self.scored is not None
        with self._part.model.around_layers() if is_trained else nullcontext():
            self.scored.score(state, number)

    def weigh(self) -> None:
        """Compute the loss of an objective."""
        assert self.scored is not None
        self.scored.weigh(self._part.state)

    def train(self, state: PassState, number: int) -> None:
        """Compute the gradient of the run's loss by a micro-batch's hidden states."""
        part, m = self._part, self._part.passes.micro_batch(number)
        with part.model.around_layers():
            if self.scored is not None:
                self.scored.train(state, number)
            else:
                VISIT_CACHE.enter(("tail", number))
                hidden_BTD = state.inputs.pop((len(self._model.layers), number))
                state.gradient[number] = torch.zeros_like(hidden_BTD)
                add_losses(
                    self._model,
                    part.state,
                    hidden_BTD,
                    part.batches[m],
                    self._num_items,
                    chunk_tokens=self._chunk_tokens,
                    gradient_BTD=state.gradient[number],
                    loss_scale=part.run.loss_scale,
                )
        if part.state.balance is not None:
            part.state.losses.append(part.state.balance.loss(m))
