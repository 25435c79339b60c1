"""The plan of a server: what its clients take, what is left for answers, and what sharing gains.

Problem. The engine is attached once, and clients come and go. So what they take at most is counted
before: an adapter, its gradients and AdamW's states for each that trains, an adapter for each that
is frozen, keys and values of answers. Slots get what these leave.

Idea. A pass to train is a step that runs share, one for each client, as in sweeps: a row is a
micro-batch by itself. `offload.plan.plan` plans it on a device that is smaller by what it does not
know of: frozen adapters, caches, and adapters on the output head, which are in no layer.

Passes. A request is computed in passes of at most so many tokens of a client, the same for all
requests, so that what a client gets does not depend on others. More tokens in a pass share its
loads, but take the place of slots, and answers wait meanwhile. So of the forms of the layers and
the sizes of passes that fit, those count that are about the fastest, in the geometric mean of
training and sampling, and of these the smallest pass is taken.

Keys and values. A scheduler admits answers by their tokens, so caches are planned by the token.
With a window a layer keeps fewer, but after a prompt all of its tokens. What a layer keeps of a row
whatever its length, as a delta rule does, counts as so many tokens (`ServePlan.state_tokens`).

Left out of times: the pass over an answer's prompt, arithmetic of the head's adapters, and the
checks of first passes. Rates of training are as if nothing was sampled, and those of sampling as if
nothing trained.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from finetune.errors import ConfigError
from finetune.planning.request import full_request, with_backend
from finetune.planning.subject import Subject
from finetune.report.format import shown_gib
from finetune.report.rows import Part, Row, Table, tables
from offload.errors import DoesNotFitError, UnsupportedModelError
from offload.plan.facts.facts import AdapterSpec, ModelFacts, linear_names
from offload.plan.facts.linears import FP32_BYTES, DeltaAttention, SoftmaxAttention
from offload.plan.facts.trainable import adapter_parameters
from offload.plan.fit import MemoryNeeds, fits
from offload.plan.machine.machine import Machine
from offload.plan.memory.memory import (
    FRAGMENTATION,
    FRAGMENTATION_FRAC,
    MemoryTerm,
    layer_cache_bytes,
    total_bytes,
)
from offload.plan.plan import Plan, plan
from offload.plan.refusal import refusal
from offload.plan.request import ObjectiveCost, PlanRequest
from offload.plan.sampling import Limit, plan_pass

PASS_ROWS = (1, 2, 4, 8)
"""Rows of full length that a client may have in a pass, to choose from."""
SLOWER_FRAC = 0.05
"""What may be lost for a smaller pass."""
CACHED_FRAC = 1 / 8
"""Of device memory: for keys and values, where it is not said how many tokens."""
MOST_ANSWERS = 16
"""Answers of a client that are sampled at a time in the rates, if they fit."""
NUM_STATES = 2
"""AdamW's, for each weight."""
NUM_SNAPSHOTS = 4
"""Copies of a client's adapter to sample from, the newest ones, on the host."""
LEAST_ROW_TOKENS = 128
"""Of rows that a refusal names."""
FLAGS = {
    "cached_tokens": "--cached-tokens",
    "num_samplers": "--samplers",
    "num_clients": "--clients",
    "max_rank": "--rank",
    "row_tokens": "--row-tokens",
}
"""What sets each part of a capacity, in the order in which a refusal makes them smaller."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Capacity:
    """What is served at most."""

    num_clients: int  # clients that train at a time, each with an adapter, gradients and AdamW
    num_samplers: int  # frozen adapters on the device at a time
    max_rank: int  # rank of an adapter
    row_tokens: int  # tokens of the longest row, and of the longest prompt with its answer
    # Tokens whose keys and values are on the device at a time; None for an eighth of its memory.
    cached_tokens: int | None


@dataclass(frozen=True, kw_only=True, slots=True)
class Answers:
    """A pass for a token of each answer, when half of its tokens are there."""

    num_groups: int  # requests that are answered at once, each a group by itself
    num_rows: int  # answers of each
    seconds: float  # predicted seconds
    num_loads: int  # layers that it copies to the device
    limited_by: Limit  # what most of its time goes to

    @property
    def num_answers(self) -> int:
        """Answers of all."""
        return self.num_groups * self.num_rows

    @property
    def tokens_per_s(self) -> float:
        """Tokens of all answers in a second."""
        return self.num_answers / self.seconds


@dataclass(frozen=True, kw_only=True, slots=True)
class Rate:
    """What so many clients give and take together, next to one alone."""

    num_clients: int  # clients that train, or sample, at once
    train_s: float  # seconds of a pass to train with as many tokens of each as it may have
    train_loads: int  # layers that it copies to the device
    trained_tokens_per_s: float  # of all clients
    gain: float  # how often the tokens per second of one client
    slowdown: float  # how often the seconds that a client's pass takes alone
    sampled: Answers  # of requests for one answer each
    grouped: Answers  # of requests for several answers to a prompt


@dataclass(frozen=True, kw_only=True, slots=True)
class ServePlan:
    """How a base is attached for clients, and what they get."""

    subject: Subject
    machine: Machine
    capacity: Capacity  # with `cached_tokens` settled
    # A pass of all clients, each with as many tokens as it may have, in rows of half the length.
    plan: Plan
    reserved: tuple[MemoryTerm, ...]  # device memory that the pass does not know of
    rates: tuple[Rate, ...]  # with 1, 2, 4, ... clients, and with all

    @property
    def pass_tokens(self) -> int:
        """Tokens of a client in a pass at most; longer requests take several passes."""
        tokens = self.plan.request.most_tokens
        assert tokens is not None
        return tokens

    @property
    def state_tokens(self) -> int:
        """Tokens that an answer counts for in addition to its own, in `Capacity.cached_tokens`."""
        return _state_tokens(self.subject.facts, _dtype_bytes(self.subject))

    @property
    def device_memory(self) -> tuple[MemoryTerm, ...]:
        """Terms of the peak in device memory."""
        return (*self.plan.device_memory, *self.reserved)

    @property
    def peak_bytes(self) -> int:
        """Predicted peak of device memory."""
        return total_bytes(self.device_memory)

    @property
    def limit_bytes(self) -> int:
        """Device memory that may be used."""
        return limit_bytes(self.subject, self.machine)

    @property
    def cached_bytes(self) -> int:
        """What keys and values take at most."""
        return cached_bytes(self.subject, self.capacity)

    @property
    def client_bytes(self) -> int:
        """What the largest adapter takes that trains: values, gradients, AdamW's states."""
        return (2 + NUM_STATES) * self.adapter_bytes

    @property
    def adapter_bytes(self) -> int:
        """What the values of the largest adapter take."""
        return FP32_BYTES * adapter_weights(self.subject.facts, self.capacity.max_rank)

    @property
    def host_bytes(self) -> int:
        """Predicted host memory."""
        return self.plan.host_bytes + _snapshot_bytes(self.subject.facts, self.capacity)

    @property
    def checkpoint_bytes(self) -> int:
        """What the state of a client takes on disk: values and AdamW's states."""
        return (1 + NUM_STATES) * self.adapter_bytes


