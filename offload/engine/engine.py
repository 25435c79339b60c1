"""The library door: attach a model, run steps on it, detach it."""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, replace
from enum import Enum, auto
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import nn
from torch.nn.utils import parametrize

from offload.engine.batch import (
    Batch,
    LabelledBatch,
    checked_batch,
    checked_batches,
    to_device,
    with_labels,
)
from offload.engine.executor import Executor
from offload.engine.generation import Generation
from offload.engine.host.embedding import HostHead, own_weight
from offload.engine.host.pagelock import aligned_empty
from offload.engine.host.slab import Field, Stash, by_place
from offload.engine.host.store import Backing
from offload.engine.host.weights import HostGradients, HostWeights, LateUpdates
from offload.engine.internals import num_writes
from offload.engine.memory_meter import Arena
from offload.engine.model import placement
from offload.engine.model.encoding import Encoding
from offload.engine.model.inventory import inventory_of
from offload.engine.model.layers import LayeredModel, homes_of, unchanged, vocabulary_of
from offload.engine.model.router import alone
from offload.engine.model.seal import Guard, Seal, require_unattached
from offload.engine.objective import Objective
from offload.engine.passes.part import Part, RunStep, Table, parts_of, require_apart
from offload.engine.passes.scoring import ScoredPasses, ScoreResult, SwitchedModel, used_by
from offload.engine.recompute import names_left_out
from offload.engine.results import (
    Computing,
    EvaluationResult,
    ForwardResult,
    Places,
    RunState,
    StepResult,
    measured,
)
from offload.engine.safety.attached import Attached
from offload.engine.safety.check import check
from offload.engine.slots import Slots
from offload.engine.streams import Device, open_device
from offload.errors import OffloadError
from offload.plan.facts.facts import WeightInventory
from offload.plan.facts.workload import FusedPart, WeightPlace
from offload.plan.machine.machine import Tier
from offload.plan.memory.memory import HEAD, LOCKED_TERMS, ROWS, SENT, STASH, locked_update_bytes
from offload.plan.plan import Plan
from offload.plan.schedule.op import Kind
from offload.plan.schedule.schedule import (
    MIN_SLOTS,
    Order,
    Residency,
    Ring,
    Saved,
    Schedule,
    TransferSizes,
    cold_ring,
    forward_schedule,
    step_schedule,
)

if TYPE_CHECKING:
    from transformers import PreTrainedModel


