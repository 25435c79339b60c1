"""What clients ask for, and what they get.

Losses are sums or whatever the request's objective makes of its log-probabilities; nothing is
divided. Gradients of several `Train` add up until a `Step`.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from offload.engine.batch import Batch
from offload.engine.objective import Objective


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Train:
    """Add the gradients of a loss to those that the client has."""

    # Each of one row: input_ids and labels (1, T), -100 where there is none. A label that follows a
    # token is what the row predicts there, whatever its input goes on with.
    rows: Sequence[Batch]
    objective: Objective  # the loss, of all rows


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Score:
    """Compute log-probabilities, and a loss if one is wanted, without gradients."""

    rows: Sequence[Batch]  # as of `Train`
    objective: Objective | None = None  # the loss; None for 0


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Scored:
    """What `Train` and `Score` give."""

    loss: float  # the objective's value
    metrics: Mapping[str, float]  # the objective's metrics, by name
    logprobs: tuple[torch.Tensor, ...]  # of each row's labels in order, in nats, on the host
    num_loads: int  # layers copied to the device in the pass, which others may have shared


@dataclass(frozen=True, kw_only=True, slots=True)
class Step:
    """Update the client's adapter by torch's AdamW, and clear its gradients."""

    lr: float
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = 1e-12
    weight_decay: float = 0.0  # decoupled
    max_grad_norm: float = 0.0  # gradients of all its parameters are clipped to it; 0 for no clip


@dataclass(frozen=True, kw_only=True, slots=True)
class Stepped:
    """What `Step` gives."""

    grad_norm: float  # of all gradients together, before they were clipped


@dataclass(frozen=True, kw_only=True, slots=True)
class Sample:
    """Answer a prompt, each answer from random numbers of its own."""

    prompt: Sequence[int]  # token ids
    max_tokens: int  # after which an answer is cut off
    seed: int  # the numbers of an answer follow from it and from the answer's place
    num_answers: int = 1
    stop_ids: frozenset[int] = frozenset()  # tokens that end an answer, and belong to it
    temperature: float = 1.0  # divisor of the logits; 0 for the most probable tokens
    # Returns whether an answer ends with the tokens that it has, besides at `stop_ids`.
    is_ended: Callable[[Sequence[int]], bool] | None = None


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class ClientState:
    """All that a client's training goes on from, on the host; gradients are no part of it."""

    values: Mapping[str, torch.Tensor]  # of its adapter
    moments: Mapping[str, Any] = field(default_factory=dict)  # `state` as of AdamW's `state_dict`


@dataclass(frozen=True, kw_only=True, slots=True)
class Save:
    """Return a copy of the client's state, as `ClientState`."""

    has_moments: bool = True  # whether those of AdamW are in it


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Load:
    """Go on from a state; gradients are cleared."""

    state: ClientState  # of a client with the same settings


@dataclass(frozen=True, kw_only=True, slots=True)
class Freeze:
    """Copy the client's adapter for a client that only scores and samples."""

    name: str  # of the new client, which may be asked at once


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Refused:
    """Fail in the client's order like a `Train` that fails: the step that follows fails, too."""

    error: Exception  # the reason


Request = Train | Score | Step | Sample | Save | Load | Freeze | Refused