def plan_serving(subject: Subject, machine: Machine, capacity: Capacity) -> ServePlan:
    """Choose the form of the layers, the size of passes and the slots.

    Args:
        subject: The base; of its recipe what concerns the model and where its layers wait counts.
        machine: Machine that serves.
        capacity: The most that is served.

    Raises:
        ConfigError: The capacity is not possible, whatever the machine.
        DoesNotFitError: It does not fit; the error names the nearest that does.
        UnsupportedModelError: It is not known what the model keeps of a token.
    """
    _require_possible(subject, capacity)
    machine = with_backend(subject.recipe, subject.facts, machine)
    found = [draft for draft in _drafts(subject, machine, capacity) if draft.fits]
    if not found:
        raise _too_large(subject, machine, capacity)
    enough = (1 - SLOWER_FRAC) * max(draft.worth for draft in found)
    chosen = next(draft for draft in found if draft.worth >= enough)
    return ServePlan(
        subject=subject,
        machine=machine,
        capacity=chosen.capacity,
        plan=replace(chosen.plan, machine=machine),
        reserved=chosen.reserved,
        rates=tuple(map(chosen.rate, _powers(capacity.num_clients))),
    )


# ---------------------------------------------------------------------------------------------
# What clients take


def adapter_weights(facts: ModelFacts, rank: int) -> int:
    """Count the weights of an adapter on all linears of the layers and on the output head."""
    return adapter_parameters(facts, _spec(facts, rank)) + _head_weights(facts, rank)


