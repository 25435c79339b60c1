"""Two ranks that talk without a model: `main([NAME])`, in one process for each rank."""

import errno
import itertools
import sys
import time
from collections.abc import Mapping, Sequence

import pytest
import torch
from torch import nn

from finetune.env import launch
from finetune.errors import (
    ConfigError,
    FinetuneError,
    RankError,
    RunFailedError,
)
from finetune.training import process_group
from finetune.training.loop import digest_of
from finetune.training.process_group import ProcessGroup
from finetune.training.ranks import FromMain


def sums() -> None:
    """All that works, in one go."""
    with ProcessGroup(launch(), bucket_bytes=4 * 5) as ranks:  # smaller than a parameter
        me = ranks.index
        assert ranks.exchange(("word", me)) == (("word", 0), ("word", 1))
        assert ranks.from_main(lambda: f"made by {me}") == "made by 0"
        moments, step = ranks.from_main(lambda: (torch.full((3, 2), 1.5 + me), me))
        assert step == 0
        assert torch.equal(moments, torch.full((3, 2), 1.5))
        stored = {"a": torch.full((2,), 0.5), "b": torch.arange(3), "c": torch.ones(1)}
        sent = FromMain(None if me else stored, ranks=ranks)
        assert torch.equal(sent["b"], torch.arange(3))
        assert torch.equal(sent["a"], torch.full((2,), 0.5))
        own = torch.tensor([0.25, 2.0 * me], dtype=torch.float64)
        assert torch.equal(ranks.add_up(own), torch.tensor([0.5, 2.0], dtype=torch.float64))
        parameters = [nn.Parameter(torch.zeros(shape)) for shape in ((2, 3), (7,), (1,), (2,))]
        parameters[0].grad = torch.full((2, 3), 1.0 + me)
        parameters[1].grad = torch.arange(7.0) if me else None
        parameters[2].grad = torch.full((1,), 0.5) if me == 0 else None
        assert ranks.sum_losses(1.0 + me) == 3.0
        ranks.sum_gradients(parameters, dtype=torch.float32)
        expected = [torch.full((2, 3), 3.0), torch.arange(7.0), torch.full((1,), 0.5), None]
        for parameter, gradient in zip(parameters, expected, strict=True):
            assert (parameter.grad is None) == (gradient is None)
            assert gradient is None or torch.equal(parameter.grad, gradient)  # type: ignore[arg-type]  # not None here
        weights = {"w": nn.Parameter(torch.ones(3, dtype=torch.bfloat16))}

        def same(weights: Mapping[str, torch.Tensor], *, step: int) -> None:
            ranks.require_same(f"the weights after step {step}", lambda: digest_of(weights))

        same(weights, step=4)
        with pytest.raises(FinetuneError, match=r"after step 4 on rank 1 are not those on rank 0"):
            same({**weights, f"of {me}": torch.tensor(float(me))}, step=4)
        if me == 1:
            weights["w"].data[2] = 1.0078125  # the next bfloat16
        with pytest.raises(
            FinetuneError,
            match=r"the weights after step 5 on rank 1 are not those on rank 0; .*",
        ):
            same(weights, step=5)


def main_first() -> None:
    """The main rank is through before the other begins."""
    with ProcessGroup(launch()) as ranks:
        start_s = time.monotonic()
        with ranks.first_here_first():
            if ranks.is_main:
                time.sleep(0.5)
        assert time.monotonic() - start_s >= 0.5


def one_fails() -> None:
    """The other ends at its next collective, and is quiet for longer than it takes to report."""

    def fail() -> None:
        with ProcessGroup(here) as ranks:
            if ranks.index == 1:
                raise ConfigError("a setting is wrong", limit="it must be right", hint="correct it")
            ranks.exchange(None)

    here = launch()
    if here.index == 0:
        with pytest.raises(RankError, match="rank 1 has failed: a setting is wrong; ") as quiet:
            fail()
        assert not quiet.value.is_shown
    else:
        with pytest.raises(ConfigError, match="a setting is wrong"):
            fail()
        time.sleep(1.0)  # shows its error
    sys.stdout.write(f"rank {here.index} ends at {time.monotonic()}")


def both_fail() -> None:
    """One of them speaks for both."""

    def fail() -> None:
        with ProcessGroup(here):
            raise ConfigError("a setting is wrong", limit="it must be right", hint="correct it")

    here = launch()
    with pytest.raises((ConfigError, RankError)) as ending:
        fail()
    sys.stdout.write("quiet" if isinstance(ending.value, RankError) else "shown")


def one_run_fails() -> None:
    """A run fails on both ranks with the error of either, and they go on to talk."""
    with ProcessGroup(launch()) as ranks:

        def fail(error: Exception, *, on: Sequence[int]) -> None:
            with ranks.failing_together():
                if ranks.index in on:
                    raise error

        full = OSError(errno.ENOSPC, "No space left on device", "metrics.jsonl")
        wrong = ConfigError("a setting is wrong", limit="it must be right", hint="correct it")
        for failing in (0, 1):
            with pytest.raises(RunFailedError, match=r"metrics\.jsonl: No space left on device; "):
                fail(full, on=[failing])
        with pytest.raises(RunFailedError, match="a setting is wrong; it must be right"):
            fail(wrong, on=[0, 1])
        fail(wrong, on=[])
        assert ranks.exchange(ranks.index) == (0, 1)


def sums_in_order() -> None:
    """Each sum is taken in the order of the ranks, whatever it is sent with, and in what pieces."""
    sizes = (23, 5, 1, 40)

    def gradients(rank: int) -> list[torch.Tensor]:
        generator = torch.Generator().manual_seed(rank)
        return [torch.randn(size, generator=generator) for size in sizes]

    def added_up(dtype: torch.dtype, *, each_alone: bool) -> list[torch.Tensor | None]:
        parameters = [nn.Parameter(torch.zeros(size)) for size in sizes]
        for parameter, gradient in zip(parameters, gradients(ranks.index), strict=True):
            parameter.grad = gradient
        for part in [[one] for one in parameters] if each_alone else [parameters]:
            ranks.sum_gradients(part, dtype=dtype)
        return [parameter.grad for parameter in parameters]

    with ProcessGroup(launch(), bucket_bytes=4 * 26) as ranks:
        every = [gradients(rank) for rank in range(ranks.num)]
        for dtype, each_alone in itertools.product((torch.float32, torch.bfloat16), (True, False)):
            found = added_up(dtype, each_alone=each_alone)
            for one, summands in zip(found, zip(*every, strict=True), strict=True):
                expected = torch.zeros(len(summands[0]))
                for summand in summands:
                    expected = expected + summand.to(dtype).float()
                assert one is not None
                assert torch.equal(one, expected.to(dtype).float())


def one_hangs() -> None:
    """A rank that does not answer is waited for until the timeout."""

    process_group.TIMEOUT_S = 1.0

    def wait() -> None:
        with ProcessGroup(launch()) as ranks:
            if ranks.index == 1:
                time.sleep(3.0)
            ranks.exchange(None)

    why = "rank 1 is gone or does not answer: .*Timed out waiting 1000ms"
    # rank 1 reads it when it wakes up, if the store of rank 0 is still there
    with pytest.raises(RankError, match=why if launch().index == 0 else "does not answer"):
        wait()


def main(argv: Sequence[str]) -> None:
    """Play the scene of this name."""
    globals()[argv[0]]()
