"""Steps whose loss is taken over all their rows: log-probabilities first, then what they are worth.

Problem. A loss of preferences compares rows, so the gradient by one token is known only when all
rows are scored. The logits of all rows would be pairs x tokens x vocabulary.

Idea. The loss depends on a row's tokens through one number each. Norm and head run twice on each
chunk of labelled tokens: once without a graph for the log-probabilities, and once more, after the
loss and its gradient by each of them are known, for the gradient by the hidden states. In between
only these numbers exist, so the loss may be any function of them; torch differentiates it.

A loss that names tokens (`offload.engine.objective.TopObjective`) has one number for each of them
in place of one per label (`offload.engine.passes.scoring`). One that reads the head's outputs
(`OutputObjective`) has the output itself, at the few tokens where it is read.

Both times a chunk gives the same logits: the model's inspection has refused a tail that draws.

Precision. Log-probabilities are computed in fp32 from the head's outputs, as in a cross-entropy,
and in fp64 where the model is.

Shapes: N label tokens of a chunk or of the step, D hidden features, V tokens of the vocabulary,
K tokens that a loss names, C = K + 2.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any

import torch
from torch import nn

from offload.engine.batch import Batch, LabelledBatch, rows_of_labels
from offload.engine.model.layers import LayeredModel, classifier_outputs, vocabulary_of
from offload.engine.objective import (
    Objective,
    OutputObjective,
    Reference,
    Scores,
    StepLoss,
    TopObjective,
)
from offload.engine.pointwise.ops import cross_entropy
from offload.engine.pointwise.recognise import DTYPES
from offload.engine.results import PassState, RunState
from offload.engine.visit_cache import VISIT_CACHE, patched
from offload.errors import OffloadError
from offload.plan.schedule.schedule import Passes

# ---------------------------------------------------------------------------------------------
# The same model computed within its visits as others: without its adapters, or with another.
#
# Problem. A reference that differs from the policy by its adapter alone needs no weights of its
# own: a visit can compute both while the layer is there. But a library's own switches walk over the
# whole model and change which parameters train, which must not happen within a step.
#
# Idea. A module that holds an adapter looks at two of its attributes in each call: whether adapters
# are off, and which are active. These are set for one call of one layer, and set back. No parameter
# is touched. Modules that are trained whole are such modules too: without their adapters they
# compute with the original. For the reference the modules are in evaluation mode, so that it has no
# dropout and no noise and draws no random number; TRL switches dropout off in both models.
#
# In the same way a visit computes the rows of several runs, each with its own adapter.
#
# A reference is exact only if nothing else has changed since training began. So weights that train
# and are no adapter's are refused.

_OFF, _ACTIVE = "_disable_adapters", "_active_adapter"
_BASES = ("base_layer", "original_module")
"""Children of a module with adapters that hold what they adapt."""

_PRECOMPUTED = (
    "score the rows with `engine.evaluate` before training, and use an objective that is given"
    " these numbers and whose `reference` is None"
)


class SwitchedModel:
    """A model as the passes of one run compute it: with its adapter, or as the model is."""

    def __init__(
        self,
        model: LayeredModel,
        adapter: str | None = None,
        *,
        values: Mapping[str, Any] | None = None,
        is_evaluated: bool = False,
    ) -> None:
        """Find the modules to switch.

        Args:
            model: The model.
            adapter: The adapter that computes; None leaves those that are active.
            values: What to set in place of the adapter.
            is_evaluated: Whether modules are in evaluation mode, and in their own if not.
        """
        if values is None:
            values = {} if adapter is None else {_OFF: False, _ACTIVE: [adapter]}
        is_switched = bool(values) or is_evaluated
        layers = [list(layer.modules()) if is_switched else [] for layer in model.layers]
        around = list(model.around) if is_switched else []
        self._evaluated_layers = layers if is_evaluated else [[] for _ in layers]
        self._evaluated_around = around if is_evaluated else []
        self._adapted_layers = [_switches(modules, values, adapter) for modules in layers]
        self._adapted_around = _switches(around, values, adapter)

    @contextmanager
    def in_layer(self, layer: int) -> Iterator[None]:
        """Switch one layer for one visit."""
        evaluated, adapted = self._evaluated_layers[layer], self._adapted_layers[layer]
        with _in_evaluation(evaluated), patched(*adapted):
            yield

    @contextmanager
    def around_layers(self) -> Iterator[None]:
        """Switch everything else, for what comes before and after the layers."""
        with _in_evaluation(self._evaluated_around), patched(*self._adapted_around):
            yield

    @contextmanager
    def everywhere(self) -> Iterator[None]:
        """Switch all of the model, for passes of its own."""
        with self.around_layers(), ExitStack() as layers:
            for layer in range(len(self._adapted_layers)):
                layers.enter_context(self.in_layer(layer))
            yield


def reference_model(model: LayeredModel, reference: Reference) -> SwitchedModel:
    """Return a model as its reference computes: in evaluation mode, with other adapters or none.

    Raises:
        OffloadError: The model has no such reference.
    """
    _require_reference(model, reference.adapter)
    values = {_OFF: True} if reference.adapter is None else None
    return SwitchedModel(model, reference.adapter, values=values, is_evaluated=True)


def adapted_model(model: LayeredModel, adapter: str | None) -> SwitchedModel:
    """Return a model in evaluation mode with one of its adapters; with None without any.

    Raises:
        OffloadError: It has no such adapter, or one is merged into its weights.
    """
    adapted = _adapted(model.whole.modules())
    _require_unmerged(adapted)
    if adapter is None:
        return SwitchedModel(model, values={_OFF: True}, is_evaluated=True)
    if not any(adapter in path.split(".") for path in _owned(adapted).values()):
        raise OffloadError(
            f"{model.name} has no adapter {adapter!r}",
            limit="rows are scored with one of the model's adapters, or None for the model"
            " without them",
            hint=f"`model.load_adapter(..., adapter_name={adapter!r})` before `offload.attach`",
        )
    return SwitchedModel(model, adapter, is_evaluated=True)


def require_owners(model: LayeredModel, adapters: Sequence[str]) -> None:
    """Check that each of some adapters trains, and, if they are several, that nothing else does.

    Raises:
        OffloadError: One does not, or something else does.
    """
    owned = _owned(_adapted(model.whole.modules()))
    training: set[str] = set()
    for name, parameter in model.whole.named_parameters():
        if not parameter.requires_grad:
            continue
        training |= set(owned.get(id(parameter), "").split("."))
        if id(parameter) not in owned and len(adapters) > 1:
            raise OffloadError(
                f"{name} trains, and it is no adapter's",
                limit="runs that share the layers share no weight that trains",
                hint="freeze it, or train one run at a time",
            )
    for adapter in adapters:
        if adapter not in training:
            raise OffloadError(
                f"{model.name} has no adapter {adapter!r} that trains",
                limit="a run trains an adapter of its own",
                hint="`model.add_adapter(...)` and `requires_grad_()` before `offload.attach`",
            )


def used_by(
    model: LayeredModel, adapter: str | None, parameters: Iterable[nn.Parameter]
) -> list[nn.Parameter]:
    """Return those of some parameters that are not another adapter's; all with None."""
    owned = {} if adapter is None else _owned(_adapted(model.whole.modules()))
    return [p for p in parameters if id(p) not in owned or adapter in owned[id(p)].split(".")]