def _head_weights(facts: ModelFacts, rank: int) -> int:
    return rank * (facts.hidden_size + facts.num_outputs)


def _spec(facts: ModelFacts, rank: int) -> AdapterSpec:
    return AdapterSpec(rank=rank, targets=linear_names(facts), experts=False, is_in_base_dtype=True)


def _snapshot_bytes(facts: ModelFacts, capacity: Capacity) -> int:
    num = NUM_SNAPSHOTS * capacity.num_clients
    return num * FP32_BYTES * adapter_weights(facts, capacity.max_rank)


def limit_bytes(subject: Subject, machine: Machine) -> int:
    """Return the device memory that may be used."""
    budget = subject.recipe.offload.vram_budget_bytes
    return machine.vram_bytes if budget is None else min(budget, machine.vram_bytes)


def cached_bytes(subject: Subject, capacity: Capacity) -> int:
    """Return what the keys and values of a capacity take that is settled."""
    assert capacity.cached_tokens is not None
    return capacity.cached_tokens * _token_bytes(subject.facts, _dtype_bytes(subject))


def settled(subject: Subject, machine: Machine, capacity: Capacity) -> Capacity:
    """Return a capacity with the tokens whose keys and values are on the device."""
    if capacity.cached_tokens is not None:
        return capacity
    token_bytes = _token_bytes(subject.facts, _dtype_bytes(subject))
    num_tokens = int(CACHED_FRAC * limit_bytes(subject, machine)) // token_bytes
    return replace(capacity, cached_tokens=max(num_tokens, _least_cached(subject, capacity)))


def _least_cached(subject: Subject, capacity: Capacity) -> int:
    """Return the tokens that one answer counts for."""
    return capacity.row_tokens + _state_tokens(subject.facts, _dtype_bytes(subject))


def _dtype_bytes(subject: Subject) -> int:
    return full_request(subject.recipe, subject.facts).typical.dtype_bytes


def _token_bytes(facts: ModelFacts, dtype_bytes: int) -> int:
    """Return the bytes of the keys and values of a token at most.

    Of latent attention some models keep what keys and values are computed from, which is less.

    Raises:
        UnsupportedModelError: A layer keeps something else, of which this is not known.
    """
    found = 0
    for layer in facts.layers:
        kind = layer.attention
        if isinstance(kind, SoftmaxAttention):
            plain = replace(kind, is_latent=False)
            found += layer_cache_bytes(plain, num_tokens=1, num_new=1, dtype_bytes=dtype_bytes) or 0
        elif not isinstance(kind, DeltaAttention):
            raise _unknown(facts)
    if not found:
        raise _unknown(facts)
    return found


def _unknown(facts: ModelFacts) -> UnsupportedModelError:
    return UnsupportedModelError(
        f"it is not known what a {facts.model_type} model keeps of each token of an answer",
        limit="the memory of answers is planned before any is sampled",
        hint="serve a model with attention in its layers",
    )


def _state_tokens(facts: ModelFacts, dtype_bytes: int) -> int:
    """Return what layers keep of a row whatever its length, in tokens."""
    kinds = [x.attention for x in facts.layers if isinstance(x.attention, DeltaAttention)]
    sizes = [
        layer_cache_bytes(kind, num_tokens=1, num_new=1, dtype_bytes=dtype_bytes) or 0
        for kind in kinds
    ]
    return math.ceil(sum(sizes) / _token_bytes(facts, dtype_bytes))


