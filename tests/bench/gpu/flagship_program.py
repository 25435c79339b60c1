"""`python cli.py ARGUMENTS`, its large random weights cut from one block of random numbers.

`model.init: random` draws each weight, which for 30 B takes minutes; a copy of a block takes
seconds. Only values differ. Adapters are drawn as they always are.
"""

import runpy
import sys
from typing import Any

import torch

from tests.bench.gpu.models import POOL_LEN
from tests.bench.record import ROOT

LEAST = 2**24  # values of a tensor that is not drawn


def main() -> None:
    """Run the command."""
    generator = torch.Generator().manual_seed(0)
    normal, uniform = torch.Tensor.normal_, torch.Tensor.uniform_
    pools: dict[torch.dtype, torch.Tensor] = {}

    def fill(x: torch.Tensor, mean: float, std: float) -> torch.Tensor:
        if x.dtype not in pools:
            pools[x.dtype] = torch.randn(POOL_LEN, generator=generator).to(x.dtype)
        pool, flat, done = pools[x.dtype] * std + mean, x.detach().view(-1), 0
        while done < flat.numel():
            part = pool[: flat.numel() - done]
            flat[done : done + part.numel()].copy_(part)
            done += part.numel()
        return x

    def is_large(x: torch.Tensor) -> bool:
        return x.device.type == "cpu" and x.numel() >= LEAST and x.is_contiguous()

    def normal_(x: torch.Tensor, mean: float = 0.0, std: float = 1.0, **more: Any) -> torch.Tensor:
        return fill(x, mean, std) if is_large(x) else normal(x, mean, std, **more)

    def uniform_(x: torch.Tensor, low: float = 0.0, high: float = 1.0, **more: Any) -> torch.Tensor:
        if is_large(x):  # what `nn.Linear` draws first, and the model's own values replace
            return fill(x, (low + high) / 2, (high - low) / 12**0.5)
        return uniform(x, low, high, **more)

    vars(torch)["Tensor"].normal_, vars(torch)["Tensor"].uniform_ = normal_, uniform_
    sys.argv = [str(ROOT / "cli.py"), *sys.argv[1:]]
    runpy.run_path(sys.argv[0], run_name="__main__")


if __name__ == "__main__":
    main()
