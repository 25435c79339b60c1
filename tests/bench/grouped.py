"""One layer's experts by several arms, in turn: what bench_grouped and its sweep measure with."""

import copy
import datetime
import itertools
import json
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
from torch import nn

from offload.engine.experts.lora import SUFFIX
from offload.engine.streams import seconds_of
from offload.engine.tracing.tracer import LiveBytes, Tracer
from offload.errors import OffloadError
from tests.bench.bench_codecs import machine
from tests.bench.record import git, quantiles
from tests.mixtures import Mixture, branches

RANK = 16
LOOP, NATIVE, OURS, LIGER = "eager", "grouped_mm", "triton", "liger"
ARMS = (LOOP, NATIVE, OURS, LIGER)
Row = dict[str, Any]


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """What all arms compute in turn."""

    mixture: Mixture
    num_tokens: int
    is_skewed: bool
    is_step: bool

    @property
    def key(self) -> Row:
        """What a row says of it."""
        return {
            "mixture": self.mixture.name,
            "num_tokens": self.num_tokens,
            "routing": "skewed" if self.is_skewed else "uniform",
            "pass": "forward + backward" if self.is_step else "forward",
        }

    def flops(self, arm: str, rank: int | None) -> int:
        """Count what an arm multiplies and adds."""
        mixture = self.mixture
        rows = self.num_tokens * mixture.top_k
        frozen = 6 * rows * mixture.hidden * mixture.width
        beside = 2 * rows * (rank or 0) * (2 * mixture.hidden + 3 * mixture.width)
        if not self.is_step:
            return frozen + beside
        return frozen * (3 if arm == LIGER else 2) + 3 * beside


class Bench:
    """A model's experts, and what goes through them."""

    def __init__(self, case: Case, device: torch.device, dtype: torch.dtype) -> None:
        torch.manual_seed(0)
        self.case, self.device, self._dtype = case, device, dtype
        mixture, num_tokens = case.mixture, case.num_tokens
        with device:
            self._experts = mixture.experts(dtype, path=LOOP)
            for parameter in self._experts.parameters():
                nn.init.normal_(parameter, std=0.02)
            self._lora = branches(self._experts, RANK)
            for branch in self._lora.values():
                nn.init.normal_(branch.a_ERK, std=0.02)
                nn.init.normal_(branch.b_ERN, std=0.02)
            self._hidden_TD = torch.randn(num_tokens, mixture.hidden).to(dtype).requires_grad_()
            self._gradient_TD = torch.randn(num_tokens, mixture.hidden).to(dtype)
            rank_E = torch.randperm(mixture.num_experts) + 1.0
            uniform = torch.rand(num_tokens, mixture.num_experts).clamp_min(1e-9)
            scores_TE = -(-uniform.log()).log() - (rank_E.log() if case.is_skewed else 0)
            weight_TC, self._expert_TC = scores_TE.topk(mixture.top_k)
            self._weight_TC = weight_TC.softmax(-1).to(dtype).requires_grad_()

    def arm(self, name: str, rank: int | None) -> Callable[[], torch.Tensor]:
        """Return what computes the experts one way."""
        given = (self._hidden_TD, self._expert_TC, self._weight_TC)
        if name == LIGER:
            return self._liger(rank)
        experts = copy.deepcopy(self._experts, {id(p): p for p in self._experts.parameters()})
        experts.config._experts_implementation = name + SUFFIX * (rank is not None)
        if rank is None:
            return lambda: experts(*given)
        return lambda: experts(*given, lora=self._lora)

    def run(self, compute: Callable[[], torch.Tensor]) -> torch.Tensor:
        """Run a forward, and its backward if the case has one."""
        for tensor in (self._hidden_TD, self._weight_TC, *self._factors()):
            tensor.grad = None
        with torch.set_grad_enabled(self.case.is_step):
            out_TD = compute()
            if self.case.is_step:
                out_TD.backward(self._gradient_TD)
        return out_TD.detach()

    def peak_bytes(self, run: Callable[[], object]) -> int:
        """Return what a run allocates at most."""
        if self.device.type == "cpu":
            live = LiveBytes()
            with Tracer(live):
                run()
            return live.peak_bytes
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        run()
        return torch.cuda.max_memory_allocated() - before

    def _factors(self) -> Iterator[torch.Tensor]:
        for branch in self._lora.values():
            yield from (branch.a_ERK, branch.b_ERN)

    def _liger(self, rank: int | None) -> Callable[[], torch.Tensor]:
        if rank is not None or self._experts.has_bias:
            raise NotImplementedError("has no branches, bias or gates of other kinds")
        from liger_kernel.ops.fused_moe import LigerFusedMoEFunction

        up, down = (
            p.detach().requires_grad_(self.case.is_step)
            for p in (self._experts.gate_up_proj, self._experts.down_proj)
        )
        expert_TC = self._expert_TC.int()

        def compute() -> torch.Tensor:
            up.grad = down.grad = None
            out: torch.Tensor = LigerFusedMoEFunction.apply(
                self._hidden_TD, up, down, expert_TC, self._weight_TC
            )
            return out

        return compute


# ------------------------------------------------------------------------------------- measuring


