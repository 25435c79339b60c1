"""What is uploaded to a hub, as what, and what is refused."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from tests.command import run
from tests.hub import Hub, ask, hub


@pytest.fixture
def served(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    with hub(tmp_path / "hub") as one:
        ask(one, monkeypatch, token="writer")
        yield one


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """Return a folder as `merge` writes it."""
    folder = tmp_path / "merged"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    (folder / "README.md").write_text('AutoModelForCausalLM.from_pretrained("MODEL")')
    (folder / "manifest.json").write_text("{}")
    save_file({"weight": torch.ones(2)}, folder / "model.safetensors")
    return folder


def test_a_model_is_uploaded_with_its_card_and_private(served: Hub, model: Path, capsys) -> None:
    assert run("push", model, "--repo", "small") == 0
    shown = capsys.readouterr().out
    address = f"{served.variables['HF_ENDPOINT']}/own/small"
    assert shown.startswith(f"Uploading 3 files, 0.0 MiB, to {address}")
    assert shown.endswith(f"Pushed: {address} (private)\n")
    (asked,) = served.created
    assert asked["name"] == "small"
    assert (served.folder / "own" / "small" / ".unlisted").exists()
    there = served.folder / "own" / "small"
    names = {file.name for file in there.iterdir()} - {".unlisted"}
    assert names == {"README.md", "config.json", "model.safetensors"}
    assert (there / "README.md").read_text() == (
        'AutoModelForCausalLM.from_pretrained("own/small")'
    )
    same = (there / "model.safetensors", model / "model.safetensors")
    assert same[0].read_bytes() == same[1].read_bytes()


def test_who_may_read_it_is_asked_for_and_kept(served: Hub, model: Path, capsys) -> None:
    assert run("push", model, "--repo", "own/open", "--public") == 0
    assert capsys.readouterr().out.endswith("/own/open (public)\n")
    assert not (served.folder / "own" / "open" / ".unlisted").exists()
    assert run("push", model, "--repo", "own/open", "--public") == 0, "a newer version"
    capsys.readouterr()
    assert run("push", model, "--repo", "own/open") == 1
    shown = capsys.readouterr().err
    assert "--repo: own/open is there already, and public; what is uploaded is private" in shown
    assert "hint: `--public` if everybody may read it, or another name" in shown
    assert run("push", model, "--repo", "own/small") == 0
    assert run("push", model, "--repo", "own/small", "--public") == 1
    assert "own/small is there already, and private; an upload" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("token", "what"),
    [
        (None, "own/small cannot be written: this machine has no token of the hub"),
        ("expired", "the hub does not know the token of this machine"),
        ("reader", "the token of this machine may not do that with own/small"),
    ],
)
def test_one_who_may_not_write_is_told_to_log_in(
    served: Hub, model: Path, monkeypatch: pytest.MonkeyPatch, capsys, token: str | None, what: str
) -> None:
    monkeypatch.delenv("HF_TOKEN")
    ask(served, monkeypatch, token=token)
    assert run("push", model, "--repo", "own/small") == 1
    shown = capsys.readouterr().err
    assert what in shown
    assert "hint: `hf auth login` with a" in shown
    assert served.created == []


def test_what_is_no_run_and_no_model_is_refused(served: Hub, tmp_path: Path, capsys) -> None:
    assert run("push", tmp_path, "--repo", "own/small") == 1
    assert f"{tmp_path} holds no finished run and no model" in capsys.readouterr().err


def test_a_model_without_a_shard_is_refused(served: Hub, model: Path, capsys) -> None:
    (model / "model.safetensors").unlink()
    assert run("push", model, "--repo", "own/small") == 1
    assert "has no model.safetensors" in capsys.readouterr().err
    assert served.created == []


def test_without_a_network_nothing_is_uploaded(
    served: Hub, model: Path, monkeypatch: pytest.MonkeyPatch, capsys
) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert run("push", model, "--repo", "own/small") == 1
    assert "HF_HUB_OFFLINE forbids the hub" in capsys.readouterr().err
