"""A checkpoint larger than the memory that a process may have becomes a store of a quarter of it.

See `tests/bench/bench_loading.py`, which does the same at any size, for what is measured and why
the limit is RLIMIT_DATA.
"""

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.bench.bench_loading import load_apart, published_config
from tests.checkpoints import write_checkpoint

pytestmark = [pytest.mark.slow, pytest.mark.disk, pytest.mark.timeout(600)]

MIB = 2**20
HIDDEN, EXPERT_WIDTH, NUM_EXPERTS = 1024, 384, 64
LARGEST_BYTES = 2 * NUM_EXPERTS * 2 * EXPERT_WIDTH * HIDDEN  # a layer's gate and up projections
ALLOWED_BYTES = 2 * LARGEST_BYTES + 64 * MIB  # it, the one before it, and what is encoded of it


@pytest.fixture(scope="module")
def published() -> Iterator[Path]:
    config = published_config(
        500 * 10**6, hidden=HIDDEN, expert_width=EXPERT_WIDTH, num_experts=NUM_EXPERTS
    )
    with tempfile.TemporaryDirectory() as folder:  # on a disk: what is in memory would count
        write_checkpoint(Path(folder) / "model", config, shard_bytes=100 * MIB)
        yield Path(folder) / "model"


def test_encoding_takes_two_tensors_at_a_time_and_fits_where_a_copy_does_not(
    published: Path, tmp_path: Path
) -> None:
    num_bytes = sum(file.stat().st_size for file in published.glob("*.safetensors"))
    assert num_bytes > 400 * MIB > 1.5 * ALLOWED_BYTES
    own = load_apart(
        published,
        way="own",
        codec="nf4",
        tier="disk",
        cache=tmp_path,
        limit_bytes=ALLOWED_BYTES + 64 * MIB,
    )
    assert own.outcome == "loaded"
    assert own.peak_bytes < ALLOWED_BYTES
    (store,) = tmp_path.rglob("*.store")
    assert store.stat().st_size < 0.3 * num_bytes
    copy = load_apart(
        published,
        way="copy",
        codec="native",
        tier="ram",
        cache=tmp_path,
        limit_bytes=ALLOWED_BYTES + 64 * MIB,
    )
    assert copy.outcome.startswith("died")


@pytest.mark.exhaustive
def test_the_slab_of_the_next_start_is_as_large_as_the_store(
    published: Path, tmp_path: Path
) -> None:
    first, second = (
        load_apart(published, way="own", codec="nf4", tier="ram", cache=tmp_path) for _ in range(2)
    )
    (store,) = tmp_path.rglob("*.store")
    store_bytes = store.stat().st_size
    assert first.outcome == second.outcome == "loaded"
    assert first.peak_bytes < max(ALLOWED_BYTES, store_bytes + 64 * MIB)
    assert second.peak_bytes < store_bytes + 64 * MIB