def failures() -> tuple[type[Exception], ...]:
    """Return what a case may fail with: no memory, no room on the chip, no library."""
    try:
        from triton.errors import TritonError
    except ImportError:
        return (RuntimeError, ImportError, OffloadError)
    return (RuntimeError, ImportError, OffloadError, TritonError)


def ceiling(
    device: torch.device, dtype: torch.dtype, size: int
) -> tuple[Callable[[], object], int]:
    """Return the matmul of those tried that does most a second, and its FLOPs."""
    found = []
    for m, n, k in ((1, 1, 1), (2, 1, 1), (2, 2, 1), (2, 2, 2)):
        left = torch.randn(m * size, k * size, device=device).to(dtype)
        right = torch.randn(k * size, n * size, device=device).to(dtype)
        out = left @ right
        flops = 2 * m * n * k * size**3

        def run(left: torch.Tensor = left, right: torch.Tensor = right, out: Any = out) -> None:
            torch.mm(left, right, out=out)

        start_s = time.perf_counter()
        for _ in range(10):
            run()
        float(out[0, 0])
        found.append((flops / (time.perf_counter() - start_s), run, flops))
    _, best, flops = max(found, key=lambda one: one[0])
    return best, flops


def measure(
    bench: Bench,
    wanted: Sequence[tuple[str, int | None]],
    *,
    top: Any,
    num_rounds: int,
    max_s: float,
) -> Iterator[Row]:
    """Run arms in turn, some with branches; yield a row for each, or why it has none."""
    matmul, matmul_flops = top
    runs: dict[tuple[str, int | None], Callable[[], torch.Tensor]] = {}
    made: dict[tuple[str, int | None], Row] = {}
    truth: dict[int | None, torch.Tensor] = {}
    for arm, rank in wanted:
        said: Row = {"arm": arm, "rank": rank}
        try:
            compute = bench.arm(arm, rank)
            run = lambda compute=compute: bench.run(compute)  # noqa: E731
            out = run()
            truth.setdefault(rank, out)
            error = (out.float() - truth[rank].float()).norm() / truth[rank].float().norm()
            del out
            took_s = seconds_of(run, bench.device)
            if took_s * (num_rounds + 1) > max_s:
                raise RuntimeError(f"a run takes {took_s:.1f} s")
            made[arm, rank] = said | {"error": float(error), "peak_bytes": bench.peak_bytes(run)}
            runs[arm, rank] = run
        except failures() as failure:
            yield said | {"failed": f"{type(failure).__name__}: {failure}"[:200]}
    truth.clear()
    rounds = [
        {
            "": seconds_of(matmul, bench.device),
            **{key: seconds_of(run, bench.device) for key, run in runs.items()},
        }
        for _ in range(num_rounds)
    ]
    for (arm, rank), row in made.items():
        flops = bench.case.flops(arm, rank)
        yield row | {
            "ms": quantiles([found[arm, rank] * 1e3 for found in rounds]),
            "tflop_per_s": quantiles([flops / found[arm, rank] / 1e12 for found in rounds]),
            "of_ceiling": quantiles(
                [flops / found[arm, rank] * found[""] / matmul_flops for found in rounds]
            ),
            "ceiling_tflop_per_s": quantiles([matmul_flops / f[""] / 1e12 for f in rounds]),
            "flops": flops,
            "n": num_rounds,
        }


def cases(sizes: Sequence[Mixture], tokens: Sequence[int]) -> Iterator[Case]:
    """Yield all cases, those first that tell most."""
    for num_tokens, is_skewed, is_step in itertools.product(tokens, (False, True), (True, False)):
        for mixture in sizes:
            yield Case(mixture=mixture, num_tokens=num_tokens, is_skewed=is_skewed, is_step=is_step)


def where(device: torch.device, dtype: torch.dtype) -> Row:
    """Say what a row was measured on, and by what."""
    versions = {}
    for name in ("torch", "triton", "transformers", "liger-kernel"):
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            versions[name] = "not installed"
    versions["torch"] = str(torch.__version__)  # the build, with `+cu130` or `+cpu`
    return {
        "bench": "grouped",
        "machine": machine(device),
        "rehearsal": device.type == "cpu",
        "dtype": f"{dtype}".removeprefix("torch."),
        "git_sha": git("rev-parse", "--short", "HEAD"),
        "dirty": bool(git("status", "--porcelain")),
        "date": f"{datetime.datetime.now(datetime.UTC):%Y-%m-%d}",
        **versions,
    }


def is_of(row: Row, key: Row) -> bool:
    """Tell whether a row was measured under a key."""
    return all(row.get(name) == value for name, value in key.items())


class Log:
    """Rows as they are measured: written at once, and read again by the next start."""

    def __init__(self, path: Path | None, common: Row) -> None:
        self._path, self._common = path, common
        lines = path.read_text().splitlines() if path is not None and path.exists() else []
        known = {name: common[name] for name in ("machine", "git_sha", "dirty", "dtype")}
        self.rows = [row for row in map(json.loads, lines) if is_of(row, known)]

    def has(self, key: Row) -> bool:
        """Tell whether there is a row of a case and an arm."""
        return any(is_of(row, key) for row in self.rows)

    def add(self, row: Row) -> None:
        """Keep a row."""
        self.rows.append(self._common | row)
        if self._path is not None:
            with self._path.open("a") as file:
                file.write(json.dumps(self._common | row) + "\n")
