"""All findings of a machine together: of this one, and of one that a test makes up."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from finetune.commands.doctor import can_train, findings_json
from offload.engine.host.nvml import Driver, find_driver
from offload.probe import doctor
from offload.probe.doctor import Finding, check_up
from tests.doubles import A_DRIVER, FakeDriver

ROOT = Path(__file__).parents[5]


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "DISK_S", 0.0)
    monkeypatch.setattr(doctor, "DISK_BYTES", 64 * 2**20)


def by_name(findings: tuple[Finding, ...]) -> dict[str, Finding]:
    found = {one.name: one for one in findings}
    assert len(found) == len(findings)
    return found


def test_this_machine_has_a_line_for_each_and_nothing_private(tmp_path: Path) -> None:
    findings = check_up(tmp_path / "sluice" / "stores")
    found = by_name(findings)
    names = {"system", "versions", "torch", "GPU", "page locks", "processor", "memory", "swap"}
    assert names | {"cache disk"} <= set(found)
    assert all(one.hint for one in findings if one.status != "ok")
    assert not any(one.hint for one in findings if one.status == "ok")
    words = json.loads(findings_json(findings))
    assert [row["name"] for row in words["findings"]] == [one.name for one in findings]
    shown = json.dumps(words)
    assert str(Path.home()) not in shown
    assert str(tmp_path) not in shown
    assert not list(tmp_path.rglob("*.tmp"))


def test_every_card_is_listed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    found = by_name(check_up(tmp_path, nvml=FakeDriver(A_DRIVER)))
    assert found["GPU"].value == "driver 570.86.10, for CUDA up to 12.8"
    assert found["GPU 1"].value == (
        "NVIDIA GeForce RTX 4060 Ti, sm_89, 15.0 GiB free of 16.0 GiB,"
        " 2 other processes compute on it"
    )
    assert found["GPU 0 link"].value.startswith("PCIe 3.0 x8 of 4.0 x16, at most 7.9 GB/s")
    assert found["torch"].status == "warning"  # a card, and a build that does not see it


def test_on_another_system_there_is_nothing_more_to_look_at(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("platform.system", lambda: "Darwin")
    (found,) = check_up(tmp_path)
    assert (found.name, found.status) == ("system", "error")


def test_a_driver_without_cards_has_no_line_of_a_card(tmp_path: Path) -> None:
    driver = Driver(version="570.86.10", cuda=(12, 8), gpus=())
    found = by_name(check_up(tmp_path, nvml=FakeDriver(driver)))
    assert not [name for name in found if name.startswith("GPU ")]


@pytest.mark.gpu
def test_a_card_s_link_is_read_while_it_copies(tmp_path: Path) -> None:
    driver = find_driver()
    assert driver is not None
    found = by_name(check_up(tmp_path))
    links = [one.value for name, one in found.items() if name.endswith(" link")]
    assert len(links) == sum(gpu.link is not None for gpu in driver.gpus)  # some VMs hide it
    assert not any("while idle" in link for link in links)
    assert "it matters with a GPU only" not in found["page locks"].value
    assert found["torch"].status == "ok"


def test_without_torch_the_doctor_reports_that_training_is_impossible() -> None:
    code = (
        "import sys\nfrom finetune.app import main\n"
        "sys.modules['torch'] = None\n"
        "main(['doctor', '--json'])\n"
    )
    words = [sys.executable, "-c", code]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 1, done.stderr
    found = {row["name"]: row for row in json.loads(done.stdout)["findings"]}
    assert found["torch"]["status"] == "error"
    assert found["torch"]["value"].startswith("cannot be imported: ModuleNotFoundError")
    assert found["memory"]["value"]


def test_a_warning_is_no_obstacle_and_an_error_is() -> None:
    slow = Finding(name="disk", value="slow", status="warning", hint="another")
    broken = Finding(name="torch", value="missing", status="error", hint="install it")
    assert can_train([slow])
    assert not can_train([slow, broken])
