"""The traced memory of a plain training step against runs that others measured.

Source: fitcheck-llm 0.3.1 (MIT), data/measurements/final-t4-20260921.json runs 10 and 11, and
canifinetune 0.4.1 (MIT), benchmarks/results, Qwen2.5-1.5B-Instruct, 1 x 1024, not checkpointed, and
Qwen2.5-0.5B-Instruct, 1 x 1024, bf16.
"""

from dataclasses import replace

import pytest
import torch

from tests.bench.bench_memory import GIB, config_of
from tests.bench.plain_step import PlainRun, cublas_bytes, trace_plain_run

pytestmark = pytest.mark.bench

ON_T4 = PlainRun(
    config=config_of("meta-llama/Llama-3.2-1B-Instruct"),
    dtype=torch.float16,
    quant="nf4",
    rank=16,
    targets=("q_proj", "k_proj", "v_proj", "o_proj"),
    optimizer="adamw",
    batch_size=1,
    seq_len=1024,
    is_checkpointed=True,
    attention="efficient",
    capability=(7, 5),
    keeps_output=False,
)
# Without checkpointing each layer's scores in fp32 are there at the peak: grouped keys in fp32 make
# torch take the math kernel.
ON_4080 = replace(
    ON_T4,
    config=config_of("Qwen/Qwen2.5-1.5B-Instruct"),
    dtype=torch.bfloat16,
    quant="nf4+dq",
    optimizer="paged_adamw_8bit",
    is_checkpointed=False,
    attention=None,
    capability=(8, 9),
    keeps_output=True,
)
# Its former logits, in bfloat16, stand where the next ones in float32 would fit.
PLAIN_ON_4080 = replace(
    ON_4080,
    config=config_of("Qwen/Qwen2.5-0.5B-Instruct"),
    quant="none",
    is_checkpointed=True,
)


@pytest.mark.filterwarnings("ignore::FutureWarning")  # transformers' own names
@pytest.mark.parametrize(
    ("run", "allocated_gib", "reserved_gib"),
    [
        pytest.param(ON_T4, 3.636, 3.932, id="T4"),
        pytest.param(
            replace(ON_T4, attention="eager"),
            3.641,
            3.963,
            id="T4, eager",
            marks=pytest.mark.exhaustive,
        ),
        pytest.param(
            ON_4080, 9.3413, 9.5527, id="4080, not checkpointed", marks=pytest.mark.exhaustive
        ),
        pytest.param(PLAIN_ON_4080, 3.0324, 3.7949, id="4080, bf16", marks=pytest.mark.slow),
    ],
)
def test_peaks_are_those_that_others_measured(
    run: PlainRun, allocated_gib: float, reserved_gib: float
) -> None:
    peaks = trace_plain_run(run)
    assert peaks.allocated_bytes / GIB == pytest.approx(allocated_gib, rel=0.01)
    assert peaks.reserved_bytes / GIB == pytest.approx(reserved_gib, rel=0.06)


def test_a_workspace_of_cublas_is_8_mib_and_an_eighth_before_hopper() -> None:
    assert cublas_bytes((8, 9)) == 8.125 * 2**20
    assert cublas_bytes((9, 0)) == 32 * 2**20
