"""The kernels of experts for cards that are not there: what they take, and how they read."""

import dataclasses
import importlib.util
import itertools

import pytest
import torch

from offload.engine.experts.launcher import MAX_SHARED_BYTES, Blocks, blocks_for
from tests.compiled import Compiled, compile_for
from tests.mixtures import GPT_OSS, MIXTURES, QWEN, Mixture, launches
from tests.tiers import mostly_slow

if importlib.util.find_spec("triton") is None:  # not imported: others may want it interpreted
    pytest.skip("Triton is not installed", allow_module_level=True)
FEW, SOME, MANY = 8, 64, 257  # rows per expert
KERNELS = {"multiply", "activate", "activate_backward", "sum_outer"}
TILE = Blocks(m=64, n=128, k=64, num_warps=4, num_stages=3)


def compiled(
    mixture: Mixture,
    capability: int,
    blocks: Blocks,
    *,
    dtype: torch.dtype = torch.bfloat16,
    ranks: tuple[int | None, ...] = (16,),
    kernels: set[str] = KERNELS,
) -> list[Compiled]:
    """Compile a forward and a backward, and a forward without one."""
    noted = [
        launch
        for rank in ranks
        for is_kept in (True, False)
        for launch in launches(mixture, dtype, blocks, rank=rank, is_kept=is_kept)
    ]
    found = compile_for(capability, [launch for launch in noted if launch.kernel in kernels])
    assert {each.launch.kernel for each in found} == kernels
    return found


def check(found: list[Compiled]) -> None:
    """Check that nothing spills, that all fits, and that products read as fast as can be."""
    for each in found:
        assert each.spilled_bytes == 0, each
        assert each.shared_bytes <= each.max_shared_bytes, each
        assert each.is_wide, each


def test_kernels_for_a_card_that_is_not_there_launch_on_it() -> None:
    check(compiled(GPT_OSS, 86, TILE, kernels={"activate"}))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("capability", "rows_per_expert", "mixture"),
    mostly_slow(
        list(itertools.product((86, 89), (SOME, MANY), (QWEN, GPT_OSS))),
        (86, SOME, QWEN),
        (89, MANY, GPT_OSS),
        rest=pytest.mark.exhaustive,
    ),
)
def test_kernels_launch_on_consumer_cards(
    capability: int, rows_per_expert: int, mixture: Mixture
) -> None:
    blocks = blocks_for(divmod(capability, 10), torch.bfloat16, rows_per_expert=rows_per_expert)
    check(compiled(mixture, capability, blocks))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("capability", "mixture"),
    mostly_slow(
        list(itertools.product(MAX_SHARED_BYTES, (QWEN, GPT_OSS))),
        (90, QWEN),
        (120, GPT_OSS),
        rest=pytest.mark.exhaustive,
    ),
)
def test_two_programs_of_a_large_kernel_share_a_multiprocessor(
    capability: int, mixture: Mixture
) -> None:
    """One computes while the other reads and writes; also without a graph, and without branches."""
    blocks = blocks_for(divmod(capability, 10), torch.bfloat16, rows_per_expert=MANY)
    found = compiled(mixture, capability, blocks, ranks=(None, 16), kernels=KERNELS - {"sum_outer"})
    check(found)
    assert all(each.num_programs >= 2 for each in found), [
        (each.launch.kernel, each.registers, each.shared_bytes) for each in found
    ]


@pytest.mark.exhaustive
@pytest.mark.parametrize("mixture", MIXTURES, ids=lambda mixture: mixture.name)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("capability", MAX_SHARED_BYTES)
def test_kernels_launch_on_all_cards(capability: int, dtype: torch.dtype, mixture: Mixture) -> None:
    for rows_per_expert in (FEW, SOME, MANY):
        blocks = blocks_for(divmod(capability, 10), dtype, rows_per_expert=rows_per_expert)
        check(compiled(mixture, capability, blocks, dtype=dtype, ranks=(None, 16)))


@pytest.mark.exhaustive
@pytest.mark.parametrize("capability", [86, 90])
def test_a_high_rank_launches_too(capability: int) -> None:
    blocks = blocks_for(divmod(capability, 10), torch.bfloat16, rows_per_expert=MANY)
    check(compiled(QWEN, capability, blocks, ranks=(24, 64, 128)))


@pytest.mark.slow
def test_a_tile_that_is_too_large_for_its_warps_is_seen_to_spill() -> None:
    wide = dataclasses.replace(TILE, m=32, n=256, k=16, num_warps=1)
    found = compiled(QWEN, 86, wide, ranks=(None,), kernels={"multiply"})
    assert any(each.spilled_bytes > 0 for each in found)


def test_a_tile_that_reads_too_far_ahead_is_seen_not_to_fit() -> None:
    deep = dataclasses.replace(TILE, num_stages=6)
    for capability, fits in ((86, False), (80, True)):
        for each in compiled(QWEN, capability, deep, ranks=(None,), kernels={"multiply"}):
            assert (each.shared_bytes <= each.max_shared_bytes) == fits


def test_matrices_that_lie_unaligned_are_seen_to_be_read_in_narrow_words() -> None:
    odd = dataclasses.replace(QWEN, hidden=2049)
    found = compiled(odd, 86, TILE, ranks=(None,), kernels={"multiply"})
    assert any(not each.is_wide for each in found)