def _require_reference(model: LayeredModel, adapter: str | None) -> None:
    """Check that the model without its adapters, or with this one, is what it was before training.

    Raises:
        OffloadError: It is not.
    """
    adapted = _adapted(model.whole.modules())
    if not adapted:
        raise OffloadError(
            f"{model.name} has no adapter, and the objective has a reference",
            limit="the reference is the same model with its adapters off",
            hint=f"add an adapter, e.g. `peft.get_peft_model(model, ...)`; or {_PRECOMPUTED}",
        )
    _require_unmerged(adapted)
    if all(vars(module).get(_OFF, False) for module in adapted):
        raise OffloadError(
            f"the adapters of {model.name} are switched off",
            limit="the reference is the same model with its adapters off: both would be one",
            hint="`model.enable_adapter_layers()`, and leave `model.disable_adapter()` first",
        )
    owned = _owned(adapted)
    for name, parameter in model.whole.named_parameters():
        if parameter.requires_grad and id(parameter) not in owned:
            raise OffloadError(
                f"{name} trains, and it is no adapter's",
                limit="the reference is the same model with its adapters off: what else trains is"
                " no longer what it was",
                hint=f"freeze it, or {_PRECOMPUTED}",
            )
    if adapter is not None:
        _require_fixed(model, adapter, owned)


