"""Cards, machines and what connects them."""

import json
from dataclasses import fields, replace
from typing import get_args

import pytest

from offload.errors import MachineError
from offload.plan.machine.cards import CARDS
from offload.plan.machine.machine import (
    GIB,
    MIB,
    ExpertsImplementation,
    Implementation,
    Machine,
    Network,
    Node,
    Rate,
    described_machine,
    is_described,
    named_machine,
    with_interconnect,
)

OPTIONAL = {"network", "others_frac"}


@pytest.mark.parametrize("name", CARDS)
def test_every_card_survives_json_exactly(name: str) -> None:
    for dtype in ("float32", "bfloat16"):
        if dtype == "float32" or CARDS[name].has_bf16:
            machine = named_machine(name, dtype=dtype)
            assert Machine.from_json(machine.to_json()) == machine


@pytest.mark.parametrize("name", ["rtx5090", "RTX 5090", "rtx-5090", "Rtx_5090", "5090"])
def test_a_name_is_found_whatever_its_case_spaces_and_dashes(name: str) -> None:
    assert named_machine(name) == named_machine("rtx5090")


def test_the_5090_has_the_rates_that_owners_measured() -> None:
    machine = named_machine("rtx5090")
    assert machine.gemm_flops_per_s == Rate(value=238e12, source="measured by others")
    assert machine.h2d_bytes_per_s.value == 56e9
    assert machine.h2d_duplex_bytes_per_s.value == pytest.approx(51e9)


@pytest.mark.parametrize(
    ("name", "key"),
    [
        ("RTX 3060 8 GB", "rtx3060-8gb"),
        ("RTX 3060 12GB", "rtx3060"),
        ("NVIDIA GeForce RTX 4070 Ti SUPER", "rtx4070tisuper"),
        ("NVIDIA RTX 6000 Ada Generation", "rtx6000ada"),
        ("RTX PRO 6000 Blackwell", "rtxpro6000"),
        ("a6000", "rtxa6000"),
        ("Tesla V100 16GB", "v100"),
    ],
)
def test_a_card_is_found_by_the_name_on_its_box(name: str, key: str) -> None:
    assert named_machine(name, dtype="float32").name == key


@pytest.mark.parametrize("name", CARDS)
def test_figures_of_a_card_agree(name: str) -> None:
    """16-bit rates are dense and accumulate in fp32; memory is nearly what is sold."""
    card = CARDS[name]
    tensor_cores = {"consumer": 2, "workstation": 4}.get(card.line)  # of a GeForce half of them
    if tensor_cores is not None:
        assert card.half_tflops / card.fp32_tflops == pytest.approx(tensor_cores, rel=0.02)
    listed_gib = (card.listed_mib or card.memory_gib * 1024) / 1024
    assert 0.93 < listed_gib / card.memory_gib <= 1.01
    assert named_machine(name, dtype="float32").vram_bytes < card.memory_gib * GIB
    assert 50 <= (card.board_w or 50) <= 1000


@pytest.mark.parametrize(
    ("name", "half", "frac", "memory", "link"),
    [
        ("rtx3070", 40.6, 0.93, 448, 25),
        ("rtx4060", 30.2, 0.93, 272, 12.5),
        ("rtx5070ti", 87.9, 0.93, 896, 56),
        ("rtxa6000", 154.8, 0.8, 768, 25),
        ("rtxpro5000", 294.8, 0.8, 1344, 56),
        ("l40s", 362, 0.8, 864, 25),
        ("b200", 2250, 0.8, 8000, 56),
    ],
)
def test_a_card_reaches_a_share_of_the_published_rates(
    name: str, half: float, frac: float, memory: float, link: float
) -> None:
    machine = named_machine(name)
    assert machine.gemm_flops_per_s.value == pytest.approx(frac * half * 1e12)
    assert machine.memory_bytes_per_s.value == pytest.approx(0.55 * memory * 1e9)
    assert machine.h2d_bytes_per_s.value == link * 1e9


