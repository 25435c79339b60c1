import errno
import os
import resource
import subprocess
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import Event, Thread
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from offload.engine.codecs.codec import NATIVE, codec_named
from offload.engine.host.pagelock import aligned_empty
from offload.engine.host.slab import Slab, lay_out
from offload.engine.host.store import FORMAT, MAGIC, FileReader, Store, StoreWriter, sole_builder
from offload.engine.memory_meter import held_bytes
from offload.errors import OffloadError, StoreError, TransferError
from offload.plan.facts.workload import PAGE_BYTES

pytestmark = pytest.mark.disk

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


def test_what_was_written_is_read_to_the_bit_and_mapped_to_the_bit(store: Store) -> None:
    tensors = store.tensors()
    expected = REST | weights(0) | weights(1) | weights(2)
    assert tensors.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(tensors[name], tensor)
        assert tensors[name].dtype == tensor.dtype
    for layer in range(NUM_LAYERS):
        assert torch.equal(read(store, layer), store.layer(layer))


def test_a_store_is_one_file_and_every_part_is_whole_pages(file: Path) -> None:
    assert sorted(p.name for p in file.parent.iterdir()) == ["a.store"]
    assert file.read_bytes().startswith(MAGIC)
    for name, (start, end) in places(file).items():
        assert start % PAGE_BYTES == 0
        assert name == "first page" or end % PAGE_BYTES == 0


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


@pytest.mark.parametrize("part", ["first page", "layer 0", "layer 2", "rest", "header"])
@pytest.mark.parametrize("where", ["begin", "middle", "end"])
def test_a_file_that_is_cut_off_anywhere_is_found(file: Path, part: str, where: str) -> None:
    start, end = places(file)[part]
    length = {"begin": start, "middle": (start + end) // 2, "end": end - 1}[where]
    os.truncate(file, length)
    with pytest.raises(StoreError, match=r"first page is not that of|bytes of [\d,]+; it must"):
        Store(file, identity=IDENTITY)


def test_a_file_that_has_grown_is_found(file: Path) -> None:
    with file.open("ab") as end:
        end.write(b"\0")
    with pytest.raises(StoreError, match=r"it has 98,305 bytes of 98,304"):
        Store(file, identity=IDENTITY)


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


@pytest.mark.parametrize("content", [b"", b"sluice store\n", b"GIF89a" * PAGE_BYTES])
def test_a_foreign_file_is_no_store(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "a.store").write_bytes(content)
    with pytest.raises(StoreError, match="first page is not that of a store"):
        Store(tmp_path / "a.store", identity=IDENTITY)


def test_a_store_of_another_format_says_which(file: Path) -> None:
    values = file.read_bytes()[len(MAGIC) :].split(b"\n")[0].rpartition(b" ")[0]
    newer = values.replace(f'"format": {FORMAT}'.encode(), b'"format": 99')
    line = newer + f" {zlib.crc32(newer):08x}\n".encode()
    with file.open("r+b") as page:
        page.write(MAGIC + line)
    with pytest.raises(StoreError, match=f"its format is 99, this version's is {FORMAT}"):
        Store(file, identity=IDENTITY)


def test_a_store_of_other_weights_says_in_what_they_differ(file: Path) -> None:
    other = IDENTITY | {"dtype": "bfloat16", "files": []}
    with pytest.raises(StoreError, match="it was made from other dtype and files"):
        Store(file, identity=other)


def test_an_absent_store_is_no_traceback(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="No such file or directory"):
        Store(tmp_path / "a.store", identity=IDENTITY)


# ------------------------------------------------------------------------------------------ writing


def test_a_writer_that_is_closed_leaves_nothing_behind(tmp_path: Path) -> None:
    writer = begin(tmp_path / "a.store")
    writer.put(0, 0, torch.ones(3, 4))
    assert [p.name for p in tmp_path.iterdir()] == ["a.store.partial"]
    writer.close()
    writer.close()
    assert list(tmp_path.iterdir()) == []


def test_a_link_in_the_place_of_a_store_in_the_making_is_not_followed(tmp_path: Path) -> None:
    mine = tmp_path / "mine"
    mine.write_text("ten years")
    (tmp_path / "a.store.partial").symlink_to(mine)
    begin(tmp_path / "a.store").close()
    assert mine.read_text() == "ten years"


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


def test_a_directory_that_cannot_be_written_is_a_named_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    message = r"file/a\.store cannot be written: (Not a directory|File exists)"
    with pytest.raises(TransferError, match=message), sole_builder(tmp_path / "file" / "a.store"):
        pass


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


def test_a_file_that_shrinks_while_it_is_read_is_a_named_error(large: Path) -> None:
    reader = FileReader(large, queue_depth=2, piece_bytes=PAGE_BYTES)
    os.truncate(large, 40 * PAGE_BYTES)
    with pytest.raises(TransferError, match=rf"at byte {40 * PAGE_BYTES}: the file ends there"):
        reader.read_into(0, aligned_empty(64 * PAGE_BYTES))
    reader.close()


def test_a_disk_that_fails_is_a_named_error(large: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reader = FileReader(large)

    def fail(*_: object) -> int:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(os, "preadv", fail)
    with pytest.raises(TransferError, match=r"cannot be read at byte 0: Input/output error"):
        reader.read_into(0, aligned_empty(PAGE_BYTES))
    reader.close()


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


def test_a_closed_reader_is_a_named_error(store: Store) -> None:
    store.close()
    store.close()
    with pytest.raises(OffloadError, match=r"a\.store was closed"):
        read(store, 0)


# ------------------------------------------------------------------------------------------- codecs


def test_encoded_tensors_are_read_back_with_their_form_and_shown_as_stand_ins(
    tmp_path: Path,
) -> None:
    nf4, file = codec_named("nf4"), tmp_path / "a.store"
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


def test_what_another_versions_codec_wrote_is_built_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "a.store"
    record = lay_out([nn.Parameter(torch.randn(8, 64))], [codec_named("nf4")])
    writer = StoreWriter(file, [record], [["weight"]])
    writer.put(0, 0, torch.randn(8, 64))
    writer.finish({}, IDENTITY)
    monkeypatch.setattr(type(codec_named("nf4")), "num_bytes", lambda *_: 17)
    with pytest.raises(StoreError, match="its nf4 is not this version's"):
        Store(file, identity=IDENTITY)