def _require_unmerged(adapted: Iterable[nn.Module]) -> None:
    """Check that no adapter is part of the weights that it adapts."""
    merged = next((m for m in adapted if getattr(m, "merged", False)), None)
    if merged is not None:
        raise OffloadError(
            f"the adapter of a {type(merged).__name__} is merged into its weights",
            limit="another adapter, or none, is computed with the weights as they were before",
            hint="`model.unmerge_adapter()` before `offload.attach`",
        )


def _require_fixed(model: LayeredModel, adapter: str, owned: Mapping[int, str]) -> None:
    """Check that an adapter exists and does not train."""
    named = [
        (name, parameter)
        for name, parameter in model.whole.named_parameters()
        if adapter in owned.get(id(parameter), "").split(".")
    ]
    if not named:
        raise OffloadError(
            f"the objective's reference is the adapter {adapter!r}, which {model.name} lacks",
            limit="it is one of the model's adapters, or None for the model without them",
            hint=f"`model.load_adapter(..., adapter_name={adapter!r})` before `offload.attach`",
        )
    trained = next((name for name, parameter in named if parameter.requires_grad), None)
    if trained is not None:
        raise OffloadError(
            f"{trained} trains, and it is of the reference's adapter {adapter!r}",
            limit="a reference stays as it is",
            hint=f"load the adapter twice: train one, and keep {adapter!r} frozen",
        )


def _owned(adapted: Iterable[nn.Module]) -> dict[int, str]:
    """Return the path within its module of each parameter of an adapter, by id."""
    return {
        id(parameter): path
        for module in adapted
        for path, parameter in module.named_parameters()
        if path.partition(".")[0] not in _BASES
    }


def _adapted(modules: Iterable[nn.Module]) -> list[nn.Module]:
    """Return the modules that hold adapters, by what they offer: peft's, or alike."""
    return [
        module
        for module in modules
        if isinstance(getattr(type(module), "disable_adapters", None), property)
        and hasattr(module, _OFF)
        and hasattr(module, _ACTIVE)
    ]


def _in_evaluation(modules: Iterable[nn.Module]) -> AbstractContextManager[None]:
    return patched(*((vars(module), {"training": False}) for module in modules))


_Switches = Sequence[tuple[dict[str, Any], Mapping[str, Any]]]
"""Attributes of modules, and what to set of them for a call."""


def _switches(
    modules: Iterable[nn.Module], values: Mapping[str, Any], adapter: str | None
) -> _Switches:
    """Return what to set; a module that an adapter has no part in computes without adapters.

    Modules that another adapter saves whole would look for this one's weights.
    """
    adapted = _adapted(modules) if values else []
    return [
        (vars(module), values if adapter is None or _has(module, adapter) else {_OFF: True})
        for module in adapted
    ]


def _has(module: nn.Module, adapter: str) -> bool:
    return any(adapter in path.split(".") for path in _owned([module]).values())


# ---------------------------------------------------------------------------------------------
# Log-probabilities of given tokens: how a distribution known at a few tokens is compared with.
#
# A teacher's distribution is kept as the log-probabilities of its likeliest tokens. The student's
# at the same tokens, and that of all others together, are taken from a chunk of logits, so that
# between the two passes over the head only (N, K + 2) numbers exist.
#
# The mass of all other tokens is a log-sum-exp over them, not one minus the sum over the given
# ones, which has no digits left where these have nearly all of it.
#
# The gradient is written where a copy of the logits was: with the gradients a of the label, r of
# the others and w of the given tokens, W their sum, and q the student's probabilities, a given
# token's logit has w - W q, another one's q (r / q_others - W), and the label's a more.
#
# Shapes: N label tokens, V tokens of the vocabulary, K given tokens, C = K + 2.

NONE = -1
"""In place of a given token where a label has fewer than others."""
LABEL, OTHERS, TOP = 0, 1, 2
"""Columns: the label, all tokens that are not given, and from `TOP` on the given ones."""


def top_scores(logits_NV: torch.Tensor, next_N: torch.Tensor, ids_NK: torch.Tensor) -> torch.Tensor:
    """Return log-probabilities (N, C) in nats; 0 where no token is given.

    Args:
        logits_NV: Without a graph.
        next_N: The label tokens.
        ids_NK: The given tokens of each, which differ, or `NONE`; the first is always given.
    """
    wide_NV, full_N, ids_NK, is_given_NK = _prepared(logits_NV, ids_NK)
    label_N1 = wide_NV.gather(1, next_N[:, None])
    top_NK = (wide_NV.gather(1, ids_NK) - full_N[:, None]).where(is_given_NK, 0.0)
    others_N = wide_NV.scatter_(1, ids_NK, -torch.inf).logsumexp(1)
    return torch.cat((label_N1 - full_N[:, None], (others_N - full_N)[:, None], top_NK), dim=1)


