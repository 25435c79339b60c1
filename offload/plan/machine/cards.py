"""Cards that a plan knows by name, with the published figures of their makers.

The 16-bit rate is that of dense products with fp32 accumulation, which training needs. It is not
the figure with sparsity nor, for a GeForce, the one with fp16 accumulation, each of which is twice
as large. Sources, by `sheet`; if a sheet gives cores and boost clock but no rate, the rate is
computed from them, two operations per core and clock:

    ga102     NVIDIA Ampere GA102 whitepaper v2.1, appendix A: a GeForce multiplies bf16 at twice
              its fp32 rate. Cards that are not in it: nvidia.com's comparison of the 30 series.
    ada       NVIDIA Ada GPU architecture whitepaper v2.1, appendix A, by the same rule. Cards that
              are not in it: nvidia.com's comparison of the 40 series.
    blackwell NVIDIA RTX Blackwell GPU architecture whitepaper, appendix A, by the same rule. Cards
              that are not in it: nvidia.com's comparison of the 50 series.
    rtx-a     Datasheets of RTX A2000 to A6000: "tensor performance" is with sparsity, so half of
              it, which is four times fp32.
    rtx-ada   Datasheet of RTX 6000 Ada: a quarter of its fp8 rate with sparsity.
    rtx-pro   Datasheets of RTX PRO Blackwell: an eighth of the AI TOPS, which are fp4 with
              sparsity. Others measured 457 of 504 TFLOP/s on a PRO 6000, 257 of 295 on a PRO 5000.
    datasheet The card's own: A10, A100, B200 (HGX), H100, H200, L4, L40S, T4, V100 (PCIe).

`listed_mib` is the total of nvidia-smi, from lists that owners published: A10, A100, H100, L4, L40S
and T4 in github.com/modal-labs/modal-client/pull/2797, RTX 3060 in
geerlingguy/raspberry-pi-pcie-devices/issues/790, RTX 4090 in RLinf/RLinf/issues/255, RTX 5070 in
shkhln/libc6-shim/issues/14, RTX 5090 in noonghunna/club-3090/issues/1229; the others in logs in
public repositories on GitHub, where a search for the number with "MiB" finds the card's name.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from offload.registry import Registry

Line = Literal["consumer", "workstation", "server"]
Pcie = tuple[int, int]


@dataclass(frozen=True, kw_only=True, slots=True)
class Card:
    """Published figures of a card, and measurements."""

    memory_gib: float  # device memory, as the card is sold
    half_tflops: float  # dense products of 16-bit numbers, accumulated in fp32
    fp32_tflops: float  # arithmetic in fp32, without tensor cores
    memory_gb_per_s: float  # the bandwidth of device memory
    pcie: Pcie  # generation and lanes of its link
    line: Line  # the product line, which implies the kind of host
    sheet: str  # the source of the figures
    # Device memory that nvidia-smi lists; None if no such list was found.
    listed_mib: int | None = None
    has_bf16: bool = True  # whether it computes in bfloat16; cards before Ampere do not
    has_grouped_gemm: bool = False  # whether torch's grouped products are one kernel on it
    # Large products, as measured by others; of the H200 those of an MLP, by the kernel times of a
    # profile in tests/bench/results.
    measured_gemm_tflops: float | None = None
    # Causal attention, forward and backward, by the same profile.
    measured_attention_tflops: float | None = None
    # Large copies within device memory; of the H200 by `sluice probe`.
    measured_memory_gb_per_s: float | None = None
    # Arithmetic in fp32, as measured by others; of the H200 by `sluice probe`.
    measured_fp32_tflops: float | None = None
    # Copies to the device, as measured by others; of the H200 by `sluice probe`.
    measured_link_gb_per_s: float | None = None
    # Watts of the whole card at most, as published: "graphics card power" of a GeForce, board power
    # of a workstation card, thermal design power of a server card (of A100 the SXM board, of V100
    # the PCIe card); None where no published table or article was read.
    board_w: int | None = None
    # NVLink in each direction, half of the sum that the datasheet names.
    nvlink_gb_per_s: float | None = None


_LINES: Mapping[str, Line] = {
    **dict.fromkeys(("ga102", "ada", "blackwell"), "consumer"),
    **dict.fromkeys(("rtx-a", "rtx-ada", "rtx-pro"), "workstation"),
    "datasheet": "server",
}


def _card(
    sheet: str,
    pcie: Pcie,
    gib: float,
    half: float,
    fp32: float,
    memory: float,
    **others: Any,
) -> Card:
    return Card(
        memory_gib=gib,
        half_tflops=half,
        fp32_tflops=fp32,
        memory_gb_per_s=memory,
        pcie=pcie,
        line=_LINES[sheet],
        sheet=sheet,
        **others,
    )


_OURS: Mapping[str, Card] = {
    # (PCIe generation, lanes), GiB, TFLOP/s in 16 bits, TFLOP/s in fp32, GB/s
    "rtx3060": _card("ga102", (4, 16), 12, 25.5, 12.7, 360, listed_mib=12288, board_w=170),
    "rtx3060-8gb": _card("ga102", (4, 16), 8, 25.5, 12.7, 240),
    "rtx3060ti": _card("ga102", (4, 16), 8, 32.4, 16.2, 448, listed_mib=8192, board_w=200),
    "rtx3070": _card("ga102", (4, 16), 8, 40.6, 20.3, 448, listed_mib=8192, board_w=220),
    "rtx3070ti": _card("ga102", (4, 16), 8, 43.5, 21.7, 608, board_w=290),
    "rtx3080": _card("ga102", (4, 16), 10, 59.5, 29.8, 760, listed_mib=10240, board_w=320),
    "rtx3080-12gb": _card("ga102", (4, 16), 12, 61.3, 30.6, 912),
    "rtx3080ti": _card("ga102", (4, 16), 12, 68.2, 34.1, 912, listed_mib=12288, board_w=350),
    "rtx3090": _card("ga102", (4, 16), 24, 71, 35.6, 936, listed_mib=24576, board_w=350),
    "rtx3090ti": _card("ga102", (4, 16), 24, 80, 40, 1008, listed_mib=24564, board_w=450),
    "rtx4060": _card("ada", (4, 8), 8, 30.2, 15.1, 272, listed_mib=8188, board_w=115),
    "rtx4060ti": _card("ada", (4, 8), 16, 44.1, 22.1, 288, listed_mib=16380, board_w=165),
    "rtx4060ti-8gb": _card("ada", (4, 8), 8, 44.1, 22.1, 288, listed_mib=8188, board_w=160),
    "rtx4070": _card("ada", (4, 16), 12, 58.3, 29.1, 504, listed_mib=12282),
    "rtx4070super": _card("ada", (4, 16), 12, 71, 35.5, 504, listed_mib=12282),
    "rtx4070ti": _card("ada", (4, 16), 12, 80.2, 40.1, 504, listed_mib=12282, board_w=285),
    "rtx4070tisuper": _card("ada", (4, 16), 16, 88.2, 44.1, 672, listed_mib=16376),
    "rtx4080": _card("ada", (4, 16), 16, 97.5, 48.7, 717, listed_mib=16376, board_w=320),
    "rtx4080super": _card("ada", (4, 16), 16, 104.4, 52.2, 736, listed_mib=16376),
    "rtx4090": _card("ada", (4, 16), 24, 165.2, 82.6, 1008, listed_mib=24564, board_w=450),
    "rtx5060": _card("blackwell", (5, 8), 8, 38.4, 19.2, 448, listed_mib=8151, board_w=145),
    "rtx5060ti": _card("blackwell", (5, 8), 16, 47.4, 23.7, 448, listed_mib=16311, board_w=180),
    "rtx5060ti-8gb": _card("blackwell", (5, 8), 8, 47.4, 23.7, 448, board_w=180),
    "rtx5070": _card("blackwell", (5, 16), 12, 61.7, 30.9, 672, listed_mib=12227, board_w=250),
    "rtx5070ti": _card("blackwell", (5, 16), 16, 87.9, 43.9, 896, listed_mib=16303, board_w=300),
    "rtx5080": _card("blackwell", (5, 16), 16, 112.6, 56.3, 960, listed_mib=16303, board_w=360),
    "rtx5090": Card(
        memory_gib=32,
        board_w=575,
        listed_mib=32607,
        half_tflops=209.5,
        fp32_tflops=104.8,
        memory_gb_per_s=1792,
        pcie=(5, 16),
        line="consumer",
        sheet="blackwell",
        measured_gemm_tflops=238,
        measured_memory_gb_per_s=1400,
        measured_link_gb_per_s=56,
    ),
    "rtxa2000": _card("rtx-a", (4, 16), 6, 31.9, 8, 288, listed_mib=6138, board_w=70),
    "rtxa2000-12gb": _card("rtx-a", (4, 16), 12, 31.9, 8, 288, board_w=70),
    "rtxa4000": _card("rtx-a", (4, 16), 16, 76.7, 19.2, 448, listed_mib=16376),
    "rtxa4500": _card("rtx-a", (4, 16), 20, 94.6, 23.7, 640, listed_mib=20470, board_w=200),
    "rtxa5000": _card("rtx-a", (4, 16), 24, 111.1, 27.8, 768, listed_mib=24564),
    "rtxa5500": _card("rtx-a", (4, 16), 24, 136.4, 34.1, 768, board_w=230),
    "rtxa6000": _card("rtx-a", (4, 16), 48, 154.8, 38.7, 768, listed_mib=49140, board_w=300),
    "rtx6000ada": _card("rtx-ada", (4, 16), 48, 364.2, 91.1, 960, listed_mib=49140),
    "rtxpro4000": _card("rtx-pro", (5, 16), 24, 187.6, 46.9, 672, listed_mib=24467, board_w=140),
    "rtxpro4500": _card("rtx-pro", (5, 16), 32, 219.8, 54.9, 896, listed_mib=32623, board_w=200),
    "rtxpro5000": _card("rtx-pro", (5, 16), 48, 294.8, 73.7, 1344, listed_mib=48935, board_w=300),
    "rtxpro6000": _card("rtx-pro", (5, 16), 96, 503.8, 126, 1792, listed_mib=97887, board_w=600),
    "t4": _card(
        "datasheet", (3, 16), 16, 65, 8.1, 320, listed_mib=15360, board_w=70, has_bf16=False
    ),
    "v100": _card(
        "datasheet", (3, 16), 16, 112, 14, 900, listed_mib=16160, board_w=250, has_bf16=False
    ),
    "v100-32gb": _card("datasheet", (3, 16), 32, 112, 14, 900, board_w=250, has_bf16=False),
    "a10": _card("datasheet", (4, 16), 24, 125, 31.2, 600, listed_mib=23028),
    "l4": _card("datasheet", (4, 16), 24, 121, 30.3, 300, listed_mib=23034),
    "l40s": _card("datasheet", (4, 16), 48, 362, 91.6, 864, listed_mib=46068),
    "a100": Card(
        memory_gib=80,
        listed_mib=81920,
        half_tflops=312,
        fp32_tflops=19.5,
        memory_gb_per_s=2039,
        pcie=(4, 16),
        line="server",
        sheet="datasheet",
        board_w=400,
        nvlink_gb_per_s=300,
    ),
    "h100": Card(
        memory_gib=80,
        nvlink_gb_per_s=450,
        listed_mib=81559,
        half_tflops=989,
        fp32_tflops=67,
        memory_gb_per_s=3350,
        pcie=(5, 16),
        line="server",
        sheet="datasheet",
        has_grouped_gemm=True,
        measured_gemm_tflops=800,
        measured_memory_gb_per_s=2400,
        measured_fp32_tflops=25,
    ),
    "h200": Card(
        memory_gib=140,
        nvlink_gb_per_s=450,
        listed_mib=143771,
        half_tflops=989,
        fp32_tflops=67,
        memory_gb_per_s=4800,
        pcie=(5, 16),
        line="server",
        sheet="datasheet",
        has_grouped_gemm=True,
        measured_gemm_tflops=814,
        measured_attention_tflops=598,
        measured_memory_gb_per_s=3480,
        measured_fp32_tflops=50,
        measured_link_gb_per_s=55.5,
    ),
    "b200": Card(
        memory_gib=179,
        nvlink_gb_per_s=900,
        listed_mib=183359,
        half_tflops=2250,
        fp32_tflops=80,
        memory_gb_per_s=8000,
        pcie=(5, 16),
        line="server",
        sheet="datasheet",
        has_grouped_gemm=True,
    ),
}

CARDS = Registry("cards", _OURS, Card)
