"""Log-probabilities of given tokens, and their gradient by the logits, against autograd."""

import pytest
import torch

from offload.engine.passes.scoring import OTHERS, TOP, logits_gradient, top_scores
from offload.engine.tracing.tracer import LiveBytes, Tracer

V, K = 23, 5


def drawn(num: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return logits, labels and given tokens; some labels are given, and some rows have fewer."""
    generator = torch.Generator().manual_seed(0)
    logits_NV = 4 * torch.randn(num, V, generator=generator, dtype=torch.float64)
    ids_NK = torch.stack([torch.randperm(V, generator=generator)[:K] for _ in range(num)])
    next_N = torch.randint(0, V, (num,), generator=generator)
    next_N[1] = ids_NK[1, 2]
    ids_NK[2, 3:] = -1
    return logits_NV.to(dtype), next_N, ids_NK


def plain(logits_NV: torch.Tensor, next_N: torch.Tensor, ids_NK: torch.Tensor) -> torch.Tensor:
    """Compute the same in float64, by operators that autograd follows."""
    logps_NV = logits_NV.log_softmax(1)
    is_given_NV = torch.stack(
        [
            torch.tensor([token in ids_NK[n].tolist() for token in range(V)])
            for n in range(len(ids_NK))
        ]
    )
    others_N = logps_NV.masked_fill(is_given_NV, -torch.inf).logsumexp(1)
    top_NK = logps_NV.gather(1, ids_NK.clamp(min=0)).where(ids_NK >= 0, 0.0)
    return torch.cat((logps_NV.gather(1, next_N[:, None]), others_N[:, None], top_NK), dim=1)


@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float64, 1e-14), (torch.float32, 1e-6), (torch.bfloat16, 4e-3)]
)
def test_scores_and_gradient_are_those_of_autograd_in_float64(
    dtype: torch.dtype, tolerance: float
) -> None:
    logits_NV, next_N, ids_NK = drawn(7, dtype)
    exact_NV = logits_NV.double().requires_grad_()
    truth_NC = plain(exact_NV, next_N, ids_NK)
    gradient_NC = torch.randn(truth_NC.shape, dtype=torch.float64)
    gradient_NC[3] = 0
    gradient_NC[4, OTHERS] = 0
    truth_NC.backward(gradient_NC)
    before = logits_NV.clone()
    found_NC = top_scores(logits_NV, next_N, ids_NK)
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    gradient_NV = logits_gradient(logits_NV, next_N, ids_NK, gradient_NC.to(wide))
    assert found_NC.dtype == wide
    assert gradient_NV.dtype == dtype
    assert torch.equal(logits_NV, before)
    assert (found_NC - truth_NC).abs().max() <= max(1e-14, 5e-6 * (dtype != torch.float64))
    assert exact_NV.grad is not None
    assert (gradient_NV - exact_NV.grad).norm() <= tolerance * exact_NV.grad.norm()
    assert not gradient_NV[3].any()


def test_all_others_keep_their_digits_where_the_given_tokens_have_nearly_all_of_the_mass() -> None:
    logits_NV = torch.zeros(1, V)
    logits_NV[0, :K] = 95.0  # the others have e^-95 of it: one minus the sum would be 0
    ids_NK, next_N = torch.arange(K)[None], torch.tensor([0])
    exact_NV = logits_NV.double().requires_grad_()
    truth_NC = plain(exact_NV, next_N, ids_NK)
    found_NC = top_scores(logits_NV, next_N, ids_NK)
    assert found_NC[0, OTHERS].item() == pytest.approx(truth_NC[0, OTHERS].item(), rel=1e-6)
    truth_NC[0, OTHERS].backward()
    weights_NC = torch.zeros(1, K + TOP)
    weights_NC[0, OTHERS] = 1
    assert exact_NV.grad is not None
    gradient_NV = logits_gradient(logits_NV, next_N, ids_NK, weights_NC)
    assert torch.allclose(gradient_NV.double(), exact_NV.grad, rtol=1e-5, atol=0)


def test_tokens_that_are_the_whole_vocabulary_leave_no_others() -> None:
    logits_NV, next_N, _ = drawn(3, torch.float64)
    ids_NK = torch.arange(V).expand(3, V)
    found_NC = top_scores(logits_NV, next_N, ids_NK)
    assert torch.isneginf(found_NC[:, OTHERS]).all()
    assert torch.allclose(found_NC[:, TOP:], logits_NV.log_softmax(1))
    weights_NC = torch.ones(3, V + TOP, dtype=torch.float64)
    weights_NC[:, OTHERS] = 0
    exact_NV = logits_NV.clone().requires_grad_()
    logps_NV = exact_NV.log_softmax(1)
    (logps_NV.sum() + logps_NV.gather(1, next_N[:, None]).sum()).backward()
    assert exact_NV.grad is not None
    gradient_NV = logits_gradient(logits_NV, next_N, ids_NK, weights_NC)
    assert torch.allclose(gradient_NV, exact_NV.grad, rtol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_chunk_takes_no_more_than_three_copies_of_its_logits_in_fp32(dtype: torch.dtype) -> None:
    num, vocab = 64, 4096
    head_VD = torch.randn(vocab, 16).to(dtype)
    hidden_ND = torch.randn(num, 16).to(dtype).requires_grad_()
    ids_NK = torch.arange(K).expand(num, K).contiguous()
    next_N, gradient_NC = torch.arange(num), torch.randn(num, K + TOP)
    memory = LiveBytes()
    peaks = []
    with Tracer(memory):
        with torch.no_grad():
            top_scores(hidden_ND @ head_VD.T, next_N, ids_NK)
        peaks.append(memory.peak_bytes)
        memory.reset_peak()
        before, logits_NV = memory.live_bytes, hidden_ND @ head_VD.T
        logits_NV.backward(logits_gradient(logits_NV, next_N, ids_NK, gradient_NC))
        peaks.append(memory.peak_bytes - before)
    # A log-sum-exp has a temporary as large as its input, which a trace of operators does not see.
    assert max(peaks) + 4 * num * vocab < 1.02 * 12 * num * vocab