def logits_gradient(
    logits_NV: torch.Tensor, next_N: torch.Tensor, ids_NK: torch.Tensor, gradient_NC: torch.Tensor
) -> torch.Tensor:
    """Return the gradient (N, V) by the logits, in their dtype.

    Args:
        logits_NV: The same as for `top_scores`.
        next_N: The same.
        ids_NK: The same.
        gradient_NC: By each log-probability; not read where no token is given.
    """
    wide_NV, full_N, ids_NK, is_given_NK = _prepared(logits_NV, ids_NK)
    label_N, others_N = gradient_NC[:, LABEL], gradient_NC[:, OTHERS]
    top_NK = gradient_NC[:, TOP:].where(is_given_NK, 0.0)
    total_N = label_N + others_N + top_NK.sum(1)
    given_NK = top_NK - total_N[:, None] * (wide_NV.gather(1, ids_NK) - full_N[:, None]).exp()
    # Where no token is given, the first is written again.
    given_NK = given_NK.where(is_given_NK, given_NK[:, :1])
    log_others_N = wide_NV.scatter_(1, ids_NK, -torch.inf).logsumexp(1) - full_N
    # In float64, and to the exponent: q_others may be far below what float32 can divide by.
    share_N = (others_N.double() * (-log_others_N.double()).exp()).where(others_N != 0, 0.0)
    factor_N = share_N - total_N
    shift_N = (full_N - factor_N.abs().log()).to(wide_NV.dtype)
    wide_NV.sub_(shift_N[:, None]).exp_().mul_(factor_N.sign().to(wide_NV.dtype)[:, None])
    wide_NV.scatter_(1, ids_NK, given_NK)
    wide_NV.scatter_add_(1, next_N[:, None], label_N[:, None])
    return wide_NV.to(logits_NV.dtype)


