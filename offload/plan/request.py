"""The request: what a run asks of the planner."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from offload.errors import OffloadError
from offload.plan.facts.facts import ModelFacts
from offload.plan.facts.images import Images
from offload.plan.facts.linears import FP32_BYTES
from offload.plan.facts.trainable import layer_parameters, trained_parameters
from offload.plan.facts.workload import Workload
from offload.plan.machine.machine import Machine, Network, Rate
from offload.plan.memory.memory import TracedBytes
from offload.plan.schedule.op import Route
from offload.plan.schedule.schedule import Order, Passes, Reduced
from offload.plan.time.costs import Costs, Speed

HEAD_CHUNK_TOKENS = 1024  # logits of a 151,936 vocabulary in fp32: 0.6 GB at a time
MLP_CHUNKS = (8192, 2048, 512)  # tokens of an MLP's tile, where a whole micro-batch does not fit
FEWEST_CHUNK_TOKENS = 64  # fewer logits at a time save little, and each chunk reads the whole head


@dataclass(frozen=True, kw_only=True, slots=True)
class ObjectiveCost:
    """What a loss over a whole step adds to it: each row is scored before any is trained on."""

    has_reference: bool = False  # whether a reference scores all rows too
    # Rows that are only scored, for each row that is trained on; as long as these.
    scored_frac: float = 0.0
    # Tokens whose log-probabilities are taken at each label, at most; 0 for the label's own alone.
    num_top: int = 0
    is_tempered: bool = False  # whether the logits are divided by a temperature

    @property
    def num_references(self) -> float:
        """Passes of the reference, for each micro-batch that is trained on."""
        return (1 + self.scored_frac) * self.has_reference

    def passes(self, num_micro_batches: int) -> Passes:
        """Return the passes of a step."""
        return Passes(
            num_trained=num_micro_batches,
            num_scored=math.ceil(num_micro_batches * self.scored_frac),
            has_reference=self.has_reference,
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Reduction:
    """How the gradients of several ranks are added up."""

    element_bytes: int = FP32_BYTES  # bytes of a gradient's element on the network
    sends_update: bool = False  # whether the main rank's weights are sent to all after its update


@dataclass(frozen=True, kw_only=True, slots=True)
class Probe:
    """Steps of a head alone, on features: what the frozen layers give it, kept in host memory."""

    is_alone: bool = False  # whether all steps of the run are such, and none comes after them
    # Label tokens of all rows, each with a feature; None before rows are known.
    num_features: int | None = None
    # Passes over the layers that compute them, each of about the rows of a step; None before rows
    # are known.
    num_passes: int | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class PlanRequest:
    """What a run asks of the planner.

    Attributes:
        typical: The micro-batch that time is predicted for.
        largest: The largest micro-batch of the run, which must fit.
        num_micro_batches: Micro-batches per step.
        own_micro_batches: The micro-batches of the rank that is planned, where ranks are planned
            one by one; None plans the one that has most of equal shares.
        most_tokens: Tokens that no step exceeds; None for all that its micro-batches can have.
        num_slots: Layers on the device at a time; None takes as many as fit.
        num_kept_graphs: How many layers, the last ones, keep their graph from the forward to the
            backward, i.e. are not checkpointed; None takes as many as fit and pay.
        vram_budget_bytes: Device memory that the plan may use; None takes all of the machine's.
        num_workers: Data workers of each rank.
        is_stashed: Whether layer inputs are kept in host memory until the backward.
        is_on_disk: Whether the layers are stored in a file.
        num_ranks: Processes that share the step, each with its own device.
        most_local_ranks: The number of ranks on the machine that has most of them; None if all are
            on one.
        is_slab_shared: Whether they share one slab; otherwise each has one.
        traced: Memory of `largest` as a trace measured it; None counts it by formulas.
        is_masked: Whether the model gets a padding mask, so that masks are materialized.
        may_be_on_disk: Whether the layers could be stored in a file; random weights cannot.
        has_outputs: Whether outputs of attention are kept or sent where that pays, so that it is
            not computed again.
        has_sent_graphs: Whether graphs of layers are sent to host memory where that pays.
        objective: What the loss of the run adds to a step; None for a cross-entropy.
        reduction: How the ranks' gradients are added up.
        probe: Steps of the head before the first one; None if there are none.
        images: The images of its rows, as `with_images` sets them; None if they have none.
        is_sharded: Whether each rank holds a part of the model, which is gathered layer by layer,
            and nothing is streamed; see `offload.plan.sharded`.
        order: Whether all micro-batches of a step pass a layer before the next is used, or each
            passes all layers before the next micro-batch does.
        others: Further runs that share the step, each with an adapter of its own. What concerns the
            machine is as this request says: of theirs, only what `OF_A_RUN` names counts.
    """

    typical: Workload
    largest: Workload
    num_micro_batches: int
    num_slots: int | None
    num_kept_graphs: int | None
    vram_budget_bytes: int | None
    num_workers: int
    is_stashed: bool
    is_on_disk: bool
    num_ranks: int = 1
    is_slab_shared: bool = False
    traced: TracedBytes | None = None
    is_masked: bool = False
    may_be_on_disk: bool = False
    has_outputs: bool = False
    has_sent_graphs: bool = False
    most_tokens: int | None = None
    objective: ObjectiveCost | None = None
    order: Order = Order.LAYER_MAJOR
    others: tuple["PlanRequest", ...] = ()
    most_local_ranks: int | None = None
    reduction: Reduction = Reduction()
    own_micro_batches: int | None = None
    probe: Probe | None = None
    images: Images | None = None
    is_sharded: bool = False

    @property
    def runs(self) -> tuple["PlanRequest", ...]:
        """The request of each run of the step, as if it were alone."""
        if not self.others:
            return (self,)
        alone = replace(self, others=())
        return (alone, *(alone.with_run(other) for other in self.others))

    def with_run(self, run: "PlanRequest") -> "PlanRequest":
        """Return the request with what another says of its run."""
        return replace(self, **{name: getattr(run, name) for name in OF_A_RUN})

    @property
    def tokens_per_step(self) -> int:
        """Tokens of a typical step of all its runs, padding included."""
        return sum(run.typical.num_tokens * run.num_micro_batches for run in self.runs)

    def within(self, num_layers: int) -> "PlanRequest":
        """Return the same request with at most as many slots as the model has layers."""
        if self.num_slots is None or self.num_slots <= num_layers:
            return self
        return replace(self, num_slots=num_layers)

    @property
    def has_other_ranks(self) -> bool:
        """Whether several processes share the step, each with its own device."""
        return self.num_ranks > 1

    @property
    def local_ranks(self) -> int:
        """Processes that share the memory of one machine."""
        return self.most_local_ranks or self.num_ranks

    @property
    def num_slabs(self) -> int:
        """Slabs in a machine's memory."""
        if self.is_on_disk:
            return 0
        return 1 if self.is_slab_shared else self.local_ranks

    @property
    def num_disk_readers(self) -> int:
        """Processes that read the layers from disk."""
        return self.local_ranks if self.is_on_disk else 0

    @property
    def rank_micro_batches(self) -> int:
        """Micro-batches of the rank that is planned."""
        if self.own_micro_batches is not None:
            return self.own_micro_batches
        return -(-self.num_micro_batches // self.num_ranks)

    @property
    def tokens_per_rank_micro_batch(self) -> int:
        """Tokens of the whole step for each micro-batch of the rank that is planned."""
        if self.own_micro_batches is not None:  # in the proportions of the ranks' shares
            return self.tokens_per_step // self.own_micro_batches
        return self.typical.num_tokens * self.num_ranks

    @property
    def num_rounds(self) -> int:
        """How often a step passes all layers upwards and downwards."""
        return self.rank_micro_batches if self.order is Order.MICRO_BATCH_MAJOR else 1

    @property
    def round_micro_batches(self) -> int:
        """Micro-batches of the rank that a round takes through the layers together."""
        return self.rank_micro_batches // self.num_rounds

    @property
    def largest_micro_batches(self) -> float:
        """How many of the largest micro-batches hold all tokens of a rank's round."""
        num = self.round_micro_batches
        return (
            num
            if self.most_tokens is None
            else min(num, self.most_tokens / self.largest.num_tokens)
        )

    @property
    def extra_passes(self) -> float:
        """Passes that only score, for each micro-batch that is trained on."""
        cost = self.objective
        return 0.0 if cost is None else cost.scored_frac + cost.num_references

    def passes(self, num_micro_batches: int) -> Passes:
        """Return the passes of a step of so many micro-batches that are trained on."""
        if self.objective is None:
            return Passes(num_trained=num_micro_batches, has_objective=False)
        return self.objective.passes(num_micro_batches)

    @property
    def is_on_features(self) -> bool:
        """Whether all steps are of a head alone, and visit no layer."""
        return self.probe is not None and self.probe.is_alone

    def feature_bytes(self, hidden_size: int) -> int:
        """Return what a probe's features take in host memory; 0 before rows are known."""
        num = self.probe.num_features if self.probe is not None else None
        return (num or 0) * hidden_size * self.typical.dtype_bytes

    @property
    def num_stashed(self) -> int:
        """Micro-batches whose layer inputs a rank has in host memory."""
        return self.rank_micro_batches if self.is_stashed else 0


OF_A_RUN = (
    "typical",
    "largest",
    "num_micro_batches",
    "own_micro_batches",
    "num_workers",
    "traced",
    "is_masked",
    "most_tokens",
    "objective",
    "reduction",
    "probe",
    "images",
)
"""What each run of a shared step has of its own."""


def sharing(requests: Sequence[PlanRequest]) -> PlanRequest:
    """Return the request of a step that these runs share, with the first one's of the machine.

    Raises:
        OffloadError: Weights of the model train, which runs would share; or layers would wait or
            compute in two forms.
    """
    first, *others = requests
    for request in requests:
        typical = request.typical
        if others and typical.adapter.whole is not None:
            raise OffloadError(
                "weights of the model train, and runs are to share a step",
                limit="runs that share the layers share no weight that trains",
                hint="train an adapter in each, or one run at a time",
            )
        for what, own, wanted in (
            ("embedding", typical.embeddings, first.typical.embeddings),
            ("head", typical.head, first.typical.head),
        ):
            if own != wanted:
                raise OffloadError(
                    f"runs are to share a step, and one has its {what} on the {own}",
                    limit=f"the first has it on the {wanted}",
                    hint="the same place in all",
                )
        form = (typical.codec, typical.dtype_bytes, typical.head_chunk_tokens)
        if form != (
            first.typical.codec,
            first.typical.dtype_bytes,
            first.typical.head_chunk_tokens,
        ):
            raise OffloadError(
                f"runs are to share a step, and one has layers in {typical.codec} of"
                f" {typical.dtype_bytes} bytes and {typical.head_chunk_tokens} tokens per head"
                " chunk",
                limit=f"the first has {first.typical.codec}, {first.typical.dtype_bytes} and"
                f" {first.typical.head_chunk_tokens}",
                hint="the same codec, dtype and head chunk in all",
            )
    return replace(first, others=tuple(replace(other, others=()) for other in others))


def may_go_round(request: PlanRequest) -> bool:
    """Return whether each micro-batch of a step may pass all layers by itself.

    Not where a loss, or gradients that leave the device, are of the whole step; nor where runs or
    processes share it, or layer inputs wait in host memory, which has a place for each of a step.
    And not from a file, which each micro-batch would read again.
    """
    typical = request.typical
    is_alone = not (request.others or request.has_other_ranks)
    is_whole = typical.adapter.whole is not None or typical.has_router_loss
    is_whole |= request.objective is not None
    is_in_ram = not (request.is_stashed or request.is_on_disk)
    return is_alone and not is_whole and is_in_ram and request.rank_micro_batches > 1


def with_micro_batches(request: PlanRequest, factor: int) -> PlanRequest:
    """Return the same request with so many times the micro-batches in a step."""
    own = request.own_micro_batches
    return replace(
        request,
        num_micro_batches=factor * request.num_micro_batches,
        own_micro_batches=None if own is None else factor * own,
        others=tuple(with_micro_batches(other, factor) for other in request.others),
    )


def _with_larger_micro_batches(request: PlanRequest, factor: int) -> PlanRequest:
    """Return the step of one run in so many times fewer micro-batches, each so many times larger.

    Micro-batches that are fewer than the factor are as many, and then the step has more tokens.
    """
    own, num = request.own_micro_batches, request.num_micro_batches
    return replace(
        request,
        typical=_larger(request.typical, factor),
        largest=_larger(request.largest, factor),
        num_micro_batches=num // factor or num,
        own_micro_batches=None if own is None else own // factor or own,
        traced=None,
    )


def in_half(request: PlanRequest) -> list[PlanRequest]:
    """Return a step of half the micro-batches, whose inputs leave room for more; none if odd."""
    is_shared = bool(request.others) or request.own_micro_batches is not None
    half, rest = divmod(request.num_micro_batches, 2 * request.num_ranks)
    if is_shared or rest or not half or request.is_on_features:
        return []
    return [replace(request, num_micro_batches=half * request.num_ranks)]


def in_larger_micro_batches(request: PlanRequest) -> list[PlanRequest]:
    """Return the same step, or twice its tokens, in each smaller number of micro-batches."""
    num, own = request.num_micro_batches, request.own_micro_batches or 0
    most = own or num // request.num_ranks
    cuts = [n for n in range(2, most + 1) if num % n == 0 and own % n == 0]
    return [_with_larger_micro_batches(request, n) for n in cuts or [2] * (num == 1)]


def over_fewer_ranks(request: PlanRequest) -> dict[int, PlanRequest]:
    """Return the step of equal shares over each smaller number of ranks, the largest first."""
    if request.own_micro_batches is not None:  # with fewer ranks its share would be another
        return {}
    return {n: replace(request, num_ranks=n) for n in range(request.num_ranks - 1, 0, -1)}


def over_cards(request: PlanRequest, num_cards: int) -> PlanRequest:
    """Return the step shared by a rank on each card of one machine, which share one slab."""
    return replace(request, num_ranks=num_cards, is_slab_shared=True)


def in_fewer_micro_batches(request: PlanRequest) -> Iterator[PlanRequest]:
    """Yield the step with half the micro-batches, a quarter, ..., at least one for each rank."""
    while request.own_micro_batches is None and request.num_micro_batches // 2 >= request.num_ranks:
        request = replace(request, num_micro_batches=request.num_micro_batches // 2)
        yield request


def _larger(workload: Workload, factor: int) -> Workload:
    packed = workload.packed_tokens
    return replace(
        workload,
        micro_batch_size=factor * workload.micro_batch_size,
        label_tokens=factor * workload.label_tokens,
        packed_tokens=None if packed is None else factor * packed,
    )


def with_workload(request: PlanRequest, **changes: Any) -> PlanRequest:
    """Return the same request with other settings of all its micro-batches."""
    return replace(
        request,
        typical=replace(request.typical, **changes),
        largest=replace(request.largest, **changes),
        others=tuple(with_workload(other, **changes) for other in request.others),
    )


def with_images(request: PlanRequest, images: Images) -> PlanRequest:
    """Return the same request for rows with these images."""
    return replace(with_workload(request, has_images=True), images=images)


# Until a launch measures them. Between machines 1 Gb/s Ethernet, of which TCP leaves 0.94.
ETHERNET = Rate(value=0.94e9 / 8, source="assumed: 1 Gb/s Ethernet")
NETWORK_LATENCY = Rate(value=1e-3, source="assumed")


def reduced_of(facts: ModelFacts, request: PlanRequest) -> tuple[Reduced, ...]:
    """Return what of each run's gradients is added up over ranks; nothing with a single rank.

    Weights that train in parts are summed part by part; see `offload.plan.sharded`.
    """
    is_in_parts = request.is_sharded and request.typical.adapter.whole is not None
    if not request.has_other_ranks or is_in_parts:
        return ()
    return tuple(_reduced(facts, run) for run in request.runs)


def _reduced(facts: ModelFacts, run: PlanRequest) -> Reduced:
    spec = run.typical.adapter
    layers = layer_parameters(facts, spec)
    return Reduced.of(
        layers,
        trained_parameters(facts, spec) - sum(layers),
        element_bytes=run.reduction.element_bytes,
        world_size=run.num_ranks,
    )


def network_of(machine: Machine, request: PlanRequest) -> Network:
    """Return what connects the ranks: as measured, or assumed.

    On one machine they exchange through host memory, at the rate of its copies to a device.
    """
    if machine.network is not None:
        return machine.network
    is_one_machine = request.local_ranks == request.num_ranks
    copies = machine.h2d_duplex_bytes_per_s
    return Network(
        world_size=request.num_ranks,
        latency_s=NETWORK_LATENCY,
        bytes_per_s=replace(copies, source=f"assumed: a copy, {copies.source}")
        if is_one_machine
        else ETHERNET,
    )


def with_network(costs: Costs, facts: ModelFacts, machine: Machine, request: PlanRequest) -> Costs:
    """Return the costs of a step whose ranks add up their gradients.

    An update that is sent to all is part of the update's time: nothing is computed meanwhile.
    Weights that train on the host are updated there, whatever the cards, and not sent.
    """
    if not request.has_other_ranks:
        return costs
    sends_update = request.reduction.sends_update and request.typical.adapter.whole is None
    network = network_of(machine, request)
    latency_s, bytes_per_s = network.latency_s.value, network.bytes_per_s.value
    return replace(
        costs.at({Route.NETWORK: Speed(bytes_per_s, latency_s)}),
        optimizer_s=costs.optimizer_s
        + (latency_s + update_bytes(facts, request) / bytes_per_s) * sends_update,
    )


def update_bytes(facts: ModelFacts, request: PlanRequest) -> int:
    """Return what the main rank sends of an update, in as many rounds as reach all ranks."""
    num_rounds = (request.num_ranks - 1).bit_length()
    return num_rounds * FP32_BYTES * trained_parameters(facts, request.typical.adapter)