LayerKernels = Literal["plain", "fused"]
_LOCKED = frozenset(LOCKED_TERMS) - {HEAD}  # it depends on the model's own head


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineOptions:
    """How a model is attached; see `offload.attach`.

    `leaves_out` is whether recomputes leave out products whose values nothing reads: no bit of a
    gradient depends on it. `mlp_chunk_tokens` is how many tokens an MLP computes at a time; None
    for all of a micro-batch. `layer_kernels` is what computes norms, rotary embedding and gated
    activations: the model's own code, or fused operators where that is proven to be the same, but
    for `plain_parts`.
    `joins_rows` is whether attention of packed rows is one call where torch's kernel computes it.
    `embeddings` is where the input embedding's weight is; of one on the host, rows are brought.
    `head` is where the output head's weight is; one on the host computes in the slots.
    `order` is that of a step's loops: over layers first, or over micro-batches.
    `locked_bytes` is what a plan page-locks in addition to layers and head: layer inputs, rows of
    the embedding, and what else of activations is sent.
    """

    num_slots: int
    codec: str
    tier: Tier
    store_dir: Path | None
    stash: Literal["device", "host"]
    trained_weights: Literal["device", "host"]
    head_chunk_tokens: int
    num_kept_graphs: int
    leaves_out: bool = True
    num_kept_outputs: int = 0
    num_sent_outputs: int = 0
    num_sent_graphs: int = 0
    mlp_chunk_tokens: int | None = None
    layer_kernels: LayerKernels = "plain"
    plain_parts: frozenset[FusedPart] = frozenset()
    joins_rows: bool = False
    embeddings: WeightPlace = "device"
    head: WeightPlace = "device"
    locked_bytes: int = 0
    order: Order = Order.LAYER_MAJOR

    def others_to_lock(self, model: "PreTrainedModel") -> int:
        """Return what is to be page-locked after the layers, and has no other way to the device.

        Raises:
            UnsupportedModelError: As for `HostHead`.
        """
        if self.head == "device":
            return self.locked_bytes
        head = own_weight(model, model.get_output_embeddings(), embeddings=self.embeddings)
        return self.locked_bytes + head.nbytes

    @property
    def uses_host_lane(self) -> bool:
        """Whether a thread works on the host: on updates, or on rows of the embedding."""
        return self.trained_weights == "host" or self.embeddings == "host"

    @property
    def records_attention(self) -> bool:
        """Whether any attention is recorded; compiled layers are computed whole."""
        return self.leaves_out and bool(self.num_kept_outputs + self.num_sent_outputs)

    @property
    def residency(self) -> Residency:
        """What of the layers stays on the device; compiled layers' attention is computed whole."""
        records = self.records_attention
        return Residency(
            num_slots=self.num_slots,
            num_kept_graphs=self.num_kept_graphs,
            num_sent_graphs=self.num_sent_graphs,
            num_kept_outputs=self.num_kept_outputs if records else 0,
            num_sent_outputs=self.num_sent_outputs if records else 0,
        )

    @classmethod
    def planned(cls, plan: Plan) -> "EngineOptions":
        """Return the options with which an engine runs a plan."""
        asked = plan.request
        code = asked.typical.code_on(plan.machine.device)
        return cls(
            num_slots=plan.residency.num_slots,
            codec=asked.typical.codec,
            tier="disk" if asked.is_on_disk else "ram",
            store_dir=None,
            stash="host" if asked.is_stashed else "device",
            trained_weights="device" if asked.typical.adapter.whole is None else "host",
            head_chunk_tokens=asked.typical.head_chunk_tokens,
            num_kept_graphs=plan.residency.num_kept_graphs,
            leaves_out=asked.typical.leaves_out,
            num_kept_outputs=plan.residency.num_kept_outputs,
            num_sent_outputs=plan.residency.num_sent_outputs,
            num_sent_graphs=plan.residency.num_sent_graphs,
            layer_kernels="fused" if code == "fused" else "plain",
            plain_parts=asked.typical.plain_parts,
            mlp_chunk_tokens=asked.typical.mlp_chunk_tokens,
            embeddings=asked.typical.embeddings,
            head=asked.typical.head,
            locked_bytes=sum(one.num_bytes for one in plan.host_memory if one.name in _LOCKED)
            + locked_update_bytes(asked.typical),
            order=asked.order,
            joins_rows=any(
                asked.typical.joins_rows(layer.attention, is_cuda=plan.machine.device == "cuda")
                for layer in plan.facts.layers
            ),
        )

    def within(self, num_layers: int) -> "EngineOptions":
        """Return the options for a model of so many layers; it has no more slots than layers.

        Raises:
            OffloadError: There are too few slots, or more kept graphs or outputs than layers.
        """
        if self.num_slots < MIN_SLOTS:
            raise OffloadError(
                f"num_slots is {self.num_slots}",
                limit=f"a layer computes in one slot while the next arrives: at least {MIN_SLOTS}",
                hint=f"`num_slots={MIN_SLOTS}`",
            )
        for name in ("kept_graphs", "kept_outputs", "sent_outputs", "sent_graphs"):
            num = getattr(self, f"num_{name}")
            if not 0 <= num <= num_layers:
                raise OffloadError(
                    f"{name} is {num}",
                    limit=f"it counts layers, of which there are {num_layers}",
                    hint=f"`{name}={min(max(0, num), num_layers)}`",
                )
        return replace(self, num_slots=min(self.num_slots, num_layers))


@dataclass(frozen=True, kw_only=True, slots=True)
class Bound:
    """Everything a pass needs."""

    executor: Executor  # what runs the passes
    places: Places  # where their ops move things from and to
    sizes: TransferSizes  # sizes of the transfers, in bytes
    computing: Computing  # how layers and head are computed