@pytest.mark.parametrize("name", ["t4", "v100", "v100-32gb"])
def test_cards_before_ampere_are_refused_for_bfloat16(name: str) -> None:
    with pytest.raises(MachineError, match=f"{name} does not compute in bfloat16") as refused:
        named_machine(name)
    assert "`model.dtype: float16` or `float32`" in refused.value.hint
    machine = named_machine(name, dtype="float32")
    assert machine.gemm_flops_per_s == machine.vector_flops_per_s
    half = named_machine(name, dtype="float16")
    assert half.gemm_flops_per_s.value > 2 * machine.gemm_flops_per_s.value


def test_a_card_in_float32_multiplies_at_its_fp32_rate() -> None:
    machine = named_machine("rtx4090", dtype="float32")
    assert machine.dtype == "float32"
    assert machine.gemm_flops_per_s.value == pytest.approx(0.66 * 82.6e12)


FOUR = '{"memory_gib": 24, "memory_gb_per_s": 936, "half_tflops": 71, "link_gb_per_s": 25}'


def test_a_card_of_four_numbers_is_that_card_but_for_what_is_assumed() -> None:
    assert is_described(FOUR)
    assert not is_described(named_machine("rtx3090").to_json())
    found, known = described_machine("mine", FOUR), named_machine("rtx3090")
    assert found.ram_bytes == known.ram_bytes
    assert found.vram_bytes == int(0.995 * 24 * GIB) - 2048 * MIB  # not listed, with a desktop
    for name in ("memory_bytes_per_s", "h2d_bytes_per_s"):
        assert getattr(found, name).value == getattr(known, name).value
    assert found.gemm_flops_per_s.value == pytest.approx(0.8 * 71e12)
    assert found.gemm_flops_per_s.source == "given x 0.8"
    assert found.h2d_bytes_per_s.source == "given"
    assert found.vector_flops_per_s.source == "assumed: 0.25 x 16-bit rate"
    assert Machine.from_json(found.to_json()) == found


@pytest.mark.parametrize(
    ("changes", "what"),
    [
        ({"half_tflops": None}, "half_tflops: null"),
        ({"memory_gib": -24}, "memory_gib: -24"),
        ({"link_gb_per_s": True}, "link_gb_per_s: true"),
        ({"memory_gb_per_s": 1e300}, "memory_gb_per_s: 1e+300"),
        ({"colour": "red"}, 'colour: "red"'),
    ],
)
def test_a_card_of_other_numbers_is_refused(changes: dict[str, object], what: str) -> None:
    text = json.dumps(json.loads(FOUR) | changes)
    with pytest.raises(MachineError, match="the card file of mine has") as refused:
        described_machine("mine", text)
    assert what in refused.value.what
    assert "memory_gib, memory_gb_per_s, half_tflops, link_gb_per_s" in refused.value.limit


def test_a_rate_from_a_datasheet_says_so() -> None:
    assert named_machine("rtx4090").gemm_flops_per_s.source == "datasheet x 0.93"
    assert (
        named_machine("rtx4090").launch_s.source == "assumed: half of what an H200's host measures"
    )


@pytest.mark.parametrize(
    ("name", "way"), [("rtx3060", "triton"), ("a100", "triton"), ("h200", "grouped_mm")]
)
def test_a_card_is_assumed_to_multiply_experts_in_its_fastest_way(name: str, way: str) -> None:
    found = named_machine(name).experts_implementation
    assert (found.value, found.source) == (way, "assumed until a run measures it")


def test_experts_are_a_loop_by_eager_and_where_torch_has_no_kernel() -> None:
    loops = {
        (way, has_kernel): replace(
            named_machine("h100"),
            experts_implementation=Implementation(value=way, source="test"),
            has_grouped_gemm=has_kernel,
        ).loops_over_experts
        for way in get_args(ExpertsImplementation)
        for has_kernel in (False, True)
    }
    assert {key for key, is_loop in loops.items() if is_loop} == {
        ("eager", False),
        ("eager", True),
        ("grouped_mm", False),
    }


@pytest.mark.parametrize(
    ("name", "listed_mib", "reserved_mib"),
    [
        ("rtx3060", 12288, 2048),
        ("rtx4060ti", 16380, 2048),
        ("rtx4090", 24564, 2048),
        ("rtx5080", 16303, 2048),
        ("rtx5090", 32607, 2048),
        ("h100", 81559, 512),
    ],
)
def test_a_card_has_what_nvidia_smi_lists_but_for_its_driver_and_a_desktop(
    name: str, listed_mib: int, reserved_mib: int
) -> None:
    machine = named_machine(name)
    assert machine.vram_bytes == (listed_mib - reserved_mib) * MIB
    assert machine.desktop_bytes == (reserved_mib - 512) * MIB
    headless = named_machine(name, is_headless=True)
    assert headless.vram_bytes == (listed_mib - 512) * MIB
    assert headless.desktop_bytes == 0


