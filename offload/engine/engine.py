"""The library door: attach a model, run steps on it, detach it."""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from enum import Enum, auto
from functools import partial
from typing import Any
from warnings import warn

import torch
from torch import nn

from offload.engine.batch import (
    Batch,
    LabelledBatch,
    checked_batch,
    checked_batches,
    checked_scored,
    require_an_id_each,
    require_divisor,
    require_labels,
    rows_of_labels,
    to_device,
    with_labels,
)
from offload.engine.bound import EngineOptions, bind
from offload.engine.host.layer_layout import Field
from offload.engine.host.store import Backing
from offload.engine.host.weights import HostWeights
from offload.engine.host_gradients import LateUpdates
from offload.engine.memory_meter import Arena
from offload.engine.model import placement
from offload.engine.model.composition import Composition
from offload.engine.model.encoding import Encoding
from offload.engine.model.gradient_hooks import GradientHooks
from offload.engine.model.guard import Guard
from offload.engine.model.hooks import all_hooks, is_same_code
from offload.engine.model.inventory import inventory_of
from offload.engine.model.layers import LayeredModel, unchanged
from offload.engine.model.router import STEP, RouterScope
from offload.engine.model.seal import Seal, require_unattached
from offload.engine.model.vocabulary import vocabulary_of
from offload.engine.modes import (
    require_gradients,
    require_no_inference_mode,
    require_uncached,
)
from offload.engine.objective import Objective
from offload.engine.passes.scoring import Scoring
from offload.engine.recompute.tiled import TiledMlp, require_tiles
from offload.engine.recompute.unread import Unread
from offload.engine.results import EvaluationResult, ForwardResult, PassState, StepResult
from offload.engine.seeding import NEWEST, Seeding
from offload.engine.steps import Steps
from offload.engine.streams import Device, open_device
from offload.errors import OffloadError
from offload.plan.facts.weights import WeightInventory
from offload.plan.schedule.schedule import (
    Order,
    Ring,
    Schedule,
    cold_ring,
    forward_schedule,
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
        )
        if isinstance(device, torch.device):
            device = open_device(
                device,
                is_staged=self._host.is_staged or options.trained_weights == "host",
                prepare_thread=self._host.prepare_thread,
            )
        self._device = device
        self._checkpointing = placement.switch_off_checkpointing(model)
        self._state = _State.ATTACHED
        self._inspected: set[tuple[bool, bool, frozenset[str]]] = set()
        self._inspected_code: list[Any] = []
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
        self.slot_bytes = self._bound.slot_bytes
        self._ring = cold_ring(options.num_slots)
        self._num_writes = self._host.num_writes
        self._composition = Composition(model, self._layered.model.config)
        self._hooks = GradientHooks(model, self._layered, self._bound.host_gradients.parameters)
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
            self._composition.require_unchanged()
            self.updates.flush()
        return {
            name: self._bound.host_gradients.parameters.get(name, parameter)
            for name, parameter in self._model.named_parameters()
            if parameter.requires_grad
        }

    @property
    def updates(self) -> LateUpdates:
        """Updates of weights on the host that are made in the next step, while others compute.

        They are made before someone reads weights: by `forward`, `trained_parameters`,
        `state_dict`, `detach`, `close`.
        """
        return self._bound.updates

    @property
    def resident_parameters(self) -> dict[str, nn.Parameter]:
        """Parameters that are not streamed, by name."""
        streamed = {id(field.parameter) for record in self._host.records for field in record.fields}
        named = self._model.named_parameters()
        return {name: p for name, p in named if id(p) not in streamed}

    @property
    def arenas(self) -> tuple[Arena, ...]:
        """The memory held from step to step, without parameters that were not moved."""
        return (
            *self._host.arenas,
            *self._bound.slot_arenas,
            *self._bound.host_gradients.arenas,
            self._bound.stash.arena,
            self._bound.sent.arena,
        )

    @property
    def fused(self) -> tuple[Counter[str], ...]:
        """Of each layer, how many norms, rotations and gates are fused; empty if none is to be."""
        fused = self._layered.fused
        return () if fused is None else tuple(map(fused.counts, range(len(self._layered.layers))))

    @property
    def unread(self) -> tuple[frozenset[str], ...]:
        """By layer, the linears whose products its recomputes leave out, as nothing reads them.

        They are found before the first step in the model's current mode.
        """
        found = self._bound.executor.unread
        return tuple(
            frozenset(
                name
                for name, module in layer.named_modules()
                if any(module is one for one in _left_out(found.get(index, ())))
            )
            for index, layer in enumerate(self._layered.layers)
        )

    @property
    def rows_together(self) -> frozenset[int]:
        """Layers that compute packed rows together; the others compute each row by itself.

        They are found before the first step with packed rows.
        """
        return frozenset(self._layered.together)

    @property
    def weights(self) -> WeightInventory:
        """The model's weights by class, and the form in which each is stored."""
        return inventory_of(self._layered, self._host.records)

    @property
    def stock(self) -> WeightInventory:
        """The same as `weights`, by its earlier name."""
        warn("`Engine.stock` is now `Engine.weights`", DeprecationWarning, stacklevel=2)
        return self.weights

    def forward_backward(  # noqa: PLR0913 - all that a step is
        self,
        micro_batches: Sequence[Batch],
        *,
        objective: Objective | None = None,
        scored: Sequence[Batch] = (),
        dropout_seed: int | None = None,
        seeding: Seeding = NEWEST,
        num_label_tokens: int | None = None,
        micro_batch_ids: Sequence[int] | None = None,
        order: Order = Order.LAYER_MAJOR,
        router_loss: RouterScope = STEP,
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
            objective: The loss of the whole step; None for the cross-entropy.
            scored: Micro-batches that the objective's loss reads and does not train on.
            dropout_seed: Seeds dropout; None draws one from torch's generator.
            seeding: How seed, layer and micro-batch become a generator's seed.
            num_label_tokens: Divisor of the sum of the losses; None counts the label tokens of
                the micro-batches. If several processes share a step, pass their total. An
                objective divides as it defines, and only a router loss counts by it.
            micro_batch_ids: Number of each micro-batch in the whole step, so that its dropout does
                not depend on the process that computes it; None numbers them from 0.
            order: Layer-major, or micro-batch-major as a baseline.
            router_loss: What a mixture's router loss is taken over, if its config asks for one.

        Raises:
            UnsupportedModelError: The model passes a layer something that could carry state; no
                gradient was touched.
            OffloadError: No token has a label (with an objective: a row has none), the model has no
                such reference, a micro-batch is invalid, gradients are disabled,
                the model changed since it was attached, a hook would receive partial gradients, or
                the engine is detached; no gradient was touched.
            TransferError: A copy failed; gradients may be partial and the caller should zero them.
        """
        self._require_ready()
        batches = checked_batches(micro_batches, self._vocabulary)
        further = checked_scored(scored, self._vocabulary, has_objective=objective is not None)
        require_divisor(num_label_tokens)
        ids = range(len(batches)) if micro_batch_ids is None else tuple(micro_batch_ids)
        require_an_id_each(len(ids), len(batches))
        labelled, further_labelled = self._labelled(batches), self._labelled(further)
        if num_label_tokens is None:
            num_label_tokens = sum(batch.num_label_tokens for batch in labelled)
        require_labels(num_label_tokens, len(labelled))
        scoring = None
        if objective is not None:
            scoring = Scoring.of(
                self._layered,
                objective,
                rows_of_labels([*batches, *further]),
                [*labelled, *further_labelled],
                num_trained=len(labelled),
                num_label_tokens=num_label_tokens,
            )
        if dropout_seed is None:
            dropout_seed = int(torch.randint(2**31, ()).item())
        self._inspect_each([*labelled, *further_labelled])
        self._measure(labelled)
        self._reload_what_was_written()
        passes = None if scoring is None else scoring.passes
        schedule = self._steps.schedule(labelled, ring=self._ring, order=order, passes=passes)
        executor = self._bound.executor
        run = partial(executor.train, schedule, labelled, num_label_tokens=num_label_tokens)
        if scoring is not None:
            run = partial(executor.score, schedule, scoring)
        with self._consistent(schedule.ring_after), self._host.nearby():
            state, events = run(
                seed=dropout_seed,
                seeding=seeding,
                is_stashed=self._options.stash == "host",
                ids=ids,
                router_loss=router_loss,
            )
            if self._bound.host_gradients.parameters:
                self._device.finish()
                self._bound.host_gradients.publish()
        return StepResult(
            executor=self._bound.executor,
            device=self._device,
            schedule=schedule,
            state=state,
            events=events,
            num_label_tokens=num_label_tokens,
        )

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
        self._require_attached()
        require_uncached()
        self._seal.require_whole()
        batches = [
            *checked_batches(micro_batches, self._vocabulary),
            *checked_scored(scored, self._vocabulary, has_objective=True),
        ]
        labelled = self._labelled(batches)
        num_label_tokens = sum(batch.num_label_tokens for batch in labelled)
        scoring = Scoring.of(
            self._layered,
            objective,
            rows_of_labels(batches),
            labelled,
            num_trained=0,
            num_label_tokens=num_label_tokens,
        )
        self._inspect_each(labelled)
        self.updates.flush()
        self._reload_what_was_written()
        order = Order.LAYER_MAJOR
        schedule = self._steps.schedule([], ring=self._ring, order=order, passes=scoring.passes)
        with (
            self._consistent(schedule.ring_after),
            self._host.nearby(),
            torch.inference_mode(mode=False),
            torch.no_grad(),
        ):
            state, _ = self._bound.executor.score(
                schedule, scoring, seed=0, seeding=NEWEST, is_stashed=False, ids=()
            )
            self._device.finish()
        return EvaluationResult(
            loss=float(state.losses[0]),
            metrics={name: float(value) for name, value in state.metrics.items()},
            num_label_tokens=num_label_tokens,
            num_loads=schedule.num_loads,
        )

    def _inspect_each(self, batches: Sequence[LabelledBatch]) -> None:
        for inputs in {frozenset(batch.inputs): batch.inputs for batch in batches}.values():
            self._inspect(inputs, has_labels=True)

    def _labelled(self, batches: Sequence[Batch]) -> list[LabelledBatch]:
        return [with_labels(batch, self._device.torch_device) for batch in batches]

    def forward(self, batch: Batch, *, positions: torch.Tensor | None = None) -> ForwardResult:
        """Run one batch without gradients, in the model's current mode (`train` or `eval`).

        Args:
            batch: As for `forward_backward`. With labels the loss is computed, else logits.
            positions: Without labels: for each row, the position to compute logits for, (B,).
        """
        batch = checked_batch(batch, self._vocabulary)
        torch_device = self._device.torch_device
        labels = [with_labels(batch, torch_device)] if "labels" in batch else []

        def logits(hidden_BTD: torch.Tensor) -> torch.Tensor:
            if positions is not None:
                rows = torch.arange(hidden_BTD.shape[0], device=hidden_BTD.device)
                hidden_BTD = hidden_BTD[rows, positions.to(torch_device)].unsqueeze(1)
            return self._layered.tail_logits(hidden_BTD)

        state, schedule = self._evaluate(batch, labels, logits)
        return ForwardResult(
            loss_sum=float(torch.stack(state.losses).sum()) if state.losses else 0.0,
            num_label_tokens=sum(batch.num_label_tokens for batch in labels),
            logits=state.outputs.get(0),
            num_loads=schedule.num_loads,
        )

    def wait(self) -> None:
        """Wait until the device has finished all issued work."""
        self._device.finish()

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

    def _give_back(self) -> None:
        """Undo the changes that attaching made to the model."""
        self._host.give_back(self._home)
        placement.move_the_rest(self._layered, (), self._home)
        for module in self._checkpointing:
            placement.set_checkpointing(module, is_on=True)

    def _evaluate(
        self,
        batch: Batch,
        labels: Sequence[LabelledBatch],
        read: Callable[[torch.Tensor], Any],
    ) -> tuple[PassState, Schedule]:
        """Run a pass without gradients."""
        self._require_attached()
        require_uncached()
        self._seal.require_whole()
        rest = {name: value for name, value in batch.items() if name != "labels"}
        inputs = to_device(rest, self._device.torch_device)
        self._inspect(inputs, has_labels=bool(labels))
        self.updates.flush()
        self._reload_what_was_written()
        schedule = forward_schedule(self._bound.sizes, ring=self._ring, num_micro_batches=1)
        with self._consistent(schedule.ring_after), self._host.nearby():
            state, _ = self._bound.executor.evaluate(schedule, [inputs], labels, read)
            self._device.finish()
        return state, schedule

    def _answer(self, inputs: Mapping[str, Any], rest: Mapping[str, Any]) -> Any:
        """Answer a forward of the model: its own norm, head and loss on the streamed layers."""
        device = self._device.torch_device
        inputs = to_device(inputs, device)
        rest = {k: v.to(device) if torch.is_tensor(v) else v for k, v in rest.items()}
        state, _ = self._evaluate(
            inputs, (), lambda hidden_BTD: self._layered.output(hidden_BTD, **inputs, **rest)
        )
        return state.outputs[0]

    def _reload_what_was_written(self) -> None:
        """Invalidate the slots if a user has written to layers through a `state_dict`."""
        if self._host.num_writes != self._num_writes:
            self._num_writes = self._host.num_writes
            self._ring = cold_ring(len(self._ring))

    def _inspect(self, inputs: Batch, *, has_labels: bool) -> None:
        """Inspect the model before the first pass, in a pass over the layers.

        It is inspected once per mode and set of inputs, and again after its code changed.
        """
        code = all_hooks(self._layered.whole, self._layered.around)
        if not is_same_code(code, self._inspected_code):
            self._inspected.clear()
            self._inspected_code = code
        mode, names = self._layered.model.training, frozenset(inputs)
        if self._inspected & {(mode, True, names), (mode, has_labels, names)}:
            return
        self.updates.flush()
        self._reload_what_was_written()
        schedule = forward_schedule(self._bound.sizes, ring=self._ring, num_micro_batches=1)
        with (
            self._consistent(schedule.ring_after),
            self._host.nearby(),
            unchanged(self._layered.around),
        ):
            is_whole = self._bound.executor.inspect(schedule, inputs, has_labels=has_labels)
            self._device.finish()
        require_tiles(
            self._layered.name, self._options.mlp_chunk_tokens, self._bound.executor.mlps.values()
        )
        if is_whole:
            self._inspected.add((mode, has_labels, names))

    @property
    def _steps(self) -> Steps:
        return Steps(self._layered, self._bound, self._options, trains_front=self._trains_front)

    def _measure(self, batches: Sequence[LabelledBatch]) -> None:
        """Find the size of graphs that are to be sent, for micro-batches larger than any before."""
        executor = self._bound.executor
        layers = self._options.residency.sent_graphs(len(self.layer_bytes))
        for batch in sorted(batches, key=lambda batch: -batch.inputs["input_ids"].numel()):
            shape = batch.shape
            if all(executor.graph_sizes.of(layer, shape) is not None for layer in layers):
                continue
            schedule = forward_schedule(self._bound.sizes, ring=self._ring, num_micro_batches=1)
            with self._consistent(schedule.ring_after), self._host.nearby():
                executor.measure(schedule, batch.inputs, layers)
                self._device.finish()

    @contextmanager
    def _consistent(self, ring_after: Ring) -> Iterator[None]:
        """Open the parameters for a pass, and record what the ring holds afterwards.

        If the pass fails, the ring's contents are unknown.
        """
        with self._seal.opened():
            try:
                yield
            except BaseException:
                self._ring = cold_ring(len(self._ring))
                self._device.abort()
                raise
            finally:
                self._bound.host_gradients.let_go()
        self._ring = ring_after

    def _require_ready(self) -> None:
        """Check that a step would give all gradients of the model as attached."""
        self._require_attached()
        require_gradients()
        require_uncached()
        self._composition.require_unchanged()
        self._hooks.require_exact()
        self._seal.require_whole()
        self._bound.host_gradients.require_clear()

    def _require_attached(self) -> None:
        if self._state is not _State.ATTACHED:
            raise OffloadError(
                f"the engine is {self._state.name.lower()}",
                limit="only an attached engine can run",
                hint="call `offload.attach(model, ...)` again",
            )


def _left_out(unread: Sequence[Unread]) -> Iterator[object]:
    """Yield the linears that are left out; of an MLP in tiles, those that its tiles leave out."""
    for one in unread:
        if isinstance(one.module, TiledMlp):
            yield from (inner.module for inner in one.module.unread)
        else:
            yield one.module
