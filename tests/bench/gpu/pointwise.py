"""Fused norms, rotation, gate and loss against the model's own code and against Liger's.

Each operator forward and backward at 8,192 tokens of Qwen3-8B's sizes, on a busy stream. Liger's
are those that its own patches put into a model.
"""

import importlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.nn import functional as F
from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm, apply_rotary_pos_emb

from offload.engine.pointwise import ops
from tests.bench.gpu.ceiling import busy_s, random_values
from tests.bench.gpu.journal import Journal
from tests.bench.gpu.settings import Settings
from tests.bench.grouped import failures

NUM_TOKENS, HIDDEN, WIDTH, HEADS, KEY_HEADS, HEAD_DIM, VOCAB = 8192, 4096, 12288, 32, 8, 128, 151936
TINY = (16, 32, 64, 2, 1, 16, 64)
EPS, LOSS_TOKENS = 1e-6, 1024
PLAIN = "plain"
Compute = Callable[..., Any]
Step = Callable[[], object]


def run(settings: Settings, journal: Journal) -> None:
    """Time each operator each way; a CPU has the plain ones alone."""
    names = ("norm", "rotation", "gate", "loss")
    journal.expect(names)
    device = torch.device(settings.device)
    errors: tuple[type[Exception], ...] = (*failures(), TypeError, AttributeError)
    for name, ways in zip(names, _operators(settings), strict=True):
        if journal.has(name) or settings.left_s < 0:
            continue
        seconds: dict[str, float] = {}
        refused: dict[str, str] = {}
        for way in ways if device.type == "cuda" else (PLAIN,):
            try:
                seconds[way] = busy_s(ways[way](), device)
            except errors as error:
                refused[way] = f"{type(error).__name__}: {error}"[:200]
        said = [f"{way} {s * 1e6:.4g} us" for way, s in seconds.items()]
        said += [f"{way} not: {why}" for way, why in refused.items()]
        journal.add(name, seconds_by_way=seconds, refused=refused, note=", ".join(said))


def _step(compute: Compute, *leaves: torch.Tensor) -> Step:
    """Return a forward and backward of an operator."""

    def several(found: Any) -> list[torch.Tensor]:
        return list(found) if isinstance(found, tuple) else [found]

    gradients = [torch.ones_like(y) for y in several(compute(*leaves))]
    return lambda: torch.autograd.grad(several(compute(*leaves)), leaves, gradients)


def _operators(settings: Settings) -> Iterator[dict[str, Callable[[], Step]]]:
    """Yield for each operator what makes its step, by who computes it."""
    device = torch.device(settings.device)
    dtype = torch.float32 if settings.is_rehearsal else torch.bfloat16
    sizes = (NUM_TOKENS, HIDDEN, WIDTH, HEADS, KEY_HEADS, HEAD_DIM, VOCAB)
    tokens, hidden, width, heads, keys, dim, vocab = TINY if settings.is_rehearsal else sizes

    def leaf(*shape: int) -> torch.Tensor:
        return random_values(shape, device, dtype).requires_grad_()

    norm = Qwen3RMSNorm(hidden, EPS).to(device, dtype).requires_grad_(requires_grad=False)
    weight, x = norm.weight, leaf(1, tokens, hidden)
    yield {
        "ours": lambda: _step(
            lambda x: ops.norm(x, weight, eps=EPS, offset=0.0, is_cast_first=True), x
        ),
        PLAIN: lambda: _step(norm, x),
        "liger": lambda: _step(
            lambda x: _liger("ops.rms_norm.LigerRMSNormFunction")(x, weight, EPS), x
        ),
    }
    q, k = leaf(1, heads, tokens, dim), leaf(1, keys, tokens, dim)
    angles = random_values((1, tokens, dim), device, dtype)
    yield {
        "ours": lambda: _step(lambda q, k: ops.rotate(q, k, angles, angles), q, k),
        PLAIN: lambda: _step(lambda q, k: apply_rotary_pos_emb(q, k, angles, angles), q, k),
        "liger": lambda: _step(
            lambda q, k: _liger("ops.rope.LigerRopeFunction")(q, k, angles, angles), q, k
        ),
    }
    gate, up = leaf(1, tokens, width), leaf(1, tokens, width)
    yield {
        "ours": lambda: _step(lambda gate, up: ops.gated(gate, up, "silu"), gate, up),
        PLAIN: lambda: _step(lambda gate, up: F.silu(gate) * up, gate, up),
        "liger": lambda: _step(_liger("ops.swiglu.LigerSiLUMulFunction"), gate, up),
    }
    num = min(LOSS_TOKENS, tokens)
    logits, labels = leaf(num, vocab), torch.zeros(num, dtype=torch.long, device=device)
    items = torch.tensor(float(num), device=device)
    yield {
        "ours": lambda: (
            lambda: ops.cross_entropy(logits.detach(), labels, num_items=items, has_gradient=True)
        ),
        PLAIN: lambda: _step(
            lambda x: F.cross_entropy(x.float(), labels, reduction="sum") / items, logits
        ),
        "liger": lambda: _step(  # it writes the gradient over the logits
            lambda x: _liger("ops.cross_entropy.LigerCrossEntropyFunction")(x * 1, labels)[0],
            logits,
        ),
    }


def _liger(path: str) -> Compute:
    """Return one of Liger's operators.

    Raises:
        ImportError: It is not installed.
    """
    module, _, name = f"liger_kernel.{path}".rpartition(".")
    found: Compute = getattr(importlib.import_module(module), name).apply
    return found
