import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM, PretrainedConfig, Qwen3Config, Qwen3MoeConfig

from offload.engine.host.pagelock import aligned_empty, trim_heap
from offload.engine.host.slab import Slab, SlabHandle, give_back, lay_out
from offload.errors import OffloadError
from offload.plan.facts.workload import PAGE_BYTES

ROOT = Path(__file__).parents[5]
MIB = 2**20

OPEN = """
import sys
import torch
from torch import nn
from offload.engine.host.slab import lay_out
from offload.engine.host.slab import Slab, SlabHandle

pid, descriptor, num_bytes, layout, shape = sys.argv[1:6]
handle = SlabHandle(
    pid=int(pid), descriptor=int(descriptor), num_bytes=int(num_bytes), layout=layout
)
records = [lay_out([nn.Parameter(torch.empty(int(shape)))]) for _ in range(2)]
"""


def parameters(*shapes: tuple[int, ...], dtype: torch.dtype = torch.float32) -> list[nn.Parameter]:
    return [nn.Parameter(torch.randn(shape).to(dtype), requires_grad=False) for shape in shapes]


def pss_bytes(pid: int, *, address: int | None = None) -> int:
    """Return a process's share of a slab, or of all slabs: what n processes map counts 1/n each."""
    total, is_slab = 0, False
    for line in Path(f"/proc/{pid}/smaps").read_text().splitlines():
        if "-" in line.split(" ")[0]:
            is_here = address is None or line.startswith(f"{address:x}-")
            is_slab = "sluice-slab" in line and is_here
        elif is_slab and line.startswith("Pss:"):
            total += int(line.split()[1]) * 1024
    return total


def in_another_process(slab: Slab, code: str, *, shape: int) -> "subprocess.Popen[str]":
    handle = slab.handle
    values = (handle.pid, handle.descriptor, handle.num_bytes, handle.layout, shape)
    return subprocess.Popen(
        [sys.executable, "-c", OPEN + code, *map(str, values)],
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )


@pytest.fixture
def filled() -> Slab:
    """A slab of two layers of 4 MiB."""
    slab = Slab([lay_out(parameters((MIB,))) for _ in range(2)])
    for layer in range(2):
        slab.take(layer)
    return slab


# ------------------------------------------------------------------------------------------- layout


ATTENTION: dict[str, Any] = {"num_attention_heads": 32, "head_dim": 128, "vocab_size": 151936}
QWEN3_8B = Qwen3Config(
    **ATTENTION,
    hidden_size=4096,
    intermediate_size=12288,
    num_hidden_layers=36,
    num_key_value_heads=8,
)
EXPERTS: dict[str, Any] = {
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 768,
}
QWEN3_30B_A3B = Qwen3MoeConfig(
    **ATTENTION,
    **EXPERTS,
    hidden_size=2048,
    intermediate_size=6144,
    num_hidden_layers=48,
    num_key_value_heads=4,
)


@pytest.mark.parametrize(
    ("config", "weight_bytes"), [(QWEN3_8B, 13_892_143_104), (QWEN3_30B_A3B, 59_819_581_440)]
)
def test_a_slab_of_a_real_model_is_at_most_two_percent_larger_than_its_weights(
    config: PretrainedConfig, weight_bytes: int
) -> None:
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    records = [lay_out(list(layer.parameters())) for layer in model.model.layers]
    assert sum(record.weight_bytes for record in records) == weight_bytes
    slab = Slab(records)  # takes no memory until it is filled
    assert weight_bytes <= slab.num_bytes <= 1.02 * weight_bytes
    assert slab.reason == ""
    assert os.fstat(slab.handle.descriptor).st_size == slab.num_bytes
    slab.close()


def test_records_are_whole_pages_so_that_a_disk_block_can_be_read_into_each() -> None:
    records = [lay_out(parameters((3,), (1000,))), lay_out(parameters((5000,)))]
    assert [record.num_bytes for record in records] == [2 * PAGE_BYTES, 5 * PAGE_BYTES]
    slab = Slab(records)
    assert [slab.layer(i).data_ptr() % PAGE_BYTES for i in range(2)] == [0, 0]
    assert [slab.layer(i).numel() for i in range(2)] == [2 * PAGE_BYTES, 5 * PAGE_BYTES]