def _reserved(subject: Subject, capacity: Capacity) -> tuple[MemoryTerm, ...]:
    """List the device memory that a pass to train does not know of.

    The scheduler copies the gradients of clients before a pass, to undo one that fails. The output
    head has its adapter's factors in the compute dtype, and new gradients, once.
    """
    facts, rank = subject.facts, capacity.max_rank
    head, whole = _head_weights(facts, rank), adapter_weights(facts, rank)
    frozen = capacity.num_samplers * whole + adapter_weights(facts, 1)
    sizes = {
        "keys and values of answers": cached_bytes(subject, capacity),
        "frozen adapters": FP32_BYTES * frozen,
        "adapters on the head, their gradients and optimizer states": capacity.num_clients
        * (2 + NUM_STATES)
        * FP32_BYTES
        * head,
        "copies of gradients": capacity.num_clients * FP32_BYTES * whole,
        "the head's adapter in a chunk": (_dtype_bytes(subject) + FP32_BYTES) * head,
    }
    sizes[f"{FRAGMENTATION} of these"] = int(FRAGMENTATION_FRAC * sum(sizes.values()))
    return tuple(MemoryTerm(name=name, num_bytes=size) for name, size in sizes.items())


# ---------------------------------------------------------------------------------------------
# What fits


@dataclass(frozen=True, kw_only=True)  # no slots: what is read again is computed once
class _Draft:
    """A form of the layers and a size of passes."""

    subject: Subject
    machine: Machine
    capacity: Capacity  # settled
    codec: str  # the codec of the layers
    pass_rows: int  # rows of full length that a client has in a pass at most

    @cached_property
    def reserved(self) -> tuple[MemoryTerm, ...]:
        """Device memory that a pass does not know of."""
        return _reserved(self.subject, self.capacity)

    @property
    def needs(self) -> MemoryNeeds:
        """The memory of a pass of all clients."""
        return MemoryNeeds.of(self.subject.facts, self.left, self.request())

    @property
    def fits(self) -> bool:
        """Whether there are enough slots for a pass of all clients."""
        return fits(self.subject.facts, self.left, self.request())

    @property
    def left(self) -> Machine:
        """The machine with what is left; a CPU has one memory for all."""
        taken = _snapshot_bytes(self.subject.facts, self.capacity)
        taken += total_bytes(self.reserved) if self.machine.device == "cpu" else 0
        ram_bytes = self.machine.ram_bytes - taken
        return replace(self.machine, ram_bytes=max(0, ram_bytes))

    def request(self, num_clients: int | None = None, num_slots: int | None = None) -> PlanRequest:
        """Return the request of a pass.

        Args:
            num_clients: Clients in it; None for all.
            num_slots: Layers on the device at a time; None for the recipe's, or as many as fit.
        """
        recipe, facts, capacity = self.subject.recipe, self.subject.facts, self.capacity
        wanted = full_request(recipe, facts)
        budget = limit_bytes(self.subject, self.machine) - total_bytes(self.reserved)
        row = replace(
            wanted.typical,
            micro_batch_size=1,
            adapter=_spec(facts, capacity.max_rank),
            optimizer="adamw",
            codec=self.codec,
            has_router_loss=False,
            leaves_out=True,
            layer_code=recipe.model.kernels,
            packed_tokens=None,
            has_images=False,
        )
        one = PlanRequest(
            typical=replace(
                row, seq_len=capacity.row_tokens // 2, label_tokens=capacity.row_tokens // 2
            ),
            largest=replace(row, seq_len=capacity.row_tokens, label_tokens=capacity.row_tokens),
            num_micro_batches=2 * self.pass_rows,
            most_tokens=self.pass_rows * capacity.row_tokens,
            num_slots=wanted.num_slots if num_slots is None else num_slots,
            num_kept_graphs=0,
            vram_budget_bytes=max(1, budget),
            num_workers=0,
            is_stashed=False,
            is_on_disk=wanted.is_on_disk,
            may_be_on_disk=wanted.may_be_on_disk,
            objective=ObjectiveCost(),
        )
        num_others = (num_clients or capacity.num_clients) - 1
        return replace(one, others=(one,) * num_others)

    @cached_property
    def plan(self) -> Plan:
        """A pass of all clients, if it fits."""
        return plan(self.subject.facts, self.left, self.request())

    @cached_property
    def worth(self) -> float:
        """A number that grows with what one client trains, what all train, and answers."""
        all_ = self.rate(self.capacity.num_clients)
        trained = math.sqrt(self.alone.trained_tokens_per_s * all_.trained_tokens_per_s)
        return math.sqrt(trained * all_.grouped.tokens_per_s)

    @cached_property
    def alone(self) -> Rate:
        """What one client gets, with the slots that all leave."""
        return self.rate(1)

    def rate(self, num_clients: int) -> Rate:
        """Return what so many clients give and take, with the slots that all leave."""
        found = self.plan
        if num_clients < self.capacity.num_clients:
            fewer = self.request(num_clients, num_slots=found.num_slots)
            found = plan(self.subject.facts, self.left, fewer)
        assert self.capacity.cached_tokens is not None
        fitting = self.capacity.cached_tokens // _least_cached(self.subject, self.capacity)
        num_rows = min(fitting, MOST_ANSWERS)
        tokens_per_s = found.tokens_per_step / found.step_s
        is_alone = num_clients == 1
        return Rate(
            num_clients=num_clients,
            train_s=found.step_s,
            train_loads=found.schedule.num_loads,
            trained_tokens_per_s=tokens_per_s,
            gain=1.0 if is_alone else tokens_per_s / self.alone.trained_tokens_per_s,
            slowdown=1.0 if is_alone else found.step_s / self.alone.train_s,
            sampled=self._answers(found, min(fitting, num_clients * MOST_ANSWERS), 1),
            grouped=self._answers(found, min(fitting // num_rows, num_clients), num_rows),
        )

    def _answers(self, found: Plan, num_groups: int, num_rows: int) -> Answers:
        one = plan_pass(
            found,
            num_groups=num_groups,
            num_rows=num_rows,
            num_past=self.capacity.row_tokens // 2,
        )
        return Answers(
            num_groups=num_groups,
            num_rows=num_rows,
            seconds=one.seconds,
            num_loads=one.num_loads,
            limited_by=one.limited_by,
        )


def _powers(most: int) -> list[int]:
    """Return 1, 2, 4, ... below a number, and that."""
    return [*(2**power for power in range(most.bit_length()) if 2**power < most), most]


def _drafts(
    subject: Subject,
    machine: Machine,
    capacity: Capacity,
    sizes: Sequence[int] = PASS_ROWS,
) -> list[_Draft]:
    """Return what there is to choose from, the smallest passes and the plainest forms first."""
    codecs = dict.fromkeys(request.typical.codec for request in subject.requests())
    capacity = settled(subject, machine, capacity)
    return [
        _Draft(
            subject=subject, machine=machine, capacity=capacity, codec=codec, pass_rows=pass_rows
        )
        for pass_rows in sizes
        for codec in codecs
    ]


# ---------------------------------------------------------------------------------------------
# Refusals


def _require_possible(subject: Subject, capacity: Capacity) -> None:
    """Check what no machine changes.

    Raises:
        ConfigError: A number is too small, rows are longer than the model's, or it computes in
            float16.
    """
    if subject.recipe.model.dtype == "float16":
        raise ConfigError(
            f"model.dtype: float16 for {subject.name}",
            limit="small gradients are lost in it unless losses are scaled, and those of clients"
            " are not",
            hint="`model.dtype=bfloat16`, or `float32` on a card without it",
        )
    longest = subject.facts.max_position_embeddings
    least = {"num_clients": 1, "num_samplers": 1, "max_rank": 1, "row_tokens": 2}
    if capacity.cached_tokens is not None:
        least["cached_tokens"] = _least_cached(subject, capacity)
    for name, number in least.items():
        value = getattr(capacity, name)
        if value < number:
            raise ConfigError(
                f"`{FLAGS[name]} {value}`",
                limit=f"it is at least {number:,}"
                + (", which the longest answer takes" if name == "cached_tokens" else ""),
                hint=f"`{FLAGS[name]} {number}`",
            )
    if capacity.row_tokens > longest:
        raise ConfigError(
            f"`{FLAGS['row_tokens']} {capacity.row_tokens}` for {subject.name}",
            limit=f"it was made for at most {longest:,} positions",
            hint=f"`{FLAGS['row_tokens']} {longest}`",
        )


def _too_large(subject: Subject, machine: Machine, capacity: Capacity) -> DoesNotFitError:
    """Return the error for a capacity that does not fit, with the nearest that does."""
    draft, limit = _drafts(subject, machine, capacity)[0], limit_bytes(subject, machine)
    changes = list(_smaller(subject, draft.capacity))
    hint = _nearest(subject, machine, capacity, changes)
    if not hint:  # the base itself is too large
        for name, numbers in changes:
            capacity = replace(capacity, **{name: numbers[-1]})
        (smallest, *_) = _drafts(subject, machine, capacity, PASS_ROWS[:1])
        return refusal(smallest.needs)
    needs, asked = draft.needs, draft.capacity
    needed = needs.on_device.peak_bytes(needs.fewest) + total_bytes(draft.reserved)
    given = " ".join(f"{flag} {getattr(asked, name)}" for name, flag in FLAGS.items())
    return DoesNotFitError(
        f"`{given}` needs {shown_gib(needed)} of device memory for {subject.name}",
        limit=f"{shown_gib(limit)} may be used on {machine.name}",
        hint=hint,
    )


def _smaller(subject: Subject, capacity: Capacity) -> Iterator[tuple[str, Sequence[int]]]:
    """Yield what may be smaller, and to which numbers, the largest first, of a settled one."""

    def halves(name: str, least: int) -> list[int]:
        numbers = [getattr(capacity, name)]
        while numbers[-1] // 2 >= least:
            numbers.append(numbers[-1] // 2)
        return numbers[1:]

    least_cached = _least_cached(subject, capacity)
    cached = {*halves("cached_tokens", least_cached), least_cached} - {capacity.cached_tokens}
    found: dict[str, Sequence[int]] = {
        "cached_tokens": sorted(cached, reverse=True),
        "num_samplers": range(capacity.num_samplers - 1, 0, -1),
        "num_clients": range(capacity.num_clients - 1, 0, -1),
        "max_rank": halves("max_rank", 1),
        "row_tokens": halves("row_tokens", LEAST_ROW_TOKENS),
    }
    return ((name, found[name]) for name in FLAGS if found[name])


def _nearest(
    subject: Subject,
    machine: Machine,
    capacity: Capacity,
    changes: Sequence[tuple[str, Sequence[int]]],
) -> str:
    """Name each number that fits if it alone is smaller, or else several; nothing if none do."""

    def is_possible(capacity: Capacity) -> bool:
        drafts = _drafts(subject, machine, capacity, PASS_ROWS[:1])
        return any(draft.fits for draft in drafts)

    def first(before: Capacity, name: str, numbers: Sequence[int]) -> int | None:
        return next((n for n in numbers if is_possible(replace(before, **{name: n}))), None)

    found = [(name, first(capacity, name, numbers)) for name, numbers in changes]
    alone = [f"`{FLAGS[name]} {number}`" for name, number in found if number is not None]
    if alone:
        return ", or ".join(alone)
    smaller, words = capacity, list[str]()
    for name, numbers in changes:
        number = first(smaller, name, numbers)
        taken = numbers[-1] if number is None else number
        smaller = replace(smaller, **{name: taken})
        words.append(f"`{FLAGS[name]} {taken}`")
        if number is not None:
            return " with ".join(words)
    return ""


# ---------------------------------------------------------------------------------------------
# What is shown


def serve_parts(plan: ServePlan) -> list[Part]:
    """Return what is printed before a base is served."""
    title = f"Plan for serving {plan.subject.name} on {plan.machine.name}: it fits"
    return [*tables(title, serve_rows(plan)), rates_table(plan)]


def serve_rows(plan: ServePlan) -> list[Row]:
    """Return the facts of a plan; sizes are in bytes."""
    capacity, facts, inner = plan.capacity, plan.subject.facts, plan.plan
    tokens, rows = capacity.row_tokens, plan.pass_tokens // capacity.row_tokens
    of_one = "values, gradients and AdamW's states of each"
    cached = f"for {capacity.cached_tokens:,} tokens, prompts included"
    if plan.state_tokens:
        cached += f"; an answer counts for {plan.state_tokens:,} more"
    return [
        Row("codec", "layers wait as", inner.request.typical.codec),
        Row(
            "num_slots",
            "layers on the device at a time",
            inner.num_slots,
            "whole",
            f"of {facts.num_layers}",
        ),
        Row("num_clients", "clients that train", capacity.num_clients, "whole"),
        Row(
            "client_bytes",
            f"  {of_one}",
            plan.client_bytes,
            "bytes",
            f"at rank {capacity.max_rank}",
        ),
        Row("num_samplers", "frozen adapters", capacity.num_samplers, "whole"),
        Row("adapter_bytes", "  values of each", plan.adapter_bytes, "bytes"),
        Row("row_tokens", "tokens of a row, or of a prompt with its answer", tokens, "whole"),
        Row(
            "pass_tokens",
            "tokens of a client in a pass",
            plan.pass_tokens,
            "whole",
            f"at most, such as {2 * rows} rows of {tokens // 2:,}; longer requests take several",
        ),
        Row("cached_tokens", "", capacity.cached_tokens),
        Row("cached_bytes", "keys and values of answers", plan.cached_bytes, "bytes", cached),
        Row(
            "peak_bytes",
            "device memory",
            plan.peak_bytes,
            "bytes",
            f"of {shown_gib(plan.limit_bytes)}",
        ),
        Row(
            "host_bytes",
            "host memory",
            plan.host_bytes,
            "bytes",
            f"of {shown_gib(plan.machine.ram_bytes)}, copies to sample from included",
        ),
        Row(
            "checkpoint_bytes",
            "a client's checkpoint on disk",
            plan.checkpoint_bytes,
            "bytes",
            "at most",
        ),
    ]


def rates_table(plan: ServePlan) -> Table:
    """Return what sharing the base gains and costs."""
    tokens = plan.capacity.row_tokens
    rows = 2 * plan.pass_tokens // tokens
    columns = (
        *("clients", "a pass|s", "loads", "trained|tokens/s", "all to one", "each slower"),
        *("answers", "a token of each|s", "loads of it", "limited by", "sampled|tokens/s"),
        f"{plan.rates[0].grouped.num_rows} to a prompt|tokens/s",
    )
    lines = [
        (
            *(one.num_clients, one.train_s, one.train_loads, one.trained_tokens_per_s),
            *(f"{one.gain:.2f}x", f"{one.slowdown:.2f}x"),
            *(one.sampled.num_answers, one.sampled.seconds, one.sampled.num_loads),
            *(one.sampled.limited_by, one.sampled.tokens_per_s, one.grouped.tokens_per_s),
        )
        for one in plan.rates
    ]
    note = (
        f"A pass trains on {rows} rows of {tokens // 2:,} tokens of each client and updates it."
        f" Up to {MOST_ANSWERS} answers of each are sampled at once, as many as fit, at"
        f" {tokens // 2:,} tokens; passes over prompts are left out. Training and sampling"
        " alternate, and each rate is as if there was nothing else."
    )
    return Table("Rates with so many clients at once", columns, lines, note, level="brief")