def bind(
    model: nn.Module,
    layered: LayeredModel,
    host: HostWeights,
    *,
    device: Device,
    options: EngineOptions,
) -> Bound:
    """Allocate the slots, bind the layers to them, and move everything else to the device.

    Args:
        model: The model as attached, adapters included.
        layered: The model inside it.
        host: Where its layers are stored.
        device: Where it computes.
        options: How the model is attached.
    """
    records, torch_device = host.records, device.torch_device
    allocate_device = partial(_allocate, torch_device)
    placement.require_values(model, records)
    if options.layer_kernels == "fused":
        layered.fuse(options.plain_parts)
    layered.joins_rows = options.joins_rows
    host_gradients = HostGradients(
        records,
        host.layers if options.trained_weights == "host" else (),
        names={id(parameter): name for name, parameter in model.named_parameters()},
        allocate_host=host.blocks.allocate,
        allocate_device=allocate_device,
    )
    stash, sent, *rows = (
        Stash(
            name,
            allocate_host=host.blocks.allocate,
            free_host=_freeing(host, device),
            torch_device=torch_device,
        )
        for name in (STASH, SENT, ROWS, ROWS)
    )
    head, layered.unread_head = None, nullcontext
    head_module = layered.model.get_output_embeddings()
    if options.head == "host":
        head = HostHead(
            layered.model, head_module, blocks=host.blocks, embeddings=options.embeddings
        )
        layered.unread_head = head.unread
    layered.embedding = None
    if options.embeddings == "host":  # after the head, which holds a weight of both
        from offload.engine.host.layer_table import host_embedding

        layered.embedding = host_embedding(layered.model, rows, is_head_on_host=head is not None)
    on_host = [] if head is None else [id(head.weight)]
    on_host += map(id, () if layered.embedding is None else layered.embedding.weights)
    placement.move_the_rest(layered, records, torch_device, on_host=on_host)
    head_bytes = 0 if head is None else head.num_bytes
    slots = Slots(
        records,
        num_slots=options.num_slots,
        allocate_device=allocate_device,
        staging=host.staging,
        head_bytes=head_bytes,
    )
    if head is not None and slots.head is not None:
        head.compute_in(slots.head)
    places = Places(
        source=host.source,
        slots=slots,
        stash=stash,
        sent=sent,
        host_gradients=host_gradients,
        updates=LateUpdates(host_gradients),
        embedding=layered.embedding,
        head=head,
    )
    computing = Computing(
        head_chunk_tokens=min(options.head_chunk_tokens, layered.max_positions),
        leaves_out=options.leaves_out,
        records_attention=options.records_attention,
        mlp_chunk_tokens=options.mlp_chunk_tokens,
    )
    return Bound(
        executor=Executor(model=layered, places=places, device=device, computing=computing),
        places=places,
        computing=computing,
        sizes=TransferSizes(
            layer_bytes=tuple(record.num_bytes for record in records),
            gradient_bytes=host_gradients.gradient_bytes,
            decoded_bytes=tuple(record.decoded_bytes for record in records),
            piece_bytes=host.piece_bytes,
            num_staging=len(host.staging),
            head_bytes=head_bytes,
        ),
    )


def _allocate(torch_device: torch.device, num_bytes: int) -> torch.Tensor:
    if torch_device.type == "cpu":
        return aligned_empty(num_bytes)  # a disk is read straight into it
    return torch.empty(num_bytes, dtype=torch.uint8, device=torch_device)


def _freeing(host: HostWeights, device: Device) -> Callable[[torch.Tensor], None]:
    """Return a function that frees host memory after the device has finished all issued work."""

    def free(block: torch.Tensor) -> None:
        device.finish()
        host.blocks.free(block)

    return free


def require_gradients() -> None:
    """Check that gradients are recorded.

    Raises:
        OffloadError: A block switches them off.
    """
    if not torch.is_grad_enabled():
        block = "inference_mode" if torch.is_inference_mode_enabled() else "no_grad"
        raise OffloadError(
            f"forward_backward is called in `torch.{block}()`",
            limit="a step records gradients",
            hint="leave the block, or `engine.forward(batch)` for the loss alone",
        )


def require_uncached() -> None:
    """Check that torch does not cache parametrized weights from one visit to the next.

    Raises:
        OffloadError: It does.
    """
    if parametrize._cache_enabled:
        raise OffloadError(
            "a pass is run in `torch.nn.utils.parametrize.cached()`",
            limit="a layer is visited several times, with and without gradients: a weight that is"
            " computed once has none",
            hint="leave the block",
        )


def require_no_inference_mode() -> None:
    """Check that tensors which are made now can take part in training.

    Raises:
        OffloadError: They cannot.
    """
    if torch.is_inference_mode_enabled():
        raise OffloadError(
            "attach is called in `torch.inference_mode()`",
            limit="what it allocates takes part in training later",
            hint="leave the block before `offload.attach`",
        )


class _State(Enum):
    """The state of an engine with respect to its model."""

    ATTACHED = auto()
    CLOSED = auto()
    DETACHED = auto()


