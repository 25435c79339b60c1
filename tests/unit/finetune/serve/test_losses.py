"""The losses of the API and their gradients, in float64, against formulas written anew."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch

from finetune.errors import ConfigError, DataError
from finetune.serve.losses import LOSSES, TokenSum
from offload.engine.objective import Scores

LENGTHS = (3, 1, 5, 2)
NUM = sum(LENGTHS)
ROWS_N = torch.repeat_interleave(torch.arange(len(LENGTHS)), torch.tensor(LENGTHS))
MASK_N = torch.tensor([1, 0, 1, 1, 0, 1, 1, 1, 0, 1, 0], dtype=torch.float64)
Row = dict[str, float]


def drawn(seed: int, scale: float = 1.0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return scale * torch.randn(NUM, generator=generator, dtype=torch.float64)


def given(seed: int) -> dict[str, torch.Tensor]:
    logprobs = -drawn(seed).abs()
    return {
        "weights": drawn(seed + 1),
        "logprobs": logprobs + drawn(seed + 2, 0.3),
        "advantages": drawn(seed + 3),
        "sequence_ratio_mask": MASK_N,
        "policy": logprobs,
    }


def computed(
    loss: str, values: dict[str, torch.Tensor], config: dict[str, float]
) -> tuple[float, torch.Tensor]:
    """Return a loss and its gradient, as the server computes them."""
    policy_N = values["policy"].clone().requires_grad_()
    inputs = {name: values[name] for name in LOSSES[loss].inputs}
    scores = Scores(policy_N=policy_N, reference_N=None, rows_N=ROWS_N, num_rows=len(LENGTHS))
    value = TokenSum(loss, inputs, dict(config)).loss(scores).value
    value.backward()
    assert policy_N.grad is not None
    return float(value.detach()), policy_N.grad


# ---------------------------------------------------------------------------------------------
# Each token's loss and its derivative by the token's log-probability, in plain numbers: `p` of the
# policy, `q` of the sampler, `a` the advantage, `w` the weight, `s` the mean over a row's mask of
# p - q, between `lo` and `hi`.


def clip(x: float, lo: float, hi: float) -> float:
    return min(max(x, lo), hi)


def clipped(r: float, a: float, lo: float, hi: float) -> tuple[float, float]:
    """-min(r a, clip(r) a), and its derivative by ln r: 0 where the clipped one is smaller."""
    plain, cut = r * a, clip(r, lo, hi) * a
    return -min(plain, cut), -plain if plain <= cut else 0.0


def cross_entropy(x: Row) -> tuple[float, float]:
    return -x["w"] * x["p"], -x["w"]


def importance_sampling(x: Row) -> tuple[float, float]:
    value = -math.exp(x["p"] - x["q"]) * x["a"]
    return value, value


def ppo(x: Row) -> tuple[float, float]:
    return clipped(math.exp(x["p"] - x["q"]), x["a"], x["lo"], x["hi"])


def cispo(x: Row) -> tuple[float, float]:
    r = clip(math.exp(x["p"] - x["q"]), x["lo"], x["hi"])
    return -r * x["p"] * x["a"], -r * x["a"]


def dro(x: Row) -> tuple[float, float]:
    apart = x["p"] - x["q"]
    value = -(x["p"] * x["a"] - x["beta"] / 2 * apart**2)
    return value, -(x["a"] - x["beta"] * apart)


def gspo(x: Row) -> tuple[float, float]:
    """As ppo with the row's ratio, which a token changes as if by its own log-probability alone."""
    return clipped(math.exp(x["s"]), x["a"], x["lo"], x["hi"])


FORMULAS: dict[str, Callable[[Row], tuple[float, float]]] = {
    "cross_entropy": cross_entropy,
    "importance_sampling": importance_sampling,
    "ppo": ppo,
    "cispo": cispo,
    "dro": dro,
    "gspo": gspo,
}


def expected(
    loss: str, values: dict[str, torch.Tensor], config: dict[str, float]
) -> tuple[float, torch.Tensor]:
    total, slopes = 0.0, []
    for n in range(NUM):
        row = int(ROWS_N[n])
        marked = [m for m in range(NUM) if int(ROWS_N[m]) == row and float(MASK_N[m]) != 0]
        apart = [float(values["policy"][m] - values["logprobs"][m]) for m in marked]
        x = {
            "p": float(values["policy"][n]),
            "q": float(values["logprobs"][n]),
            "a": float(values["advantages"][n]),
            "w": float(values["weights"][n]),
            "s": sum(apart) / len(apart),
            "lo": config.get("clip_low_threshold", 0.8),
            "hi": config.get("clip_high_threshold", 1.2),
            "beta": config.get("beta", 0.0),
        }
        value, slope = FORMULAS[loss](x)
        total += value
        slopes.append(slope)
    return total, torch.tensor(slopes, dtype=torch.float64)


