"""Weights that wait in host memory or on disk."""

import errno
import os
import resource
import signal
import subprocess
import sys
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import Event, Thread
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from transformers import AutoModelForCausalLM, PretrainedConfig, Qwen3Config, Qwen3MoeConfig

from offload.engine.codec import NATIVE, form_named
from offload.engine.host import numa, pagelock
from offload.engine.host.embedding import HostEmbedding
from offload.engine.host.numa import HostPlace
from offload.engine.host.pagelock import aligned_empty, trim_heap
from offload.engine.host.slab import HostBlocks, Slab, SlabHandle, Stash, give_back, lay_out
from offload.engine.host.store import FORMAT, MAGIC, FileReader, Store, StoreWriter, sole_builder
from offload.engine.host.weights import HostWeights
from offload.engine.memory_meter import held_bytes
from offload.engine.streams import CpuDevice
from offload.errors import OffloadError, StoreError, TransferError
from offload.plan.facts.workload import PAGE_BYTES
from offload.plan.machine.machine import GIB, Tier
from offload.plan.schedule.op import Kind, Op
from tests.doubles import FakeLocker

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


# -------------------------------------------------------------------------------------------- store


IDENTITY = {"files": [["model.safetensors", 10, 20]], "dtype": "float32", "codec": "native"}
SHAPES = ((3, 4), (5000,), (2, 3, 7))
NUM_LAYERS = 3


