"""The losses of the Tinker API, each a sum over the tokens of a request.

Formulas and inputs are those of Tinker's documentation (tinker-docs.thinkingmachines.ai, losses).
With log-probabilities logp by the policy and q by the sampler, r = exp(logp - q), advantages A:

- cross_entropy: -w logp
- importance_sampling: -r A
- ppo: -min(r A, clip(r) A)
- cispo: -sg(clip(r)) logp A
- dro: -(logp A - beta / 2 (logp - q)^2)
- gspo: as ppo, with a row's ratio, of GSPO-token: the geometric mean of r over the tokens of
  `sequence_ratio_mask`, whose gradient each token takes by its own logp

Shapes: N tokens of all rows.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

import torch

from finetune.errors import ConfigError, DataError
from offload.engine.objective import Reference, Scores, StepLoss

LOW, HIGH, BETA = "clip_low_threshold", "clip_high_threshold", "beta"
MASK = "sequence_ratio_mask"
Tensors = Mapping[str, torch.Tensor]
Settings = Mapping[str, float]
Compute = Callable[[Scores, Tensors, Settings], torch.Tensor]


@dataclass(frozen=True, kw_only=True, slots=True)
class Loss:
    """A loss by name."""

    inputs: tuple[str, ...]  # tensors (N,) of a row that it reads, the targets left out
    compute: Compute  # the loss of each token, (N,)
    # Its settings and their values without any; None has to be given.
    settings: Mapping[str, float | None] = field(default_factory=lambda: MappingProxyType({}))


def _cross_entropy(scores: Scores, given: Tensors, _: Settings) -> torch.Tensor:
    return -scores.policy_N * given["weights"]


def _importance(scores: Scores, given: Tensors, _: Settings) -> torch.Tensor:
    return -_ratio(scores, given) * given["advantages"]


def _ppo(scores: Scores, given: Tensors, settings: Settings) -> torch.Tensor:
    return _clipped(_ratio(scores, given), given, settings)


def _cispo(scores: Scores, given: Tensors, settings: Settings) -> torch.Tensor:
    ratio_N = _ratio(scores, given).detach().clamp(settings[LOW], settings[HIGH])
    return -ratio_N * scores.policy_N * given["advantages"]


def _dro(scores: Scores, given: Tensors, settings: Settings) -> torch.Tensor:
    apart_N = scores.policy_N - given["logprobs"]
    return settings[BETA] / 2 * apart_N**2 - scores.policy_N * given["advantages"]


def _gspo(scores: Scores, given: Tensors, settings: Settings) -> torch.Tensor:
    policy_N, in_ratio_N = scores.policy_N, given[MASK] != 0
    zeros_R = policy_N.new_zeros(scores.num_rows)
    apart_N = (policy_N.detach() - given["logprobs"]) * in_ratio_N
    counts_R = zeros_R.index_add(0, scores.rows_N, in_ratio_N.to(policy_N))
    if not bool((counts_R > 0).all()):
        raise DataError(
            f"{MASK} of a row is 0 everywhere",
            limit="a row's ratio is the mean over the tokens that it marks",
            hint=f"mark its sampled tokens in `{MASK}`, or leave the row out",
        )
    means_R = zeros_R.index_add(0, scores.rows_N, apart_N) / counts_R
    return _clipped((means_R[scores.rows_N] + policy_N - policy_N.detach()).exp(), given, settings)


def _ratio(scores: Scores, given: Tensors) -> torch.Tensor:
    return (scores.policy_N - given["logprobs"]).exp()


def _clipped(ratio_N: torch.Tensor, given: Tensors, settings: Settings) -> torch.Tensor:
    advantages_N = given["advantages"]
    clipped_N = ratio_N.clamp(settings[LOW], settings[HIGH])
    return -torch.minimum(ratio_N * advantages_N, clipped_N * advantages_N)


_SAMPLED = ("logprobs", "advantages")
_CLIP = MappingProxyType({LOW: 0.8, HIGH: 1.2})  # of ppo, as documented
LOSSES: Mapping[str, Loss] = MappingProxyType(
    {
        "cross_entropy": Loss(inputs=("weights",), compute=_cross_entropy),
        "importance_sampling": Loss(inputs=_SAMPLED, compute=_importance),
        "ppo": Loss(inputs=_SAMPLED, compute=_ppo, settings=_CLIP),
        "cispo": Loss(inputs=_SAMPLED, compute=_cispo, settings=_CLIP),
        "dro": Loss(inputs=_SAMPLED, compute=_dro, settings={BETA: None}),
        "gspo": Loss(inputs=(*_SAMPLED, MASK), compute=_gspo, settings={LOW: None, HIGH: None}),
    }
)


def loss_named(name: str) -> Loss:
    """Return a loss.

    Raises:
        ConfigError: There is none of this name here.
    """
    if name not in LOSSES:
        raise ConfigError(
            f"loss_fn is {name!r}",
            limit=f"this server computes {', '.join(LOSSES)}; what {name!r} computes is not"
            " published",
            hint="`loss_fn=importance_sampling` for what was sampled, `forward_backward_custom` for"
            " a loss of your own",
        )
    return LOSSES[name]


class TokenSum:
    """The sum of a loss over the tokens of a request."""

    reference: Reference | None = None

    def __init__(self, name: str, given: Tensors, settings: Mapping[str, float | str]) -> None:
        """Check what the loss is to read.

        Args:
            name: A loss.
            given: Inputs of the loss (N,), those of all rows one after another.
            settings: Settings of the loss by name.

        Raises:
            ConfigError: There is no such loss, or a setting is missing, unknown or no number.
        """
        self._loss, self._given = loss_named(name), given
        known = dict(self._loss.settings)
        unknown = sorted(settings.keys() - known.keys())
        known |= {key: _number(name, key, settings[key]) for key in known if key in settings}
        missing = [key for key, value in known.items() if value is None]
        if unknown or missing:
            raise ConfigError(
                f"loss_fn_config of {name} "
                + (f"has {unknown[0]!r}" if unknown else f"has no {missing[0]!r}"),
                limit=f"{name} reads {', '.join(known) or 'no settings'}",
                hint=f"leave {unknown[0]!r} out"
                if unknown
                else f'`loss_fn_config={{"{missing[0]}": ...}}`: there is no published default',
            )
        self._settings = {key: value for key, value in known.items() if value is not None}

    def loss(self, scores: Scores) -> StepLoss:
        """Return the sum."""
        policy_N = scores.policy_N
        given = {key: value.to(policy_N) for key, value in self._given.items()}
        return StepLoss(value=self._loss.compute(scores, given, self._settings).sum(), metrics={})


def _number(name: str, key: str, value: float | str) -> float:
    if isinstance(value, str) or not value >= 0:
        raise ConfigError(
            f"{key} of {name} is {value!r}",
            limit="it is a number of 0 or more",
            hint=f'`loss_fn_config={{"{key}": ...}}`',
        )
    return value