def test_aligned_memory_is_exact_and_on_a_page() -> None:
    memory = aligned_empty(PAGE_BYTES + 1)
    assert (memory.numel(), memory.dtype) == (PAGE_BYTES + 1, torch.uint8)
    assert memory.data_ptr() % PAGE_BYTES == 0
    assert aligned_empty(0).numel() == 0


def test_freed_blocks_with_a_live_one_between_go_back_to_the_system() -> None:
    def resident_bytes() -> int:
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")

    blocks = [torch.ones(60_000, dtype=torch.uint8) for _ in range(2000)]  # below malloc's mmap
    filled_bytes = resident_bytes()
    live = blocks[::100]
    del blocks
    trim_heap()
    assert filled_bytes - resident_bytes() > 80 * MIB
    assert all(block.all() for block in live)


# ---------------------------------------------------------------------------------- take, give back


def test_a_layer_that_is_taken_aliases_the_slab_and_given_back_does_not() -> None:
    weights = parameters((3, 4), (5,), dtype=torch.bfloat16)
    before = [weight.clone() for weight in weights]
    slab = Slab([lay_out(weights)])
    slab.take(0)
    assert all(map(torch.equal, weights, before))
    slab.layer(0).zero_()
    assert not any(weight.any() for weight in weights)
    give_back(slab.records[0], slab.layer(0), torch.device("cpu"))
    slab.layer(0).fill_(255)
    assert not any(weight.any() for weight in weights)
    slab.close()


def test_put_copies_values_in_and_returns_their_view() -> None:
    weights = parameters((3, 4), (5,))
    slab = Slab([lay_out(weights)])
    view = slab.put(0, 1, weights[1].data)
    assert torch.equal(view, weights[1])
    assert view.data_ptr() == slab.layer(0).data_ptr() + slab.records[0].fields[1].offset
    assert not slab.layer(0)[: slab.records[0].fields[0].num_bytes].any()


def test_a_memory_policy_is_set_before_any_page_of_the_slab_exists() -> None:
    seen: list[tuple[int, int, int]] = []

    def note(address: int, num_bytes: int) -> str:
        pages = Path("/proc/self/smaps").read_text().split(f"{address:x}-")[1]
        resident = next(line for line in pages.splitlines() if line.startswith("Rss:"))
        seen.append((address, num_bytes, int(resident.split()[1])))
        return "noted"

    slab = Slab([lay_out(parameters((5000,)))], before_touch=note)
    assert seen == [(slab.layer(0).data_ptr(), slab.num_bytes, 0)]
    assert slab.policy == "noted"


# -------------------------------------------------------------------------------------------- adopt


def test_parameters_that_lie_in_a_record_are_its_fields_and_others_are_not() -> None:
    weights = parameters((3, 4), (5,), (6,))
    slab = Slab([lay_out(weights)])
    slab.take(0)
    rewrapped = nn.Parameter(weights[1].data, requires_grad=False)
    elsewhere = parameters((5,))[0]
    transposed = nn.Parameter(weights[0].data.T, requires_grad=False)
    slab.adopt([[elsewhere, rewrapped, transposed, nn.Parameter(torch.empty(0))]])
    (field,) = slab.records[0].fields
    assert field.parameter is rewrapped
    assert torch.equal(field.view(slab.layer(0)), weights[1])
    assert slab.records[0].num_bytes == slab.layer(0).numel() == slab.num_bytes


def test_a_parameter_that_is_longer_than_its_field_is_not_in_the_record() -> None:
    weights = parameters((3,), (5,))
    slab = Slab([lay_out(weights), lay_out(parameters((5,)))])
    slab.take(0)
    whole = slab.layer(0).view(torch.float32)
    across, inside = (nn.Parameter(whole[:num], requires_grad=False) for num in (4, 3))
    slab.adopt([[across, inside], [inside]])
    assert [field.parameter for field in slab.records[0].fields] == [inside]
    assert slab.records[1].fields == ()


