import pytest

from offload.errors import MachineError
from offload.plan.machine.machine import named_machine, with_interconnect


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