CLIP = {"clip_low_threshold": 0.9, "clip_high_threshold": 1.05}
CASES: list[tuple[str, dict[str, float]]] = [
    ("cross_entropy", {}),
    ("importance_sampling", {}),
    ("ppo", {}),
    ("ppo", CLIP),
    ("ppo", {"clip_high_threshold": 3.0}),
    ("cispo", {}),
    ("cispo", CLIP),
    ("cispo", {"clip_low_threshold": 0.0, "clip_high_threshold": 4.0}),
    ("dro", {"beta": 0.0}),
    ("dro", {"beta": 0.7}),
    ("gspo", CLIP),
    ("gspo", {"clip_low_threshold": 0.9997, "clip_high_threshold": 1.0004}),
    ("gspo", {"clip_low_threshold": 0.0, "clip_high_threshold": 10.0}),
]


@pytest.mark.parametrize(("loss", "config"), CASES)
@pytest.mark.parametrize("seed", range(4))
def test_losses_and_gradients_are_those_of_the_formulas(
    loss: str, config: dict[str, float], seed: int
) -> None:
    values = given(10 * seed)
    value, gradient_N = computed(loss, values, config)
    wanted, wanted_N = expected(loss, values, config)
    assert value == pytest.approx(wanted, rel=1e-12)
    torch.testing.assert_close(gradient_N, wanted_N, rtol=1e-12, atol=1e-14)


def test_all_losses_are_tried() -> None:
    assert {loss for loss, _ in CASES} == LOSSES.keys()


@pytest.mark.parametrize("loss", ["ppo", "gspo"])
def test_clipping_takes_the_gradient_of_some_tokens_and_leaves_that_of_others(loss: str) -> None:
    """So the cases above try both sides."""
    _, gradient_N = computed(loss, given(0), CLIP)
    assert 0 < int((gradient_N == 0).sum()) < NUM


@pytest.mark.parametrize("loss", ["importance_sampling", "ppo", "gspo"])
def test_on_policy_they_have_the_same_gradient(loss: str) -> None:
    """The ratio is 1: the policy gradient, with `cispo` and `dro` too."""
    values = given(3)
    values["logprobs"] = values["policy"]
    config = CLIP if loss == "gspo" else {}
    value, gradient_N = computed(loss, values, config)
    torch.testing.assert_close(gradient_N, -values["advantages"], rtol=1e-12, atol=0)
    assert value == pytest.approx(-float(values["advantages"].sum()))
    for other, settings in (("cispo", {}), ("dro", {"beta": 2.0})):
        _, gradient_N = computed(other, values, settings)
        torch.testing.assert_close(gradient_N, -values["advantages"], rtol=1e-12, atol=0)


def test_losses_are_sums_over_the_rows_of_a_request() -> None:
    """So requests that are cut into several give the same."""
    values = given(5)
    whole, _ = computed("cross_entropy", values, {})
    first_N = ROWS_N < 2
    weights = values["weights"]
    parts = [
        computed("cross_entropy", values | {"weights": weights * mask_N}, {})[0]
        for mask_N in (first_N, ~first_N)
    ]
    assert sum(parts) == pytest.approx(whole, rel=1e-12)


def test_a_row_without_a_ratio_is_refused() -> None:
    values = given(1) | {"sequence_ratio_mask": MASK_N * (ROWS_N != 2)}
    with pytest.raises(DataError, match="0 everywhere"):
        computed("gspo", values, CLIP)


# ------------------------------------------------------------------------------------ settings


@pytest.mark.parametrize(
    ("loss", "config", "why"),
    [
        ("cross_entropy", {"beta": 1.0}, "has 'beta'"),
        ("importance_sampling", {"clip_low_threshold": 0.8}, "has 'clip_low_threshold'"),
        ("ppo", {"epsilon": 0.2}, "has 'epsilon'"),
        ("ppo", {"clip_low_threshold": -0.1}, "clip_low_threshold of ppo is -0.1"),
        ("ppo", {"clip_low_threshold": math.nan}, "clip_low_threshold of ppo is nan"),
        ("ppo", {"clip_high_threshold": "high"}, "clip_high_threshold of ppo is 'high'"),
        ("cispo", {"beta": 0.1}, "has 'beta'"),
        ("dro", {}, "has no 'beta'"),
        ("dro", {"beta": -1.0}, "beta of dro is -1.0"),
        ("gspo", {}, "has no 'clip_low_threshold'"),
        ("gspo", {"clip_low_threshold": 0.9}, "has no 'clip_high_threshold'"),
        ("stable_reinforce", {}, "loss_fn is 'stable_reinforce'.*\n*.*importance_sampling"),
        ("", {}, "loss_fn is ''"),
        ("PPO", {}, "loss_fn is 'PPO'"),
    ],
)
def test_settings_that_are_missing_unknown_or_no_numbers_are_refused(
    loss: str, config: dict[str, Any], why: str
) -> None:
    with pytest.raises(ConfigError, match=f"(?s){why}"):
        TokenSum(loss, {}, config)