def test_a_system_has_its_part_of_what_is_installed() -> None:
    machine = named_machine("rtx4090")
    assert machine.ram_bytes == machine.pinned_bytes == 60 * GIB
    assert machine.installed_bytes == 64 * GIB
    assert named_machine("rtx4090", ram_bytes=3 * GIB).ram_bytes == 0


def test_memory_and_link_of_the_host_can_be_given() -> None:
    machine = named_machine("rtx4090", ram_bytes=32 * GIB, link_bytes_per_s=12e9)
    assert (machine.ram_bytes, machine.pinned_bytes) == (28 * GIB, 28 * GIB)
    assert machine.h2d_bytes_per_s == Rate(value=12e9, source="given")
    assert machine.h2d_duplex_bytes_per_s.value < 12e9


def test_an_unknown_name_is_refused_with_the_nearest() -> None:
    with pytest.raises(MachineError, match=r"(?s)'rtx 5095'; known are rtx3060.*hint: .*`rtx5090`"):
        named_machine("rtx 5095")


@pytest.mark.parametrize(
    ("name", "maker"),
    [
        ("rx7900xtx", "AMD"),
        ("Radeon PRO W7900", "AMD"),
        ("mi300", "AMD"),
        ("arc-b580", "Intel"),
        ("m3-max", "Apple"),
        ("m4", "Apple"),
    ],
)
def test_a_device_of_another_maker_is_refused_with_what_trains(name: str, maker: str) -> None:
    says = f"'{name}' is a device of {maker}; training runs on NVIDIA cards"
    with pytest.raises(MachineError, match=rf"{says}(?s:.*)hint: `--machine rtx4090`"):
        named_machine(name)


@pytest.mark.parametrize("name", ["m60", "gtx1080", "rtx9999", "a6000x"])
def test_a_card_that_is_not_known_is_of_no_other_maker(name: str) -> None:
    with pytest.raises(MachineError, match=f"no machine is called '{name}'"):
        named_machine(name)


def edited(**changes: object) -> str:
    return json.dumps(json.loads(named_machine("h100").to_json()) | changes)


@pytest.mark.parametrize("key", sorted({x.name for x in fields(Machine)} - OPTIONAL))
def test_a_file_without_a_key_is_refused_by_the_key(key: str) -> None:
    values = json.loads(named_machine("h100").to_json())
    del values[key]
    with pytest.raises(MachineError, match=f"no key '{key}'"):
        Machine.from_json(json.dumps(values))


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("{", "not JSON"),
        pytest.param("9" * 5000, "not JSON that .* 5000 digits", id="5000 digits"),
        pytest.param("[" * 100_000, "not JSON that .* recursion", id="100000 brackets"),
        pytest.param(
            edited(launch_s={"value": 10**400, "source": "measured"}),
            "'launch_s' is 1000",
            id="1e400",
        ),
        ("[1]", r"machine is \[1\], not an object"),
        (edited(gem_flops_per_s=1), r"'gem_flops_per_s' \(nearest: 'gemm_flops_per_s'\)"),
        (edited(launch_s={"value": 0.0, "source": "measured"}), "'launch_s' is 0.0, not a number"),
        (edited(launch_s={"value": float("nan"), "source": "measured"}), "'launch_s' is nan"),
        (edited(launch_s={"value": 1.0}), "'launch_s' has no key 'source'"),
        (edited(launch_s={"value": 1.0, "source": 3}), "source of 'launch_s' is 3"),
        (edited(disk_bytes_per_s=3), "'disk_bytes_per_s' is 3, not an object"),
        (edited(nodes=3), "'nodes' is 3, not a list"),
        (edited(nodes=[3]), "one of 'nodes' is 3, not an object"),
        (edited(nodes=[{"number": 0}]), "one of 'nodes' has no key 'num_cpus'"),
        (edited(vram_bytes=1.5), "'vram_bytes' is 1.5, not a whole number"),
        (edited(ram_bytes=-1), "'ram_bytes' is -1"),
        (edited(has_grouped_gemm=1), "'has_grouped_gemm' is 1, not true or false"),
        (edited(device="tpu"), "'device' is 'tpu', not cuda or cpu"),
        (
            edited(experts_implementation={"value": "loop", "source": "me"}),
            "'experts_implementation' is 'loop', not eager, grouped_mm or triton",
        ),
        (edited(experts_implementation="eager"), "'experts_implementation' is 'eager', not an obj"),
        (
            edited(experts_implementation={"value": "eager", "source": None}),
            "source of 'experts_implementation' is None, not text",
        ),
    ],
)
def test_a_broken_file_is_refused_with_what_is_wrong_in_it(text: str, why: str) -> None:
    with pytest.raises(MachineError, match=why):
        Machine.from_json(text)