class Engine:
    """A model whose decoder layers are streamed through C slots. See `offload.attach`."""

    def __init__(
        self,
        model: nn.Module,
        *,
        device: torch.device | Device,
        options: EngineOptions,
        backing: Backing | None = None,
    ) -> None:
        """Move the layers to their host memory or store, and bind them to the slots.

        Args:
            model: On the host.
            device: Where to compute, or an open `Device`.
            options: How to attach the model.
            backing: Where the layers were loaded to; None if each parameter has its own memory.
        """
        torch_device = device if isinstance(device, torch.device) else device.torch_device
        self._model = model
        self._layered = LayeredModel(model)
        require_unattached(self._layered)
        require_no_inference_mode()
        self._options = options = options.within(len(self._layered.layers))
        self._home = placement.only_device(self._layered)
        self._trains_front = placement.trains_front(self._layered)
        self._vocabulary = vocabulary_of(self._layered.model)
        groups = placement.streamed_parameters(
            self._layered, are_trained_streamed=options.trained_weights == "host"
        )
        codecs = Encoding(self._layered, options.codec).of_layers(groups)
        self._host = HostWeights(
            groups,
            codecs,
            backing=backing,
            tier=options.tier,
            store_dir=options.store_dir,
            torch_device=torch_device,
            others_bytes=options.others_to_lock(self._layered.model),
        )
        if isinstance(device, torch.device):
            device = open_device(
                device,
                is_staged=self._host.is_staged or options.uses_host_lane,
                prepare_thread=self._host.prepare_thread,
            )
        self._device = device
        self._checkpointing = placement.switch_off_checkpointing(model)
        self._state = _State.ATTACHED
        self._switched = cache(partial(SwitchedModel, self._layered))
        try:
            self._bound = bind(model, self._layered, self._host, device=device, options=options)
        except BaseException:
            self._device.close()
            with suppress(OffloadError):
                self._give_back()
            self._host.close()
            raise
        self.notes = self._host.notes
        self.layer_bytes = tuple(record.num_bytes for record in self._host.records)
        self.slab_bytes, self.pinned_bytes = self._host.slab_bytes, self._host.pinned_bytes
        self.slot_bytes = self._bound.places.slots.num_bytes
        self._ring = cold_ring(options.num_slots)
        self._num_writes = self._host.num_writes
        self._masters = self._bound.places.host_gradients.parameters
        self._attached = Attached(model, self._layered, self._masters)
        self._seal = Seal(
            self._host.records,
            names={id(parameter): name for name, parameter in model.named_parameters()},
            show=self._shown,
            release=self.detach,
        )
        self._guard = Guard(model, self._layered, seal=self._seal, answer=self._answer)

    @property
    def trained_parameters(self) -> dict[str, nn.Parameter]:
        """What an optimizer updates, by name: parameters on the device, masters on the host.

        Raises:
            OffloadError: The model changed since it was attached.
        """
        if self._state is _State.ATTACHED:
            self._attached.require_unchanged()
            self.updates.flush()
        return {
            name: self._masters.get(name, parameter)
            for name, parameter in self._model.named_parameters()
            if parameter.requires_grad
        }

    @property
    def updates(self) -> LateUpdates:
        """Updates of weights on the host that are made in the next step, while others compute.

        They are made before someone reads weights: by `forward`, `trained_parameters`,
        `state_dict`, `detach`, `close`.
        """
        return self._bound.places.updates

    def forward_backward(
        self,
        micro_batches: Sequence[Batch],
        *,
        objective: Objective | None = None,
        scored: Sequence[Batch] = (),
        dropout_seed: int | None = None,
        num_label_tokens: int | None = None,
        micro_batch_ids: Sequence[int] | None = None,
        order: Order | None = None,
        add_up: Callable[[torch.Tensor], torch.Tensor] = alone,
    ) -> StepResult:
        """Add the gradients of one optimizer step to `.grad` of the trained parameters.

        The loss is the sum over all label tokens of the step divided by their number, or that of an
        objective, which reads the log-probabilities of all its label tokens. A reference and rows
        that are only scored are computed in the same visits of the layers, in evaluation mode:
        they add no load, and draw no random number.

        Args:
            micro_batches: Each with input_ids (B, T) and labels (B, T; -100 for none), optionally
                attention_mask and position_ids; best on the host. Or several rows packed into one
                sequence: input_ids and labels (1, T), and row_lens, the tokens of each row. No
                row sees another, each starts at position 0, and its first token has no loss.
            objective: The loss of the step; None for the cross-entropy.
            scored: Micro-batches that the objective's loss reads and does not train on.
            dropout_seed: Seed of dropout; None draws one from torch's generator.
            num_label_tokens: Divisor of the sum of the losses; None counts the label tokens. If
                several processes share a step, their total.
            micro_batch_ids: Number of each micro-batch in the whole step; None numbers them from 0.
            add_up: Function that adds up a vector over the processes that share the step.
            order: The order of loops over layers and micro-batches; None takes the engine's.

        Raises:
            UnsupportedModelError: The model passes a layer something that could carry state; no
                gradient was touched.
            OffloadError: No token has a label (with an objective: a row has none), the model has no
                such reference, a micro-batch is invalid, gradients are disabled,
                the model changed since it was attached, a hook would receive partial gradients, or
                the engine is detached; no gradient was touched.
            TransferError: A copy failed; gradients may be partial and the caller should zero them.
        """
        run = RunStep(
            micro_batches=micro_batches,
            objective=objective,
            scored=scored,
            dropout_seed=dropout_seed,
            num_label_tokens=num_label_tokens,
            micro_batch_ids=micro_batch_ids,
            add_up=add_up,
        )
        (result,) = self._train([run], order or self._options.order)
        return result

    def forward_backward_runs(self, runs: Sequence[RunStep]) -> list[StepResult]:
        """Add the gradients of one step of each of several runs, in the visits of one step.

        Each run is computed with its own adapter, its own loss and its own random numbers, as if
        it were alone; the layers are loaded once for all of them. Ops and loads in the results are
        those of the shared step.

        Args:
            runs: Each with an adapter of its own.

        Raises:
            UnsupportedModelError: As for `forward_backward`.
            OffloadError: As for `forward_backward`; two runs have the same adapter, or something
                trains that is no adapter's.
            TransferError: As for `forward_backward`.
        """
        return self._train(runs, self._options.order)

    def _train(self, runs: Sequence[RunStep], order: Order) -> list[StepResult]:
        self._require_ready()
        parts = self._parts(runs, is_trained=True)
        self._reload_what_was_written()
        schedule = self._schedule(parts, ring=self._ring, order=order)
        executor, is_stashed = self._bound.executor, self._options.stash == "host"
        with self._consistent(schedule.ring_after), self._host.nearby():
            _, events = executor.step(schedule, parts, is_stashed=is_stashed)
            if schedule.network_bytes:
                self._device.finish()
            if self._masters:
                self._device.finish()
                self._bound.places.host_gradients.publish()
        result = partial(StepResult, device=self._device, schedule=schedule, events=events)
        return [result(run=part.state, num_label_tokens=part.num_label_tokens) for part in parts]

    def evaluate(
        self, micro_batches: Sequence[Batch], *, objective: Objective, scored: Sequence[Batch] = ()
    ) -> EvaluationResult:
        """Compute an objective's loss and metrics without gradients, in evaluation mode.

        Args:
            micro_batches: As for `forward_backward`.
            objective: The loss; it is taken over all rows.
            scored: As for `forward_backward`.

        Raises:
            UnsupportedModelError: As for `forward_backward`.
            OffloadError: A row has no label, the model has no such reference, or a micro-batch is
                invalid.
        """
        run = RunStep(micro_batches=micro_batches, objective=objective, scored=scored)
        return self.evaluate_runs([run])[0]

    def evaluate_runs(self, runs: Sequence[RunStep]) -> list[EvaluationResult]:
        """Compute losses of several runs as `evaluate` does, each with its own adapter.

        Args:
            runs: Each with an objective; an adapter may be that of several.

        Raises:
            UnsupportedModelError: As for `evaluate`.
            OffloadError: As for `evaluate`.
        """
        self._require_usable()
        parts = self._parts(runs, is_trained=False)
        self._bring_up_to_date()
        schedule = self._schedule(parts, ring=self._ring, order=Order.LAYER_MAJOR)
        with (
            self._consistent(schedule.ring_after),
            self._host.nearby(),
            torch.inference_mode(mode=False),
            torch.no_grad(),
        ):
            self._bound.executor.step(schedule, parts, is_stashed=False)
            self._device.finish()
        return [
            EvaluationResult(
                loss=float(part.state.losses[0]),
                metrics={name: float(value) for name, value in part.state.metrics.items()},
                num_label_tokens=part.num_label_tokens,
                num_loads=schedule.num_loads,
            )
            for part in parts
        ]

    def score(
        self, micro_batches: Sequence[Batch], *, adapters: Sequence[str | None] = (None,)
    ) -> ScoreResult:
        """Return the log-probability of each label token under each adapter, in evaluation mode.

        All of it is computed in one forward pass over the layers: the loads depend neither on the
        adapters nor on the micro-batches, whose hidden states are all on the device.

        Args:
            micro_batches: As for `forward_backward`; each row has a label.
            adapters: Names of the model's adapters; None for the model without them.

        Raises:
            UnsupportedModelError: As for `forward_backward`.
            OffloadError: A row has no label, the model has no such adapter or one is merged, or a
                micro-batch is invalid.
        """
        self._require_usable()
        batches = checked_batches(micro_batches, self._vocabulary)
        labelled = [with_labels(batch, self._device.torch_device) for batch in batches]
        passes = ScoredPasses(self._layered, batches, labelled, adapters)
        self._inspect([batch.inputs for batch in labelled], has_labels=True)
        self._bring_up_to_date()
        executor = self._bound.executor
        with self._pass(passes.num) as schedule:
            events = executor.score_each(schedule, passes)
        return ScoreResult(
            scores=passes.scores(),
            num_loads=schedule.num_loads,
            num_passes=passes.num,
            pass_s=measured(schedule, events).step_s,
        )

    @contextmanager
    def using(self, adapter: str) -> Iterator[None]:
        """Compute with one adapter in this context, whichever is active; nothing is retrained.

        `forward`, `evaluate` and forwards of the model compute with it. Which parameters train
        does not change, as it would by peft's `set_adapter`.

        Args:
            adapter: Its name.
        """
        executor = self._bound.executor
        before, executor.adapter = executor.adapter, adapter
        try:
            with self._switched(adapter).everywhere():
                yield
        finally:
            executor.adapter = before

    def _parts(self, runs: Sequence[RunStep], *, is_trained: bool) -> list[Part]:
        """Check what runs are given, and inspect the model as each computes it."""
        if is_trained:
            require_apart(self._layered, runs, are_on_host=bool(self._masters))
        where = self._vocabulary, self._device.torch_device
        parts = parts_of(
            self._layered, runs, *where, switched=self._switched, is_trained=is_trained
        )
        for part in parts:
            with nullcontext() if part.run.adapter is None else self.using(part.run.adapter):
                self._inspect([batch.inputs for batch in part.labelled], has_labels=True)
                self._measure(part.batches)
        return parts

    def forward(self, batch: Batch, *, positions: torch.Tensor | None = None) -> ForwardResult:
        """Run one batch without gradients, in the model's current mode (`train` or `eval`).

        Args:
            batch: As for `forward_backward`. With labels the loss is computed, else logits.
            positions: Without labels: for each row, the position to compute logits for, (B,).
        """
        batch = checked_batch(batch, self._vocabulary)
        torch_device = self._device.torch_device
        labels = with_labels(batch, torch_device) if "labels" in batch else None

        def logits(hidden_BTD: torch.Tensor) -> torch.Tensor:
            if positions is not None:
                rows = torch.arange(hidden_BTD.shape[0], device=hidden_BTD.device)
                hidden_BTD = hidden_BTD[rows, positions.to(torch_device)].unsqueeze(1)
            return self._layered.tail_logits(hidden_BTD)

        output, run, schedule = self._evaluate(batch, labels, logits)
        return ForwardResult(
            loss_sum=float(torch.stack(run.losses).sum()) if run.losses else 0.0,
            num_label_tokens=0 if labels is None else labels.num_label_tokens,
            logits=output,
            num_loads=schedule.num_loads,
        )

    def generation(self) -> Generation:
        """Begin to generate with the model's own key-value caches, as a context manager.

        It ends when a parameter that it computes with is written to: within `using` of an adapter,
        one of that adapter, or one that is no adapter's.
        """
        executor = self._bound.executor
        watched = used_by(self._layered, executor.adapter, self.resident_parameters.values())
        return Generation(
            self._layered,
            where=(self._vocabulary, self._device.torch_device),
            state=lambda: [executor.adapter, *map(num_writes, watched)],
            ready=partial(self._ready_pass, has_labels=False),
            compute=executor.compute,
        )

    def wait(self) -> None:
        """Wait until the device has finished all issued work."""
        self._device.finish()

    @property
    def resident_parameters(self) -> dict[str, nn.Parameter]:
        """Parameters that are not streamed, by name."""
        streamed = {id(field.parameter) for record in self._host.records for field in record.fields}
        named = self._model.named_parameters()
        return {name: p for name, p in named if id(p) not in streamed}

    @property
    def own_layers(self) -> dict[int, int]:
        """The layer of each parameter that one layer has alone, by the parameter's id."""
        return homes_of(self._layered.layers, self._layered.around)

    @property
    def arenas(self) -> tuple[Arena, ...]:
        """The memory held from step to step, without parameters that were not moved."""
        return (*self._host.arenas, *self._bound.places.arenas)

    @property
    def fused(self) -> tuple[Counter[str], ...]:
        """Of each layer, how many norms, rotations and gates are fused; empty if none is to be."""
        fused = self._layered.fused
        return () if fused is None else tuple(map(fused.counts, range(len(self._layered.layers))))

    @property
    def fuses_loss(self) -> bool:
        """Whether the loss is fused."""
        return self._layered.fuses_loss

    @property
    def unread(self) -> tuple[frozenset[str], ...]:
        """By layer, the linears whose products its recomputes leave out, as nothing reads them.

        They are found before the first step in the model's current mode.
        """
        found = self._bound.executor.allowed().unread
        layers = enumerate(self._layered.layers)
        return tuple(names_left_out(layer, found.get(index, ())) for index, layer in layers)

    @property
    def rows_together(self) -> frozenset[int]:
        """Layers that compute packed rows together; the others compute each row by itself.

        They are found before the first step with packed rows.
        """
        return self._layered.verdict.together

    @property
    def rows_joined(self) -> frozenset[int]:
        """Layers of `rows_together` whose attention takes all packed rows in one call."""
        return self._layered.verdict.together & self._layered.joined

    @property
    def weights(self) -> WeightInventory:
        """The model's weights by class, and the form in which each is stored."""
        return inventory_of(self._layered, self._host.records)

    def close(self) -> None:
        """End the lanes and unlock the memory, without another copy of the layers.

        Trained parameters stay as they are. The layers' frozen weights are in no parameter
        afterwards: reading one is an error until `detach` gives them back or the model is reloaded.
        """
        if self._state is _State.ATTACHED:
            self.updates.flush()
            self._state = _State.CLOSED
            self._guard.lift()
            self._seal.close()
            self._device.close()
            self._leave_lookups()
            self._host.close()

    def detach(self) -> None:
        """Give the layers' parameters memory of their own, on the device the model came from.

        Encoded weights come back as decoded. The layers take twice their memory until the engine
        is released. Works after `close` too if the layers were in memory.

        Raises:
            OffloadError: The engine was closed and its layers are on disk.
        """
        if self._state is _State.DETACHED:
            return
        if self._state is _State.CLOSED and not self._host.slab_bytes:
            raise OffloadError(
                "the engine was closed, and its layers are on disk",
                limit="they are read by an engine that is open",
                hint="load the model again; next time `engine.detach()`, not `engine.close()`",
            )
        self.updates.flush()
        self._guard.lift()
        self._device.close()
        with self._seal.opened():
            self._give_back()
        if self._state is _State.ATTACHED:
            self._host.close()
        self._seal.lift()
        self._state = _State.DETACHED

    def _shown(self, layer: int, field: Field) -> torch.Tensor | None:
        """Return a field's values as of the newest step, if they can be shown."""
        self.updates.flush()
        return self._host.shown(layer, field)

    def _leave_lookups(self) -> None:
        """Give lookups in an embedding on the host back to its own code."""
        if self._layered.embedding is not None:
            self._layered.embedding.let_go()

    def _give_back(self) -> None:
        """Undo the changes that attaching made to the model."""
        self._leave_lookups()
        self._host.give_back(self._home)
        placement.move_the_rest(self._layered, (), self._home)
        for module in self._checkpointing:
            placement.set_checkpointing(module, is_on=True)

    def _evaluate(
        self,
        batch: Batch,
        labels: LabelledBatch | None,
        read: Callable[[torch.Tensor], Any],
    ) -> tuple[Any, RunState, Schedule]:
        """Run a pass without gradients; return its output without labels, its losses with them."""
        rest = {name: value for name, value in batch.items() if name != "labels"}
        inputs = to_device(rest, self._device.torch_device)
        with self._ready_pass(inputs, 1, has_labels=labels is not None) as schedule:
            output, run = self._bound.executor.evaluate(schedule, inputs, labels, read)
        return output, run, schedule

    @contextmanager
    def _ready_pass(self, inputs: Batch, num: int, *, has_labels: bool) -> Iterator[Schedule]:
        """Check the model, and yield the schedule of a pass without gradients, to be run."""
        self._require_usable()
        self._inspect([inputs], has_labels=has_labels)
        self._bring_up_to_date()
        with self._pass(num) as schedule:
            yield schedule

    @contextmanager
    def _pass(self, num: int = 1) -> Iterator[Schedule]:
        schedule = forward_schedule(self._bound.sizes, ring=self._ring, num_micro_batches=num)
        with self._consistent(schedule.ring_after), self._host.nearby():
            yield schedule
            self._device.finish()

    def _answer(self, inputs: Mapping[str, Any], rest: Mapping[str, Any]) -> Any:
        """Answer a forward of the model: its own norm, head and loss on the streamed layers."""
        device = self._device.torch_device
        inputs = to_device(inputs, device)
        rest = {k: v.to(device) if torch.is_tensor(v) else v for k, v in rest.items()}
        output, _, _ = self._evaluate(
            inputs, None, lambda hidden_BTD: self._layered.output(hidden_BTD, **inputs, **rest)
        )
        return output

    def _bring_up_to_date(self) -> None:
        self.updates.flush()
        self._reload_what_was_written()

    def _reload_what_was_written(self) -> None:
        """Invalidate the slots if a user has written to layers through a `state_dict`."""
        if self._host.num_writes != self._num_writes:
            self._num_writes = self._host.num_writes
            self._ring = cold_ring(len(self._ring))

    def _inspect(self, batches: Sequence[Batch], *, has_labels: bool) -> None:
        """Check the model before its first pass, and wherever its verdict does not reach.

        Raises:
            UnsupportedModelError: It cannot be computed layer by layer.
        """
        verdict = check(
            self._layered,
            batches,
            adapter=self._bound.executor.adapter,
            has_labels=has_labels,
            computing=self._bound.computing,
            walk=self._walk,
        )
        if verdict.refusal is not None:
            raise verdict.refusal
        self._layered.verdict = verdict

    def _walk(self, visits: Table) -> None:
        """Pass over the layers once, as of `Executor.walk`."""
        self._bring_up_to_date()
        with self._pass() as schedule, unchanged(self._layered.around):
            self._bound.executor.walk(schedule, visits)

    def _measure(self, batches: Sequence[LabelledBatch]) -> None:
        """Find the size of graphs that are to be sent, for micro-batches larger than any before."""
        executor = self._bound.executor
        layers = self._options.residency.sent_graphs(len(self.layer_bytes))
        for batch in sorted(batches, key=lambda batch: -batch.inputs["input_ids"].numel()):
            known = executor.graph_sizes()
            if any(known.of(layer, batch.shape) is None for layer in layers):
                with self._pass() as schedule:
                    executor.measure(schedule, batch.inputs, layers)

    @contextmanager
    def _consistent(self, ring_after: Ring) -> Iterator[None]:
        """Open the parameters for a pass, and record what the ring holds; nothing if it fails."""
        with self._seal.opened():
            try:
                yield
            except BaseException:
                self._ring = cold_ring(len(self._ring))
                self._device.abort()
                raise
            finally:
                self._bound.places.host_gradients.let_go()
        self._ring = ring_after

    def _require_ready(self) -> None:
        """Check that a step would give all gradients of the model as attached."""
        self._require_usable()
        require_gradients()
        self._attached.require_unchanged()
        self._attached.require_exact()
        self._bound.places.host_gradients.require_clear()

    def _require_usable(self) -> None:
        if self._state is not _State.ATTACHED:
            raise OffloadError(
                f"the engine is {self._state.name.lower()}",
                limit="only an attached engine can run",
                hint="call `offload.attach(model, ...)` again",
            )
        require_uncached()
        self._seal.require_whole()

    # ---------------------------------------------------------------------------------- schedules

    def _schedule(self, parts: Sequence[Part], *, ring: Ring, order: Order) -> Schedule:
        """List the ops of a step given the ring's contents, and make room for what leaves.

        Args:
            parts: What its runs contribute.
            ring: What the slots hold.
            order: Order of the loops over layers and micro-batches.

        Raises:
            OffloadError: The order is not possible with weights that train on the host, or with an
                objective.
        """
        if order is not Order.LAYER_MAJOR and any(part.scoring is not None for part in parts):
            raise OffloadError(
                f"order is {order.value}, and the step has an objective",
                limit="its loss is taken over all rows, before the first backward",
                hint="`order=Order.LAYER_MAJOR`",
            )
        if order is not Order.LAYER_MAJOR and any(self._bound.sizes.gradient_bytes):
            raise OffloadError(
                f"order is {order.value} where weights of the layers train on the host",
                limit="their gradients leave a layer once per step",
                hint="`order=Order.LAYER_MAJOR`",
            )
        batches = [batch for part in parts for batch in part.batches]
        input_bytes = self._input_bytes(batches) if self._options.stash == "host" else ()
        saved = self._saved(parts)
        schedule = step_schedule(
            replace(
                self._bound.sizes,
                updated=self.updates.layers,
                reduced=tuple(p.run.reducer.reduced for p in parts if p.run.reducer is not None),
                row_bytes=self._row_bytes(parts),
            ),
            ring=ring,
            runs=[part.passes for part in parts],
            order=order,
            trains_front=self._trains_front,
            input_bytes=input_bytes,
            saved=saved,
        )
        if saved.leaving:
            self._bound.places.sent.prepare(
                by_place(saved.leaving, saved.sent_bytes),
                num_buffers=schedule.num_carriers,
            )
        if schedule.num_fetch_buffers:
            stashed = {op.layer_index for op in schedule.ops if op.kind is Kind.STASH}
            self._bound.places.stash.prepare(
                by_place(sorted(stashed), lambda _: input_bytes),
                num_buffers=schedule.num_fetch_buffers,
            )
        return schedule

    def _row_bytes(self, parts: Sequence[Part]) -> tuple[int, ...]:
        """Return what each pass brings of the embedding, with room for it; nothing if none does."""
        embedding = self._layered.embedding
        if embedding is None:
            return ()
        each = [(part, number) for part in parts for number in part.passes.all]
        return embedding.prepare({number: part.given_ids(number) for part, number in each})

    def _input_bytes(self, batches: Sequence[LabelledBatch]) -> tuple[int, ...]:
        """Return the size of a layer's input for each micro-batch."""
        token_bytes = self._layered.token_bytes
        return tuple(batch.inputs["input_ids"].numel() * token_bytes for batch in batches)

    def _saved(self, parts: Sequence[Part]) -> Saved:
        """Return what each layer saves."""
        residency = self._options.residency
        executor = self._bound.executor
        layers = range(len(self._bound.sizes.layer_bytes))
        if not (residency.sends or residency.has_outputs):
            return residency.saved(((),) * len(layers), ())
        outputs, graphs = [], []
        for layer in layers:
            sizes = [
                (executor.allowed(part.run.adapter).attention.get(layer, ()), part.batches)
                for part in parts
            ]
            is_recorded = all(calls for calls, _ in sizes)
            outputs.append(
                [
                    sum(call.num_bytes(*row) for call in calls for row in batch.rows)
                    for calls, batches in sizes
                    for batch in batches
                ]
                if is_recorded
                else []
            )
            graphs.append(
                [
                    executor.graph_sizes(part.run.adapter).of(layer, batch.shape) or 0
                    for part in parts
                    for batch in part.batches
                ]
            )
        return residency.saved(tuple(map(tuple, outputs)), tuple(map(tuple, graphs)))