def _prepared(
    logits_NV: torch.Tensor, ids_NK: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return a copy of the logits to write to, its log-sum-exp, places to read, and which count."""
    is_wide = logits_NV.dtype == torch.float64
    wide_NV = logits_NV.detach().to(torch.float64 if is_wide else torch.float32, copy=True)
    is_given_NK = ids_NK != NONE
    return wide_NV, wide_NV.logsumexp(1), ids_NK.where(is_given_NK, ids_NK[:, :1]), is_given_NK


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Scoring:
    """What a step with an objective scores."""

    objective: Objective  # its loss
    batches: Sequence[LabelledBatch]  # the run's micro-batches, those that are only scored last
    rows_N: torch.Tensor  # the row of each label token, on the compute device
    num_rows: int  # rows of all micro-batches
    passes: Passes  # through the layers, numbered in the step
    model: SwitchedModel  # how rows are computed that are only scored
    reference: SwitchedModel | None  # how the reference computes them; None if there is none
    # The tokens (N, K) that the loss names, of each micro-batch, on the compute device; none if it
    # names none.
    top_ids: Sequence[torch.Tensor] = ()
    # Whether the loss reads the head's outputs, and no log-probabilities.
    reads_outputs: bool = False
    output_index: int | None = None  # which of them it then reads; None if it reads all
    temperature: float = 1.0  # what logits are divided by

    @classmethod
    def of(
        cls,
        model: LayeredModel,
        objective: Objective,
        rows: tuple[torch.Tensor, int],
        batches: Sequence[LabelledBatch],
        *,
        passes: Passes,
        adapter: str | None,
    ) -> "Scoring":
        """Prepare the scoring of a step.

        Args:
            model: The model.
            objective: The loss.
            rows: As `rows_of_labels` returns them.
            batches: On the compute device, those that are only scored last.
            passes: See the attribute.
            adapter: The run's; None for those that are active.

        Raises:
            OffloadError: The model has no such reference, or the loss names tokens that do not fit.
        """
        asked = objective.reference
        top_ids: Sequence[torch.Tensor] = ()
        if isinstance(objective, TopObjective):
            sizes = [batch.num_label_tokens for batch in batches]
            parts = _checked_top(objective, sum(sizes), model).split(sizes)
            device = batches[0].positions.device
            top_ids = [ids_NK.to(device, non_blocking=True) for ids_NK in parts]
        return cls(
            objective=objective,
            batches=batches,
            rows_N=rows[0].to(batches[0].positions.device, non_blocking=True),
            num_rows=rows[1],
            passes=passes,
            model=SwitchedModel(model, adapter, is_evaluated=True),
            reference=None if asked is None else reference_model(model, asked),
            top_ids=top_ids,
            reads_outputs=isinstance(objective, OutputObjective),
            output_index=objective.output_index if isinstance(objective, OutputObjective) else None,
            temperature=getattr(objective, "logits_temperature", 1.0),
        )

    def batch(self, number: int) -> LabelledBatch:
        """Return the rows of a pass."""
        return self.batches[self.passes.micro_batch(number)]

    def of_pass(self, number: int) -> SwitchedModel:
        """Return how a pass is computed that is not trained on."""
        if number in self.passes.reference:
            assert self.reference is not None
            return self.reference
        return self.model


_Chunk = tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]
"""Positions of some label tokens, the label tokens, and those that the loss names, if any."""


class ScoredTail:
    """Runs what comes after the last layer where the loss is an objective's."""

    def __init__(
        self,
        model: LayeredModel,
        scoring: Scoring,
        *,
        head_chunk_tokens: int,
        loss_scale: float,
    ) -> None:
        """Keep the parts, of how many tokens logits exist at a time, and a gradient's factor."""
        self._model, self._scoring, self._loss_scale = model, scoring, loss_scale
        self._chunk_tokens = head_chunk_tokens
        self._last = len(model.layers)
        self._scores: dict[int, torch.Tensor] = {}
        self._gradients: dict[int, torch.Tensor] = {}

    # ---------------------------------------------------------------------------------------- ops

    def score(self, state: PassState, number: int) -> None:
        """Compute the log-probabilities of a pass; its hidden states stay if it is trained on."""
        VISIT_CACHE.enter(("score", number))
        with torch.no_grad():
            if number in self._scoring.passes.trained:
                hidden_BTD = state.inputs[self._last, number]
                self._scores[number] = self._scores_of(hidden_BTD, number)
                return
            del state.fronts[number]
            hidden_BTD = state.inputs.pop((self._last, number))
            with self._scoring.of_pass(number).around_layers():
                self._scores[number] = self._scores_of(hidden_BTD, number)

    def weigh(self, run: RunState) -> None:
        """Compute the loss of the step, and its gradient by each log-probability."""
        VISIT_CACHE.enter(None)
        passes, scoring = self._scoring.passes, self._scoring
        policy = [self._scores[number] for number in (*passes.trained, *passes.scored)]
        reference = [self._scores[number] for number in passes.reference]
        self._scores.clear()
        trained = policy[: passes.num_trained]
        with torch.set_grad_enabled(bool(trained)):
            leaves = [one.requires_grad_() for one in trained]
            loss = scoring.objective.loss(self._joined(policy, reference))
            _require_scalars(scoring.objective, loss)
            if leaves:
                _require_graph(scoring.objective, loss.value)
                gradients = torch.autograd.grad(loss.value, leaves)
                if self._loss_scale != 1:
                    gradients = tuple(self._loss_scale * gradient for gradient in gradients)
                self._gradients = dict(zip(passes.trained, gradients, strict=True))
        run.losses.append(loss.value.detach())
        run.metrics.update({name: value.detach() for name, value in loss.metrics.items()})

    def _joined(self, policy: Sequence[torch.Tensor], reference: Sequence[torch.Tensor]) -> Scores:
        """Return what the loss reads, from that of each pass: (N,), or (N, C) with named tokens."""
        all_policy = torch.cat([*policy])
        known_N = torch.cat([*reference]) if reference else None
        rows_N, num_rows = self._scoring.rows_N, self._scoring.num_rows
        if not self._scoring.top_ids:
            return Scores(
                policy_N=all_policy, reference_N=known_N, rows_N=rows_N, num_rows=num_rows
            )
        return Scores(
            policy_N=all_policy[:, LABEL],
            reference_N=known_N,
            rows_N=rows_N,
            num_rows=num_rows,
            top_NK=all_policy[:, TOP:],
            others_N=all_policy[:, OTHERS],
        )

    def train(self, state: PassState, m: int) -> None:
        """Compute the gradient of the loss by a micro-batch's hidden states."""
        VISIT_CACHE.enter(("tail", m))
        hidden_BTD = state.inputs.pop((self._last, m))
        gradient_BTD = torch.zeros_like(hidden_BTD)
        gradient_ND, gradients_N = gradient_BTD.flatten(0, 1), self._gradients.pop(m)
        weights = gradients_N.split(self._chunk_tokens)
        for (positions_N, next_N, ids_NK), weight_N in zip(self._chunks(m), weights, strict=True):
            chunk_1ND = hidden_BTD.flatten(0, 1)[positions_N].unsqueeze(0).requires_grad_()
            self._pass_back(chunk_1ND, weight_N, next_N, ids_NK)
            assert chunk_1ND.grad is not None
            gradient_ND[positions_N] = chunk_1ND.grad[0]
        state.gradient[m] = gradient_BTD

    # ------------------------------------------------------------------------------------- chunks

    def _chunks(self, number: int) -> Iterator[_Chunk]:
        """Yield the label tokens of a pass, chunk by chunk; a reference's without named tokens."""
        scoring, size = self._scoring, self._chunk_tokens
        named = scoring.top_ids and number not in scoring.passes.reference
        ids = scoring.top_ids[scoring.passes.micro_batch(number)].split(size) if named else ()
        for (positions_N, next_N), ids_NK in zip_longest(scoring.batch(number).chunks(size), ids):
            yield positions_N, next_N, ids_NK

    def _scores_of(self, hidden_BTD: torch.Tensor, number: int) -> torch.Tensor:
        flat_ND = hidden_BTD.flatten(0, 1)
        return torch.cat(
            [
                self._scores_of_chunk(flat_ND[positions_N].unsqueeze(0), next_N, ids_NK)
                for positions_N, next_N, ids_NK in self._chunks(number)
            ]
        )

    def _scores_of_chunk(
        self, chunk_1ND: torch.Tensor, next_N: torch.Tensor, ids_NK: torch.Tensor | None
    ) -> torch.Tensor:
        if self._scoring.reads_outputs:
            return self._outputs_of(chunk_1ND)
        logits_NV = self._logits_of(chunk_1ND)
        if ids_NK is not None:
            return top_scores(logits_NV, next_N, ids_NK)
        is_fused = has_fused_loss(self._model, chunk_1ND)
        return log_probabilities(logits_NV, next_N, is_fused=is_fused)

    def _logits_of(self, chunk_1ND: torch.Tensor) -> torch.Tensor:
        """Return logits (N, V), over the loss's temperature."""
        logits_NV = self._model.tail_logits(chunk_1ND).flatten(0, 1)
        temperature = self._scoring.temperature
        return logits_NV if temperature == 1 else logits_NV / temperature

    def _outputs_of(self, chunk_1ND: torch.Tensor) -> torch.Tensor:
        index = self._scoring.output_index
        return _wide(classifier_outputs(self._model, chunk_1ND, index=index))

    def _pass_back(
        self,
        chunk_1ND: torch.Tensor,
        gradient_N: torch.Tensor,
        next_N: torch.Tensor,
        ids_NK: torch.Tensor | None,
    ) -> None:
        """Compute the gradients by some hidden states, given those by their log-probabilities."""
        if self._scoring.reads_outputs:
            self._outputs_of(chunk_1ND).backward(gradient_N)
            return
        logits_NV = self._logits_of(chunk_1ND)
        if ids_NK is not None:
            logits_NV.backward(logits_gradient(logits_NV, next_N, ids_NK, gradient_N))
            return
        if has_fused_loss(self._model, chunk_1ND):
            _, of_logits_NV = cross_entropy(
                logits_NV.detach(), next_N, num_items=-1 / gradient_N, has_gradient=True
            )
            logits_NV.backward(of_logits_NV)
            return
        losses_N = _cross_entropies(logits_NV, next_N)
        del logits_NV  # no name holds them in the backward
        losses_N.backward(-gradient_N)


def log_probabilities(
    logits_NV: torch.Tensor, next_N: torch.Tensor, *, is_fused: bool
) -> torch.Tensor:
    """Return the log-probability of each label, in fp32, or in fp64 where the logits are."""
    if is_fused:
        one = torch.ones((), device=next_N.device)
        losses_N, _ = cross_entropy(logits_NV, next_N, num_items=one, has_gradient=False)
        return losses_N.neg_()
    return _cross_entropies(logits_NV, next_N).neg_()


def has_fused_loss(model: LayeredModel, hidden_BTD: torch.Tensor) -> bool:
    """Return whether one operator computes the loss of a model's logits."""
    return model.fuses_loss and hidden_BTD.dtype in DTYPES


def _cross_entropies(logits_NV: torch.Tensor, next_N: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.cross_entropy(_wide(logits_NV), next_N, reduction="none")


def _wide(values: torch.Tensor) -> torch.Tensor:
    return values if values.dtype == torch.float64 else values.float()


def _checked_top(objective: TopObjective, num_labels: int, model: LayeredModel) -> torch.Tensor:
    """Return the tokens that a loss names.

    Raises:
        OffloadError: They are not (label tokens, K), of the vocabulary, and different at a label.
    """
    ids_NK, num_vocab = objective.top_ids, vocabulary_of(model.model).num_predicted
    found = ""
    if ids_NK.dtype != torch.int64 or ids_NK.dim() != 2 or len(ids_NK) != num_labels:
        found = f"{tuple(ids_NK.shape)} of {ids_NK.dtype}"
    elif not ids_NK.shape[1] or bool((ids_NK < NONE).any() | (ids_NK[:, 0] == NONE).any()):
        found = "without a token at some label"
    elif num_vocab is not None and int(ids_NK.max()) >= num_vocab:
        found = f"with the token {int(ids_NK.max())}, and the model predicts {num_vocab}, from 0"
    else:
        ordered_NK = ids_NK.sort(dim=1).values
        is_twice = (ordered_NK[:, 1:] == ordered_NK[:, :-1]) & (ordered_NK[:, 1:] != NONE)
        if bool(is_twice.any()):
            found = f"with a token twice at label {int(is_twice.any(1).nonzero()[0])}"
    if found:
        raise OffloadError(
            f"top_ids of {type(objective).__name__} is {found}",
            limit=f"it names different tokens at each of {num_labels} labels: ({num_labels}, K),"
            f" int64, {NONE} after the last where there are fewer than K",
            hint="a label is a token with `labels` other than -100, after the first of a row; they"
            " count through the micro-batches, and through those that are only scored",
        )
    return ids_NK


def _require_scalars(objective: Objective, loss: StepLoss) -> None:
    """Check that a loss and its metrics are tensors of one number each.

    Raises:
        OffloadError: One is not.
    """
    values: dict[str, object] = {"loss": loss.value, **loss.metrics}
    for name, value in values.items():
        found = type(value).__name__
        if isinstance(value, torch.Tensor):
            found = f"of shape {tuple(value.shape)}" if value.dim() else ""
        if found:
            raise OffloadError(
                f"{type(objective).__name__} returns a {name} {found}",
                limit="a loss and its metrics are tensors of one number each",
                hint="`.mean()`, or `torch.tensor(...)` for a metric that is no tensor",
            )


def _require_graph(objective: Objective, value: torch.Tensor) -> None:
    """Check that a loss depends on the log-probabilities.

    Raises:
        OffloadError: It is not.
    """
    if not value.requires_grad:
        raise OffloadError(
            f"{type(objective).__name__} returns a loss without a graph",
            limit="torch differentiates it by the log-probabilities of `scores`",
            hint="look for `detach`, `no_grad` or `item` in its `loss`",
        )


# ---------------------------------------------------------------------------------------------
# The log-probability of each label under several adapters, in one forward pass over the layers.
#
# Adapters of one base differ by a few matrices, and its weights cross the link once for all of
# them: each visit of a layer computes every micro-batch with every adapter before the next layer is
# visited. So the number of loads depends on neither.
#
# A pass is a micro-batch with an adapter. All micro-batches of an adapter come first, so that what
# a visit derives from an adapter is derived once. Until the last layer, each pass has one hidden
# state on the device: (B, T, D) for each micro-batch and adapter.
#
# Shapes: N label tokens of a micro-batch or chunk, D hidden features, V tokens of the vocabulary.


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class TokenScores:
    """What an adapter gives the label tokens of a micro-batch, on the host."""

    logps_N: torch.Tensor  # log-probability of each, in fp32, or in fp64 where the model is
    is_greedy_N: torch.Tensor  # whether it is the most probable token
    rows_N: torch.Tensor  # its row, counted within the micro-batch
    num_rows: int  # rows of the micro-batch


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class ScoreResult:
    """Result of scoring."""

    # The scores by adapter in the order that was asked for, and by micro-batch.
    scores: tuple[tuple[TokenScores, ...], ...]
    num_loads: int  # layers copied from host to device
    num_passes: int  # visits of each layer: micro-batches times adapters
    pass_s: float  # measured seconds from the first op to the last


class ScoredPasses:
    """The passes of one scoring, and what they have found."""

    def __init__(
        self,
        model: LayeredModel,
        batches: Sequence[Batch],
        labelled: Sequence[LabelledBatch],
        adapters: Sequence[str | None],
    ) -> None:
        """Prepare the passes; nothing is computed.

        Args:
            model: The model.
            batches: The micro-batches, on the host.
            labelled: The same on the compute device.
            adapters: Names of the model's adapters; None for the model without them.

        Raises:
            OffloadError: There is none, one is named twice or unknown, or a row has no label.
        """
        names = list(adapters)
        twice = next((name for name in names if names.count(name) > 1), "")
        if not names or twice != "":
            raise OffloadError(
                "adapters is empty" if not names else f"adapters names {twice!r} twice",
                limit="rows are scored once with each adapter",
                hint='`adapters=[None, "default"]`: the model without adapters, and with one',
            )
        self._rows = [rows_of_labels([batch]) for batch in batches]
        self._labelled = labelled
        self._models = [adapted_model(model, name) for name in names]
        self._found: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    @property
    def num(self) -> int:
        """How many passes there are."""
        return len(self._labelled) * len(self._models)

    def batch(self, number: int) -> LabelledBatch:
        """Return the rows of a pass."""
        return self._labelled[number % len(self._labelled)]

    def of_pass(self, number: int) -> SwitchedModel:
        """Return how a pass is computed."""
        return self._models[number // len(self._labelled)]

    def add(self, number: int, logps_N: torch.Tensor, is_greedy_N: torch.Tensor) -> None:
        """Keep the scores of a pass, still on the device."""
        self._found[number] = logps_N, is_greedy_N

    def scores(self) -> tuple[tuple[TokenScores, ...], ...]:
        """Return the scores of all passes on the host, by adapter and micro-batch; this waits."""
        num = len(self._labelled)
        return tuple(
            tuple(self._on_host(adapter * num + m, *self._rows[m]) for m in range(num))
            for adapter in range(len(self._models))
        )

    def _on_host(self, number: int, rows_N: torch.Tensor, num_rows: int) -> TokenScores:
        logps_N, is_greedy_N = self._found[number]
        return TokenScores(
            logps_N=logps_N.cpu(),
            is_greedy_N=is_greedy_N.cpu(),
            rows_N=rows_N.cpu(),
            num_rows=num_rows,
        )


class EachTail:
    """Runs norm and head of each pass, a chunk of label tokens at a time."""

    def __init__(
        self, model: LayeredModel, passes: ScoredPasses, *, head_chunk_tokens: int
    ) -> None:
        """Keep the parts, and of how many tokens logits exist at a time."""
        self._model, self._passes = model, passes
        self._chunk_tokens = head_chunk_tokens
        self._last = len(model.layers)

    def score(self, state: PassState, number: int) -> None:
        """Score the labels of a pass; its hidden states are let go."""
        VISIT_CACHE.enter(("score", number))
        del state.fronts[number]
        flat_ND = state.inputs.pop((self._last, number)).flatten(0, 1)
        batch, found = self._passes.batch(number), list[tuple[torch.Tensor, torch.Tensor]]()
        with self._passes.of_pass(number).around_layers():
            for positions_N, next_N in batch.chunks(self._chunk_tokens):
                found.append(self._chunk(flat_ND[positions_N].unsqueeze(0), next_N))
        logps, are_greedy = zip(*found, strict=True)
        self._passes.add(number, torch.cat(logps), torch.cat(are_greedy))

    def _chunk(
        self, chunk_1ND: torch.Tensor, next_N: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        logits_NV = self._model.tail_logits(chunk_1ND).flatten(0, 1)
        is_greedy_N = logits_NV.argmax(-1) == next_N
        is_fused = has_fused_loss(self._model, chunk_1ND)
        return log_probabilities(logits_NV, next_N, is_fused=is_fused), is_greedy_N