def test_a_file_of_an_older_version_is_refused_with_what_to_do() -> None:
    values = json.loads(named_machine("h100").to_json())
    del values["experts_implementation"]
    message = (
        r"machine has no key 'experts_implementation'; it holds what `probe --save` writes"
        r"\n\nhint: measure again: `sluice probe --save FILE`"
    )
    with pytest.raises(MachineError, match=message):
        Machine.from_json(json.dumps(values))


def test_nodes_and_the_disk_survive_json_exactly() -> None:
    rate = Rate(value=8.3e9, source="measured")
    node = Node(number=1, num_cpus=8, ram_bytes=32 * GIB, is_near=True, copy_bytes_per_s=rate)
    machine = replace(named_machine("h100"), disk_bytes_per_s=rate, nodes=(node, node))
    assert Machine.from_json(machine.to_json()) == machine


def test_a_busy_machine_is_marked_in_its_file() -> None:
    machine = replace(named_machine("h100"), others_frac=0.63)
    assert Machine.from_json(machine.to_json()) == machine
    assert "others_frac" not in named_machine("h100").to_json()


def test_a_network_survives_json_and_is_left_out_of_a_machine_that_knows_none() -> None:
    network = Network(
        world_size=4,
        latency_s=Rate(value=3e-4, source="measured"),
        bytes_per_s=Rate(value=1.17e8, source="measured"),
    )
    alone = named_machine("h100")
    machine = replace(alone, network=network)
    assert Machine.from_json(machine.to_json()) == machine
    assert "network" not in json.loads(alone.to_json())
    values = json.loads(machine.to_json())
    del values["network"]["latency_s"]
    with pytest.raises(MachineError, match="'network' has no key 'latency_s'"):
        Machine.from_json(json.dumps(values))


def test_a_rate_that_json_cannot_write_short_survives() -> None:
    machine = replace(named_machine("h100"), launch_s=Rate(value=0.1 + 0.2, source="measured"))
    assert Machine.from_json(machine.to_json()) == machine


# ------------------------------------------------------------------------------------- interconnect


@pytest.mark.parametrize(
    ("name", "bytes_per_s", "source"),
    [
        ("nvlink", 0.8 * 450e9, "assumed: 80% of NVLink's 450 GB/s each way"),
        ("pcie", 56e9 * 51 / 56, "assumed: a copy, "),
        ("25", 25e9, "given"),
    ],
)
def test_a_card_is_connected_as_it_is_asked_for(name, bytes_per_s, source) -> None:
    network = with_interconnect(named_machine("h100"), name, world_size=8).network
    assert network is not None
    assert network.world_size == 8
    assert network.bytes_per_s.value == pytest.approx(bytes_per_s)
    assert network.bytes_per_s.source.startswith(source)


def test_what_is_not_known_is_refused_with_what_is() -> None:
    with pytest.raises(MachineError, match=r"no NVLink is known of rtx4090; known are a100, h100"):
        with_interconnect(named_machine("rtx4090"), "nvlink", world_size=2)
    for name in ("ethernet", "0", "-3", "nan", "inf"):
        with pytest.raises(MachineError, match=rf"--interconnect {name}; .*\n\nhint: `--inter"):
            with_interconnect(named_machine("h100"), name, world_size=2)