def weights(layer: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(layer)
    return {
        f"layers.{layer}.{i}": torch.randn(shape, generator=generator)
        for i, shape in enumerate(SHAPES)
    }


REST = {"embed": torch.arange(3000.0), "steps": torch.tensor(3), "mask": torch.ones(2, 2).bool()}


def begin(path: Path) -> StoreWriter:
    records = [
        lay_out([nn.Parameter(tensor) for tensor in weights(layer).values()])
        for layer in range(NUM_LAYERS)
    ]
    return StoreWriter(path, records, [list(weights(i)) for i in range(NUM_LAYERS)])


def write(path: Path, *, identity: dict[str, Any] = IDENTITY) -> None:
    writer = begin(path)
    for layer in range(NUM_LAYERS):
        for index, tensor in enumerate(weights(layer).values()):
            writer.put(layer, index, tensor)
    writer.finish(REST, identity)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    write(tmp_path / "a.store")
    return tmp_path / "a.store"


@pytest.fixture
def store(file: Path) -> Iterator[Store]:
    store = Store(file, identity=IDENTITY)
    yield store
    store.close()


def read(store: Store, layer: int) -> torch.Tensor:
    target = aligned_empty(store.records[layer].num_bytes)
    store.read_into(layer, target)
    return target


def flip(file: Path, offset: int) -> None:
    content = bytearray(file.read_bytes())
    content[offset] ^= 1
    file.write_bytes(content)


def places(file: Path) -> dict[str, tuple[int, int]]:
    """Return the begin and end of each part of a store."""
    store = Store(file, identity=IDENTITY)
    header = store._header
    store.close()
    parts = {f"layer {i}": (p.offset, p.offset + p.num_bytes) for i, p in enumerate(header.layers)}
    parts["rest"] = (header.rest.offset, header.rest.offset + header.rest.num_bytes)
    return {"first page": (0, 100), **parts, "header": (parts["rest"][1], file.stat().st_size)}


# --------------------------------------------------------------------------------------- what is in


@pytest.mark.disk
def test_what_was_written_is_read_to_the_bit_and_mapped_to_the_bit(store: Store) -> None:
    tensors = store.tensors()
    expected = REST | weights(0) | weights(1) | weights(2)
    assert tensors.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(tensors[name], tensor)
        assert tensors[name].dtype == tensor.dtype
    for layer in range(NUM_LAYERS):
        assert torch.equal(read(store, layer), store.layer(layer))


@pytest.mark.disk
def test_a_store_is_one_file_and_every_part_is_whole_pages(file: Path) -> None:
    assert sorted(p.name for p in file.parent.iterdir()) == ["a.store"]
    assert file.read_bytes().startswith(MAGIC)
    for name, (start, end) in places(file).items():
        assert start % PAGE_BYTES == 0
        assert name == "first page" or end % PAGE_BYTES == 0


@pytest.mark.disk
def test_mapped_parameters_are_adopted_and_the_rest_is_not(store: Store) -> None:
    tensors = store.tensors()
    groups = [
        [nn.Parameter(tensors[name], requires_grad=False) for name in weights(layer)]
        for layer in range(NUM_LAYERS)
    ]
    groups[0].append(nn.Parameter(tensors["embed"]))
    store.adopt(groups)
    slab = Slab(store.records)
    for layer in range(NUM_LAYERS):
        assert len(store.records[layer].fields) == len(SHAPES)
        store.read_into(layer, slab.layer(layer))
        slab.alias(layer)
        assert all(map(torch.equal, groups[layer], weights(layer).values()))


@pytest.mark.disk
def test_what_is_around_the_layers_is_freed_once_a_model_has_it_elsewhere(tmp_path: Path) -> None:
    writer = begin(tmp_path / "a.store")
    for layer in range(NUM_LAYERS):
        for index, tensor in enumerate(weights(layer).values()):
            writer.put(layer, index, tensor)
    num_bytes = 64 * 2**20
    writer.finish({"embed": torch.ones(num_bytes // 4)}, IDENTITY)
    store = Store(tmp_path / "a.store", identity=IDENTITY)
    tensors = store.tensors()
    names = [list(weights(layer)) for layer in range(NUM_LAYERS)]
    groups = [[nn.Parameter(tensors[x], requires_grad=False) for x in one] for one in names]
    store.adopt(groups)
    before = held_bytes()
    del tensors  # as a model on a card has copied it there
    assert before - held_bytes() > 0.9 * num_bytes
    store.close()


@pytest.mark.disk
def test_layers_may_come_in_any_order_and_a_field_may_be_missing(tmp_path: Path) -> None:
    writer = begin(tmp_path / "a.store")
    for layer in (2, 0, 1):
        tensors = list(weights(layer).values())
        for index in (2, 0, 1) if layer else (2, 0):
            stand_in = writer.put(layer, index, tensors[index])
            assert stand_in.shape == tensors[index].shape
            assert stand_in.untyped_storage().nbytes() == 4  # it takes no memory
    assert len(writer.names) == 8
    writer.finish(REST, IDENTITY)
    store = Store(tmp_path / "a.store", identity=IDENTITY)
    assert store.tensors().keys() == REST.keys() | writer.names
    assert torch.equal(store.tensors()["layers.0.2"], weights(0)["layers.0.2"])
    store.close()


# ------------------------------------------------------------------------------------------- damage


@pytest.mark.disk
@pytest.mark.parametrize("part", ["first page", "layer 0", "layer 2", "rest", "header"])
@pytest.mark.parametrize("where", ["begin", "middle", "end"])
def test_a_file_that_is_cut_off_anywhere_is_found(file: Path, part: str, where: str) -> None:
    start, end = places(file)[part]
    length = {"begin": start, "middle": (start + end) // 2, "end": end - 1}[where]
    os.truncate(file, length)
    with pytest.raises(StoreError, match=r"first page is not that of|bytes of [\d,]+; it must"):
        Store(file, identity=IDENTITY)


@pytest.mark.disk
def test_a_file_that_has_grown_is_found(file: Path) -> None:
    with file.open("ab") as end:
        end.write(b"\0")
    with pytest.raises(StoreError, match=r"it has 98,305 bytes of 98,304"):
        Store(file, identity=IDENTITY)


@pytest.mark.disk
@pytest.mark.parametrize(
    ("part", "why"),
    [
        ("first page", "its first page is not that of a store"),
        ("header", "its header is damaged"),
        ("rest", "the weights outside the layers are not what was written"),
    ],
)
def test_a_flipped_bit_outside_the_layers_is_found_at_open(file: Path, part: str, why: str) -> None:
    flip(file, places(file)[part][0] + 50)
    with pytest.raises(StoreError, match=f"a.store cannot be used: {why}"):
        Store(file, identity=IDENTITY)


@pytest.mark.disk
def test_a_flipped_bit_in_a_layer_is_found_at_its_first_read_and_the_file_removed(
    file: Path,
) -> None:
    flip(file, places(file)["layer 1"][0] + 5000)
    store = Store(file, identity=IDENTITY)
    read(store, 0)
    assert file.exists()
    with pytest.raises(TransferError, match=r"layer 1 in .*a\.store is not what was written"):
        read(store, 1)
    assert not file.exists()
    store.close()


@pytest.mark.disk
@settings(max_examples=60, deadline=None)
@given(share=st.floats(0, 1, exclude_max=True), bit=st.integers(0, 7))
def test_no_flipped_bit_changes_a_weight_unnoticed(
    share: float, bit: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    file = tmp_path_factory.mktemp("store") / "a.store"
    write(file)
    content = bytearray(file.read_bytes())
    content[int(share * len(content))] ^= 1 << bit
    file.write_bytes(content)
    try:
        store = Store(file, identity=IDENTITY)
    except StoreError:
        return
    try:
        for layer in range(NUM_LAYERS):
            read(store, layer)
    except TransferError:
        return
    else:
        expected = REST | weights(0) | weights(1) | weights(2)
        assert all(torch.equal(t, expected[name]) for name, t in store.tensors().items())
    finally:
        store.close()


@pytest.mark.disk
@pytest.mark.parametrize("content", [b"", b"sluice store\n", b"GIF89a" * PAGE_BYTES])
def test_a_foreign_file_is_no_store(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "a.store").write_bytes(content)
    with pytest.raises(StoreError, match="first page is not that of a store"):
        Store(tmp_path / "a.store", identity=IDENTITY)


@pytest.mark.disk
def test_a_store_of_another_format_says_which(file: Path) -> None:
    values = file.read_bytes()[len(MAGIC) :].split(b"\n")[0].rpartition(b" ")[0]
    newer = values.replace(f'"format": {FORMAT}'.encode(), b'"format": 99')
    line = newer + f" {zlib.crc32(newer):08x}\n".encode()
    with file.open("r+b") as page:
        page.write(MAGIC + line)
    with pytest.raises(StoreError, match=f"its format is 99, this version's is {FORMAT}"):
        Store(file, identity=IDENTITY)


@pytest.mark.disk
def test_a_store_of_other_weights_says_in_what_they_differ(file: Path) -> None:
    other = IDENTITY | {"dtype": "bfloat16", "files": []}
    with pytest.raises(StoreError, match="it was made from other dtype and files"):
        Store(file, identity=other)


@pytest.mark.disk
def test_an_absent_store_is_no_traceback(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="No such file or directory"):
        Store(tmp_path / "a.store", identity=IDENTITY)


# ------------------------------------------------------------------------------------------ writing


@pytest.mark.disk
def test_a_writer_that_is_closed_leaves_nothing_behind(tmp_path: Path) -> None:
    writer = begin(tmp_path / "a.store")
    writer.put(0, 0, torch.ones(3, 4))
    assert [p.name for p in tmp_path.iterdir()] == ["a.store.partial"]
    writer.close()
    writer.close()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.disk
def test_a_link_in_the_place_of_a_store_in_the_making_is_not_followed(tmp_path: Path) -> None:
    mine = tmp_path / "mine"
    mine.write_text("ten years")
    (tmp_path / "a.store.partial").symlink_to(mine)
    begin(tmp_path / "a.store").close()
    assert mine.read_text() == "ten years"


@pytest.mark.disk
def test_until_a_new_store_is_whole_the_old_one_stays(file: Path) -> None:
    writer = begin(file)
    writer.put(0, 0, torch.ones(3, 4))
    store = Store(file, identity=IDENTITY)
    writer.close()
    assert torch.equal(store.tensors()["layers.0.0"], weights(0)["layers.0.0"])
    store.close()


@contextmanager
def file_size_limit(num_bytes: int) -> Iterator[None]:
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.mark.disk
@pytest.mark.parametrize("limit_bytes", [0, PAGE_BYTES, 20 * PAGE_BYTES, 23 * PAGE_BYTES])
def test_a_disk_that_is_full_at_any_point_is_a_named_error_and_leaves_nothing(
    tmp_path: Path, limit_bytes: int
) -> None:
    with (
        pytest.raises(TransferError, match=r"a\.store needs 0\.00 GiB and [\d.]+ GiB is free \("),
        file_size_limit(limit_bytes),
    ):
        write(tmp_path / "a.store")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.disk
def test_a_small_file_system_is_found_to_be_full_before_the_first_layer(tmp_path: Path) -> None:
    mount = ["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(tmp_path)]
    if os.geteuid() or subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("mounting a small file system needs root")
    try:
        with pytest.raises(TransferError, match=r"GiB is free \(No space left on device\)"):
            begin(tmp_path / "a.store")
        assert list(tmp_path.iterdir()) == []
    finally:
        subprocess.run(["umount", str(tmp_path)], check=True)


@pytest.mark.disk
def test_a_directory_that_cannot_be_written_is_a_named_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    message = r"file/a\.store cannot be written: (Not a directory|File exists)"
    with pytest.raises(TransferError, match=message), sole_builder(tmp_path / "file" / "a.store"):
        pass


@pytest.mark.disk
def test_another_builder_waits_until_the_first_has_ended(tmp_path: Path) -> None:
    has_begun, has_ended = Event(), Event()

    def build() -> None:
        with sole_builder(tmp_path / "a.store"):
            assert has_ended.is_set()
        has_begun.set()

    with sole_builder(tmp_path / "a.store"):
        other = Thread(target=build)
        other.start()
        assert not has_begun.wait(0.2)
        has_ended.set()
    assert has_begun.wait(10)
    other.join()


# ------------------------------------------------------------------------------------------ reading


@pytest.fixture
def large(tmp_path: Path) -> Path:
    file = tmp_path / "large"
    file.write_bytes(os.urandom(64 * PAGE_BYTES))
    return file


@pytest.mark.disk
@pytest.mark.parametrize("queue_depth", [1, 3, 16])
@pytest.mark.parametrize("num_pages", [1, 3, 7, 100])
def test_pieces_in_flight_arrive_in_their_places(
    large: Path, queue_depth: int, num_pages: int
) -> None:
    reader = FileReader(large, queue_depth=queue_depth, piece_bytes=num_pages * PAGE_BYTES)
    target = aligned_empty(50 * PAGE_BYTES)
    reader.read_into(14 * PAGE_BYTES, target)
    assert bytes(target.numpy().data) == large.read_bytes()[14 * PAGE_BYTES :]
    reader.close()


def refuse_direct(monkeypatch: pytest.MonkeyPatch, *, at: str) -> None:
    really_open, really_read = os.open, os.preadv

    def opened(path: Path, flags: int, mode: int = 0o777) -> int:
        if flags & os.O_DIRECT and at == "open":
            raise OSError(errno.EINVAL, "Invalid argument")
        return really_open(path, flags, mode)

    def preadv(descriptor: int, buffers: list[memoryview], offset: int) -> int:
        flags = int(Path(f"/proc/self/fdinfo/{descriptor}").read_text().split()[3], 8)
        if flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, "Invalid argument")
        return really_read(descriptor, buffers, offset)

    monkeypatch.setattr(os, "open", opened)
    monkeypatch.setattr(os, "preadv", preadv)


@pytest.mark.disk
@pytest.mark.parametrize(("at", "verb"), [("open", "opened"), ("read", "read")])
def test_a_file_system_without_o_direct_is_read_through_the_cache_and_says_so(
    file: Path, at: str, verb: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    refuse_direct(monkeypatch, at=at)
    store = Store(file, identity=IDENTITY)
    assert store.mode == "buffered"
    assert store.reason == f"O_DIRECT is refused when the file is {verb}: Invalid argument"
    assert torch.equal(read(store, 1), store.layer(1))
    store.close()


@pytest.mark.disk
def test_a_file_that_shrinks_while_it_is_read_is_a_named_error(large: Path) -> None:
    reader = FileReader(large, queue_depth=2, piece_bytes=PAGE_BYTES)
    os.truncate(large, 40 * PAGE_BYTES)
    with pytest.raises(TransferError, match=rf"at byte {40 * PAGE_BYTES}: the file ends there"):
        reader.read_into(0, aligned_empty(64 * PAGE_BYTES))
    reader.close()


@pytest.mark.disk
def test_a_disk_that_fails_is_a_named_error(large: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reader = FileReader(large)

    def fail(*_: object) -> int:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(os, "preadv", fail)
    with pytest.raises(TransferError, match=r"cannot be read at byte 0: Input/output error"):
        reader.read_into(0, aligned_empty(PAGE_BYTES))
    reader.close()


@pytest.mark.disk
def test_nothing_is_written_to_the_target_once_a_read_has_failed(large: Path) -> None:
    reader = FileReader(large, queue_depth=2, piece_bytes=PAGE_BYTES)
    running: list[int] = []

    def work(start: int) -> None:
        running.append(start)
        if start == 0:
            raise TransferError("lost", limit="-", hint="-")
        running.remove(start)

    with pytest.raises(TransferError, match="lost"):
        reader.each(work, range(100))
    assert running == [0]
    reader.close()


@pytest.mark.disk
def test_a_closed_reader_is_a_named_error(store: Store) -> None:
    store.close()
    store.close()
    with pytest.raises(OffloadError, match=r"a\.store was closed"):
        read(store, 0)


# ------------------------------------------------------------------------------------------- codecs


@pytest.mark.disk
def test_encoded_tensors_are_read_back_with_their_form_and_shown_as_stand_ins(
    tmp_path: Path,
) -> None:
    nf4, file = form_named("nf4"), tmp_path / "a.store"
    values, norm = torch.randn(8, 64), torch.randn(8)
    record = lay_out([nn.Parameter(values), nn.Parameter(norm)], [nf4, NATIVE])
    writer = StoreWriter(file, [record], [["weight", "norm"]])
    writer.put(0, 1, norm)  # in whichever order they come
    writer.put(0, 0, values)
    writer.finish({}, IDENTITY)
    store = Store(file, identity=IDENTITY)
    assert store.tensors()["weight"].isnan().all()
    assert torch.equal(store.tensors()["norm"], norm)
    store.adopt([[nn.Parameter(tensor) for tensor in store.layer_tensors(0)]])
    memory = aligned_empty(record.num_bytes)
    store.read_into(0, memory)
    decoded = torch.empty(record.decoded_bytes, dtype=torch.uint8)
    for field in store.records[0].fields:
        field.decode(memory, decoded)
    found = {field.codec.name: field.decoded(decoded) for field in store.records[0].fields}
    written = torch.empty(nf4.num_bytes(values.shape, values.dtype), dtype=torch.uint8)
    nf4.encode(values, written)
    expected = torch.empty_like(values)
    nf4.decode(written, expected)
    assert torch.equal(found["nf4"], expected)
    assert torch.equal(found["native"], norm)
    store.close()


@pytest.mark.disk
def test_what_another_versions_codec_wrote_is_built_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "a.store"
    record = lay_out([nn.Parameter(torch.randn(8, 64))], [form_named("nf4")])
    writer = StoreWriter(file, [record], [["weight"]])
    writer.put(0, 0, torch.randn(8, 64))
    writer.finish({}, IDENTITY)
    monkeypatch.setattr(type(form_named("nf4")), "num_bytes", lambda *_: 17)
    with pytest.raises(StoreError, match="its nf4 is not this version's"):
        Store(file, identity=IDENTITY)


# ------------------------------------------------------------------------------------------ weights


CPU = torch.device("cpu")
LAYER_BYTES = 2**20


def layers(num: int = 6) -> list[list[nn.Parameter]]:
    return [
        [nn.Parameter(torch.full((LAYER_BYTES // 4,), float(n)), requires_grad=False)]
        for n in range(num)
    ]


Open = Callable[..., HostWeights]


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Open:
    """Return what settles layers as for a device whose memory a made-up locker locks."""

    def open_with(
        locker: FakeLocker | None, *, tier: Tier = "ram", groups: list[list[nn.Parameter]]
    ) -> HostWeights:
        monkeypatch.setattr(pagelock, "open_locker", lambda _device, _descriptor: locker)
        store_dir = tmp_path if tier == "disk" else None
        codecs = [[NATIVE] * len(group) for group in groups]
        return HostWeights(
            groups,
            codecs,
            backing=None,
            tier=tier,
            store_dir=store_dir,
            torch_device=CPU,
            others_bytes=0,
        )

    return open_with


def test_a_slab_that_is_locked_needs_no_thread_to_issue_its_loads(opened: Open) -> None:
    locker = FakeLocker(GIB)
    host = opened(locker, groups=layers())
    assert (host.is_staged, host.staging, host.pinned_bytes) == (False, (), 6 * LAYER_BYTES)
    assert "all 6.00 MiB of layers are page-locked" in host.notes[0]
    host.close()
    assert locker.locked == {}


def test_memory_that_layers_leave_for_a_slab_goes_back_to_the_system(opened: Open) -> None:
    """Glibc keeps freed blocks once one of almost 32 MiB was freed, if memory above is in use."""
    torch.ones(31 * 2**20, dtype=torch.uint8)
    groups = layers(96)
    above = torch.ones(LAYER_BYTES)
    before = held_bytes()
    host = opened(None, groups=groups)
    assert held_bytes() - before < 24 * LAYER_BYTES
    assert above.all()
    host.close()


def test_a_slab_over_the_limit_is_staged_by_a_thread(opened: Open) -> None:
    host = opened(FakeLocker(5 * LAYER_BYTES), groups=layers())
    assert host.is_staged
    assert (len(host.staging), host.piece_bytes) == (4, LAYER_BYTES)
    host.close()


def test_pageable_loads_are_issued_by_a_thread_without_buffers(opened: Open) -> None:
    """By the caller's thread they would hold up the visits: the driver makes it wait for each."""
    host = opened(FakeLocker(0), groups=layers())
    assert (host.is_staged, host.staging) == (True, ())
    host.close()


def test_a_first_layer_of_which_all_trains_does_not_hide_where_the_slab_starts(
    opened: Open,
) -> None:
    locker = FakeLocker(GIB)
    host = opened(locker, groups=[[], *layers()])
    assert 0 not in locker.locked
    assert list(locker.locked.values()) == [6 * LAYER_BYTES]
    host.close()


def test_what_became_of_the_memory_policy_is_told(
    opened: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = HostPlace(node=1, cpus=frozenset(), reason="near node 1")
    monkeypatch.setattr(numa, "place_near", lambda _device: place)
    monkeypatch.setattr(numa, "_LinuxCalls", RefusedCalls)
    host = opened(FakeLocker(GIB), groups=layers())
    assert host.notes[-2] == "near node 1"
    assert host.notes[-1].startswith("memory could not be bound to NUMA node 1 (Operation not")
    host.close()


class RefusedCalls:
    """A container in which no policy may be set."""

    def __init__(self, _libnuma: object) -> None:
        pass

    def inherited_mode(self) -> int:
        raise PermissionError(1, "Operation not permitted")


# ------------------------------------------------------------------------------------ blocks


def blocks_of(locker: FakeLocker | None, *, is_anywhere: bool = True) -> HostBlocks:
    return HostBlocks(
        locker=locker, before_touch=lambda _address, _num_bytes: "", is_anywhere=is_anywhere
    )


def test_a_tensor_that_is_alone_in_its_memory_is_locked_where_it_is() -> None:
    values, locker = torch.randn(300, 40), FakeLocker(GIB)
    blocks = blocks_of(locker)
    held = blocks.hold(values)
    assert held.data_ptr() == values.data_ptr()
    assert locker.locked == {values.data_ptr(): values.nbytes}
    blocks.close()
    assert locker.locked == {}
    assert blocks_of(None).hold(values).data_ptr() == values.data_ptr()


@pytest.mark.parametrize("why", ["not alone", "a node is nearer", "not lockable there"])
def test_a_tensor_that_cannot_stay_where_it_is_is_copied_once(why: str) -> None:
    values, locker = torch.randn(300, 40), FakeLocker(GIB)
    if why == "not alone":
        values = torch.randn(9000, 40)[:300]
    if why == "not lockable there":
        own, register = values.data_ptr(), locker.register

        def refuse(address: int, num_bytes: int) -> str | None:
            return "of a file" if address == own else register(address, num_bytes)

        locker.register = refuse  # type: ignore[method-assign]
    blocks = blocks_of(locker, is_anywhere=why != "a node is nearer")
    held = blocks.hold(values)
    assert held.data_ptr() != values.data_ptr()
    assert torch.equal(held.view(torch.float32).view(300, 40), values)
    assert locker.locked == {held.data_ptr(): values.nbytes}
    blocks.close()
    assert locker.locked == {}


def test_a_stash_that_grows_unlocks_the_memory_that_it_leaves() -> None:
    """CUDA takes memory that was unmapped and mapped anew for locked still, and refuses it."""
    locker = FakeLocker(GIB)
    blocks = blocks_of(locker)
    stash = Stash("inputs", allocate_host=blocks.allocate, free_host=blocks.free, torch_device=CPU)
    for size in (10_000, 20_000, 5_000, 40_000):
        stash.prepare({(0, 0): size, (1, 0): size}, num_buffers=1)
    assert list(locker.locked.values()) == [80_000]
    blocks.close()
    assert locker.locked == {}


def test_a_block_that_cannot_be_locked_is_an_error_with_the_reason() -> None:
    with pytest.raises(
        TransferError, match=r"page-locking 1\.00 GiB of host memory failed: not 1073741824; what"
    ):
        blocks_of(FakeLocker(0)).allocate(GIB)


# ---------------------------------------------------------------------------------------- embedding


IDS = torch.tensor([[5, 1, 5], [9, 1, 0]])


def stash() -> Stash:
    return Stash(
        "rows",
        allocate_host=lambda num: torch.zeros(num, dtype=torch.uint8),
        free_host=lambda _block: None,
        torch_device=torch.device("cpu"),
    )


def held_on_host(module: nn.Embedding) -> HostEmbedding:
    return HostEmbedding(
        nn.ModuleDict({"table": module}),
        module,
        rows=stash(),
        head=None,
        is_head_on_host=False,
    )


@pytest.fixture
def module() -> nn.Embedding:
    torch.manual_seed(0)
    return nn.Embedding(12, 6).requires_grad_(requires_grad=False)


@pytest.fixture
def host(module: nn.Embedding) -> Iterator[HostEmbedding]:
    held = held_on_host(module)
    yield held
    held.let_go()


def brought(host: HostEmbedding, ids: torch.Tensor) -> Op:
    """Bring the rows of one pass, and return the op of its front."""
    (num_bytes,) = host.prepare({0: ids})
    look_up = Op(kind=Kind.LOOK_UP, micro_batch=0, buffer=1, num_bytes=num_bytes)
    host.look_up(look_up)
    host.bring(look_up._replace(kind=Kind.ROWS), CpuDevice())
    return look_up._replace(kind=Kind.FRONT)


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32])
def test_any_tokens_of_a_pass_are_looked_up_in_its_rows_and_nowhere_else(
    module: nn.Embedding, host: HostEmbedding, dtype: torch.dtype
) -> None:
    expected = module.weight.detach().clone()
    front = brought(host, IDS.to(dtype))
    module.weight.data.zero_()  # what is read from now on was brought
    with host.present(front):
        assert torch.equal(module(IDS.to(dtype)), expected[IDS])
        assert torch.equal(module(IDS[:1, 1:]), expected[IDS[:1, 1:]])  # a part, as of packed rows
        assert torch.equal(module(IDS.repeat(1, 2)), expected[IDS.repeat(1, 2)])
    assert not module(IDS).any()  # without rows, from the weight itself


def test_a_token_whose_row_was_not_brought_is_no_number(
    module: nn.Embedding, host: HostEmbedding
) -> None:
    with host.present(brought(host, IDS)):
        found = module(torch.tensor([0, 2, 9, 11]))
    assert found.isnan().all(dim=1).tolist() == [False, True, False, True]
    assert torch.equal(found[0], module.weight[0])


def test_what_nobody_reads_takes_no_lookup(module: nn.Embedding, host: HostEmbedding) -> None:
    with host.unread():
        found = module(torch.full((2, 3), 10**6))  # no such token
    assert found.shape == (2, 3, 6)
    assert not found.any()


def test_a_weight_that_ranks_share_is_not_copied(module: nn.Embedding) -> None:
    expected = module.weight.detach().clone()
    own = Slab([lay_out(list(module.parameters()))])
    own.take(0)
    other = nn.Embedding(12, 6).requires_grad_(requires_grad=False)
    opened = Slab.open(own.handle, [lay_out(list(other.parameters()))])
    opened.take(0)
    for slab in (own, opened):
        slab.close()  # both have mapped it
    places = [one.weight.data_ptr() for one in (module, other)]
    for one in (module, other):
        held = held_on_host(one)
        assert torch.equal(one(IDS), expected[IDS])
        held.let_go()
    assert [one.weight.data_ptr() for one in (module, other)] == places
    module.weight.data[5] = 7.0
    assert other.weight[5].tolist() == [7.0] * 6  # it is the same memory


def test_buffers_grow_to_the_largest_step_and_are_kept(host: HostEmbedding) -> None:
    few, many = torch.tensor([[1]]), torch.arange(12)[None]
    sizes = [host.prepare({0: ids}) for ids in (few, many, few)]
    assert sizes == [(256 + 2 * 24,), (256 + 13 * 24,), (256 + 2 * 24,)]
    assert host.arenas[1].num_bytes == 2 * sizes[1][0]
    assert host.prepare({0: many, 1: few}) == (*sizes[1], *sizes[0])
