"""The MLP that computes virtual tokens, or a prefix's keys and values, before each micro-batch.

It is peft's and computes in fp32, over few tokens: its products are bound by its weights. With its
gradients these are as large for any batch.
"""

from offload.plan.facts.facts import AdapterSpec
from offload.plan.facts.linears import FP32_BYTES
from offload.plan.facts.optimizer import Shape
from offload.plan.time.pricer import Pricer
from offload.plan.time.roofline import gemm
from offload.plan.time.work import Work

_BETWEEN = 2  # a function between two linear layers reads its inputs and writes its outputs
_BACK_BETWEEN = 3  # its backward reads a gradient and what it has kept


def encoder_forward(at: Pricer) -> Work:
    """Return the lookup of P tokens, and of each linear layer a product with its bias."""
    linears = _linears(at.workload.adapter)
    if not linears:
        return Work()
    num, width = at.workload.adapter.virtual[0]
    work = at.traffic(2 * num * width * FP32_BYTES, num_ops=1)
    for d_out, d_in in linears:
        work += _product(at, num, d_in, d_out)
    return work + _between(at, _BETWEEN)


def encoder_backward(at: Pricer) -> Work:
    """Return the products by inputs and by weights, and the sums of all gradients."""
    spec = at.workload.adapter
    linears = _linears(spec)
    if not linears:
        return Work()
    num, num_weights = spec.virtual[0][0], 0
    work = Work()
    for d_out, d_in in linears:
        work += _product(at, num, d_out, d_in) + _product(at, d_out, num, d_in)
        work += at.traffic(num * d_out * FP32_BYTES, num_ops=1)  # the bias
        num_weights += (d_in + 1) * d_out
    num_weights += num * spec.virtual[0][1]
    added = 3 * num_weights * FP32_BYTES  # the new one is read, the sum read and written
    return work + _between(at, _BACK_BETWEEN) + at.traffic(added, num_ops=len(spec.virtual))


def _linears(spec: AdapterSpec) -> tuple[Shape, ...]:
    """Return (d_out, d_in) of the linear layers after the embedding; none of a table alone."""
    return tuple(shape for shape in spec.virtual[1:] if len(shape) > 1)


def _product(at: Pricer, m: int, k: int, n: int) -> Work:
    """Price (m, k) @ (k, n) in fp32, one side of which is short."""
    rate = at.machine.tall_fp32_flops_per_s.value
    roof = gemm(at.machine, m=m, k=k, n=n, dtype_bytes=FP32_BYTES, flops_per_s=rate)
    is_compute = roof.compute_s >= roof.memory_s
    return Work(
        compute_s=roof.compute_s if is_compute else 0.0,
        memory_s=0.0 if is_compute else roof.memory_s,
        flops=2.0 * m * k * n,
        num_ops=1,
    )


def _between(at: Pricer, num_passes: int) -> Work:
    """Price what is between the linear layers."""
    spec = at.workload.adapter
    widths = [d_out for d_out, _ in _linears(spec)[:-1]]
    num_bytes = num_passes * spec.virtual[0][0] * sum(widths) * FP32_BYTES
    return at.traffic(num_bytes, num_ops=len(widths))