def test_a_slab_that_no_parameter_lies_in_is_refused() -> None:
    weights = parameters((3, 4))
    slab = Slab([lay_out(weights)])
    with pytest.raises(OffloadError, match="no parameter of the model is where its layers were"):
        slab.adopt([weights])


# ------------------------------------------------------------------------------------ two processes


@pytest.mark.thorough
def test_two_processes_see_the_same_bytes_which_take_memory_once(filled: Slab) -> None:
    code = """
slab = Slab.open(handle, records)
print([int(slab.layer(i).to(torch.int64).sum()) for i in range(2)], flush=True)
sys.stdin.read()
"""
    child = in_another_process(filled, code, shape=MIB)
    with child:
        assert child.stdout is not None
        sums = [int(filled.layer(i).to(torch.int64).sum()) for i in range(2)]
        assert child.stdout.readline() == f"{sums}\n"
        shares = [pss_bytes(os.getpid(), address=filled.address), pss_bytes(child.pid)]
        child.communicate()
    assert sum(shares) == filled.num_bytes
    assert shares[0] == shares[1]


@pytest.mark.thorough
def test_values_put_into_a_slab_of_another_process_are_not_copied(filled: Slab) -> None:
    code = """
slab = Slab.open(handle, records)
view = slab.put(1, 0, torch.zeros(int(shape)))
print(bool(view.any()))
"""
    child = in_another_process(filled, code, shape=MIB)
    assert child.communicate()[0] == "True\n"


@pytest.mark.slow
def test_only_a_writable_mapping_can_be_written(filled: Slab) -> None:
    code = "Slab.open(handle, records, is_writable={}).layer(1).fill_(7)"
    child = in_another_process(filled, code.format("False"), shape=MIB)
    child.communicate()
    assert child.returncode == -signal.SIGSEGV
    assert not bool((filled.layer(1) == 7).all())
    child = in_another_process(filled, code.format("True"), shape=MIB)
    child.communicate()
    assert child.returncode == 0
    assert bool((filled.layer(1) == 7).all())


def test_a_slab_of_other_layers_is_refused(filled: Slab) -> None:
    records = [lay_out(parameters((MIB,), dtype=torch.bfloat16)) for _ in range(2)]
    with pytest.raises(OffloadError, match=r"holds other layers than this process's model"):
        Slab.open(filled.handle, records)


def test_a_slab_whose_process_has_ended_is_a_named_error(filled: Slab) -> None:
    child = subprocess.Popen([sys.executable, "-c", ""])
    child.wait()
    gone = SlabHandle(
        pid=child.pid, descriptor=9, num_bytes=filled.num_bytes, layout=filled.handle.layout
    )
    with pytest.raises(OffloadError, match=rf"process {child.pid} cannot be opened: No such file"):
        Slab.open(gone, filled.records)


def test_a_closed_slab_is_not_shared_any_more(filled: Slab) -> None:
    filled.close()
    filled.close()
    with pytest.raises(OffloadError, match="cannot be shared: it was closed"):
        _ = filled.handle


def test_a_system_without_memfd_has_a_slab_that_says_why_it_is_not_shared(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    weights = parameters((3, 4))
    before = weights[0].clone()
    monkeypatch.delattr(os, "memfd_create")
    slab = Slab([lay_out(weights)])
    slab.take(0)
    assert torch.equal(weights[0], before)
    assert slab.reason == "this system has no memfd_create"
    with pytest.raises(OffloadError, match="cannot be shared: this system has no memfd_create"):
        _ = slab.handle


@pytest.mark.parametrize(
    ("name", "reason"),
    [("memfd_create", "memfd_create: No"), ("ftruncate", "a memfd of 0.00 GiB: No")],
)
def test_a_container_that_forbids_memfd_has_a_slab_that_says_so(
    name: str, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> int:
        raise PermissionError(1, "No")

    monkeypatch.setattr(os, name, refuse)
    slab = Slab([lay_out(parameters((3, 4)))])
    slab.take(0)
    assert slab.reason == reason
