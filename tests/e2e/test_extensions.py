"""A package of another project that adds extensions by entry points: no file here knows of it."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from peft import PeftModel
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from tests.e2e.runs import ROOT

PACKAGE = {
    "acme/__init__.py": "",
    "acme/codec.py": """from dataclasses import replace

from offload.plan.facts.codec import Codec
from offload.registry import Clash

def write(values, parts):
    scale = parts[1].view(values.float().dtype)
    scale.copy_(values.abs().max() / 127)
    parts[0].view(values.char().dtype).copy_((values.reshape(-1) / scale).round())

def read(parts, values):
    flat = values.view(-1)
    flat.copy_(parts[0].view(flat.char().dtype))
    flat.mul_(parts[1].view(flat.float().dtype))

EXTENSION = Codec(
    doc="takes 8 bits, by acme",
    sizes=lambda num_weights, _: (num_weights, 4),
    write=write,
    read=read,
    rounding=1e-2,
    clashes=(
        Clash(
            field="model.dtype",
            values=("float16",),
            limit="its scales are larger",
            fix="bfloat16",
        ),
    ),
)
NO_DROPOUT = Clash(
    field="adapter.dropout",
    values=(0.0,),
    is_all_but=True,
    limit="nothing is dropped with it",
    fix="0.0",
)
AUTOMATIC = replace(EXTENSION, is_automatic=True, rounding=0.0, clashes=(NO_DROPOUT,))
""",
    "acme/optimizer.py": """from offload.plan.facts.optimizer import Optimizer
from offload.registry import Clash

EXTENSION = Optimizer(
    doc="follows signs, by acme",
    states=lambda shape: {"count": (shape, "bfloat16")},
    made_by="acme.signs:Signs",
    update_bytes=20,
    num_ops=3,
    clashes=(Clash(field="train.lr", values=(0.25,), limit="signs turn", fix="0.125"),),
)
""",
    "acme/signs.py": """import torch

class Signs(torch.optim.Optimizer):
    def __init__(self, groups, *, lr, weight_decay):
        super().__init__(groups, {"lr": lr, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for weight in group["params"]:
                weight.sub_(weight.grad.sign(), alpha=group["lr"])
""",
    "acme/card.py": """from offload.plan.machine.cards import Card

EXTENSION = Card(
    memory_gib=64,
    half_tflops=300,
    fp32_tflops=80,
    memory_gb_per_s=2000,
    pcie=(5, 16),
    line="workstation",
    sheet="acme",
    board_w=333,
)
""",
    "acme/adapter.py": """from typing import Annotated

from pydantic import Field

from finetune.recipe.adapters import by_peft

Symmetric = Annotated[bool, Field(description="Whether mirrors begin in equal pairs.")]
EXTENSION = by_peft(
    "acme_hra",
    "A chain of mirrors in front of each weight.",
    "peft:HRAConfig",
    fields={"rank": "r", "symmetric": "init_weights"},
    settings={"symmetric": (Symmetric, True)},
    peft_type="HRA",
    computed="apply_GS",
    others="r init_weights",
)
""",
    "acme/command.py": """def greet(name: str, *, is_loud: bool = False) -> None:
    print(f"hello {name.upper() if is_loud else name}")
""",
    "acme-1.0.dist-info/METADATA": "Metadata-Version: 2.1\nName: acme\nVersion: 1.0\n",
    "acme-1.0.dist-info/entry_points.txt": """[sluice.codecs]
acme8 = acme.codec:EXTENSION
[sluice.optimizers]
acme_signs = acme.optimizer:EXTENSION
[sluice.cards]
acme64 = acme.card:EXTENSION
[sluice.adapters]
acme_hra = acme.adapter:EXTENSION
[sluice.commands]
greet = acme.command:greet
""",
}
CHOSEN = ("offload.codec=acme8", "train.optimizer=acme_signs")
PURE = """
import sys
sys.modules |= dict.fromkeys(("torch", "bitsandbytes", "transformers", "peft", "pydantic"))
from offload.plan.facts.codec import CODECS
from offload.plan.facts.optimizer import OPTIMIZERS
from offload.plan.machine.cards import CARDS
for codec in CODECS.values(): assert sum(codec.sizes(1000, 2)) > 0
for optimizer in OPTIMIZERS.values(): assert optimizer.state_bytes((70, 70)) >= 0
for card in CARDS.values(): assert card.memory_gib > 0
"""


@pytest.fixture
def _installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Put the package in a folder of its own, where processes that are started find it."""
    for name, text in PACKAGE.items():
        (tmp_path / "site" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "site" / name).write_text(text)
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path / 'site'}:{ROOT}")


def shown(*words: object, code: int = 0) -> str:
    """Return what Python prints, of a command that ends so."""
    found = subprocess.run(
        [sys.executable, *map(str, words)], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert found.returncode == code, found.stderr
    return found.stdout + found.stderr


@pytest.mark.thorough
@pytest.mark.usefixtures("_installed")
def test_plan_prices_extensions_of_another_package() -> None:
    words = ("cli.py", "plan", "qwen3_8b_lora_3060", "--machine", "acme64", "--json")
    exact, found = (json.loads(shown(*words, *x)) for x in (("offload.codec=native",), CHOSEN))
    assert (found["machine"], found["energy"]["board_w"]) == ("acme64", 333)
    assert found["choice"]["codec"] == "acme8"
    sizes = [plan["per_layer"]["cargo_bytes"] for plan in (exact, found)]
    assert sizes[1] == pytest.approx(sizes[0] / 2, rel=1e-3)
    num_trained = found["model"]["num_adapter_parameters"]
    assert found["predicted"]["device_memory"]["optimizer states"] == 2 * num_trained


@pytest.mark.thorough
@pytest.mark.usefixtures("_installed")
def test_a_run_trains_with_extensions_of_another_package(
    machine_file: Path, tmp_path: Path
) -> None:
    few = (
        *("train.steps=2", "train.warmup_steps=0", "report.samples=0", "output.eval_every=null"),
        *(f"output.dir={tmp_path / 'run'}", "offload.device=cpu", "output.checkpoint_every=null"),
    )
    text = shown(
        "cli.py", "finetune", "quickstart", "--verbose", "--machine", machine_file, *few, *CHOSEN
    )
    assert "in acme8, each weight rounded by 1.0% RMS" in text
    rows = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    first, second = (json.loads(row)["loss"] for row in rows)
    assert second < first


@pytest.mark.thorough
@pytest.mark.usefixtures("_installed")
def test_extensions_of_another_package_are_listed_called_and_nearest_names(tmp_path: Path) -> None:
    text = shown("-c", "from tests.tools import reference as r; print(r.settings(), r.cards())")
    assert "`acme8` takes 8 bits, by acme" in text
    assert "`acme_signs` follows signs, by acme" in text
    assert "| `acme64` | 64 |" in text
    assert shown("cli.py", "greet", "you", "--is-loud") == "hello YOU\n"
    recipe = (ROOT / "recipes/quickstart.yaml").read_text()
    line = recipe.splitlines().index("offload:") + 2
    (tmp_path / "r.yaml").write_text(recipe.replace("num_slots: 3", "codec: acme\n  num_slots: 3"))
    text = shown("cli.py", "plan", tmp_path / "r.yaml", code=1)
    assert f'r.yaml:{line}: offload.codec is "acme"' in text
    assert "hint: `offload.codec: acme8`" in text


@pytest.mark.thorough
@pytest.mark.usefixtures("_installed")
def test_what_extensions_of_another_package_do_not_go_with_is_refused(tmp_path: Path) -> None:
    recipe = yaml.safe_load((ROOT / "recipes/quickstart.yaml").read_text())
    recipe["model"]["dtype"], recipe["train"]["lr"] = "float16", 0.25
    (tmp_path / "r.yaml").write_text(text := yaml.safe_dump(recipe))
    lines = [number for number, line in enumerate(text.splitlines(), 1) if ": float16" in line]
    text = shown("cli.py", "plan", tmp_path / "r.yaml", *CHOSEN, code=1)
    for said in (
        f"r.yaml:{lines[0]}: model.dtype is float16 and offload.codec is acme8\nits scales are"
        " larger\n\nhint: `model.dtype: bfloat16`\n",
        "train.lr is 0.25 and train.optimizer is acme_signs\nsigns turn\n\nhint: `train.lr: 0.125`",
    ):
        assert said in text.replace("; ", "\n")  # by the length of the folder's name


@pytest.mark.thorough
@pytest.mark.usefixtures("_installed")
def test_a_plan_chooses_no_codec_that_does_not_go_with_its_recipe(tmp_path: Path) -> None:
    points = tmp_path / "site/acme-1.0.dist-info/entry_points.txt"
    points.write_text("[sluice.codecs]\nacme_auto = acme.codec:AUTOMATIC\n")
    words = (
        "cli.py",
        "plan",
        "qwen3_8b_lora_3060",
        "--machine",
        "rtx3060",
        "--ram",
        "19",
        "--json",
    )
    chosen = [
        json.loads(shown(*words, "offload.codec=auto", f"adapter.dropout={x}"))["choice"]["codec"]
        for x in (0.0, 0.1)
    ]
    assert chosen == ["acme_auto", "bf16_packed"]


@pytest.mark.thorough
@pytest.mark.usefixtures("_installed")
@pytest.mark.parametrize(("kind", "name"), [("codecs", "nf4"), ("commands", "validate")])
def test_another_package_takes_no_name_of_ours(tmp_path: Path, kind: str, name: str) -> None:
    points = tmp_path / "site/acme-1.0.dist-info/entry_points.txt"
    points.write_text(f"[sluice.{kind}]\n{name} = acme.codec:write\n")
    text = shown("cli.py", "plan", "quickstart", code=1)
    assert f"error: acme.codec:write of the package acme is named {name}, and so is one of" in text
    assert "\n\nhint: rename the entry point of acme, or `pip uninstall acme`\n" in text


def test_extensions_are_priced_where_nothing_is_installed() -> None:
    shown("-c", PURE)


ADAPTED = {"method": "acme_hra", "rank": 4, "symmetric": False, "targets": ["q_proj", "v_proj"]}


@pytest.mark.thorough
@pytest.mark.usefixtures("_installed")
def test_an_adapter_of_another_package_is_trained_read_by_peft_and_merged(
    machine_file: Path, model_dir: Path, tmp_path: Path, write_recipe
) -> None:
    recipe, run_dir = write_recipe(adapter=ADAPTED, train={"steps": 2}), tmp_path / "run"
    text = shown("cli.py", "plan", recipe, "--machine", machine_file, "--json")
    planned, _ = json.JSONDecoder().raw_decode(text)
    shown("cli.py", "finetune", recipe, "--machine", machine_file)
    assert yaml.safe_load((run_dir / "recipe.yaml").read_text())["adapter"].items() >= (
        ADAPTED.items()
    )
    trained = load_file(run_dir / "adapter" / "adapter_model.safetensors")
    assert planned["model"]["num_adapter_parameters"] == sum(x.numel() for x in trained.values())
    base: Any = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32)
    ids = torch.arange(1, 12)[None]
    before = base(ids).logits
    wanted = PeftModel.from_pretrained(base, str(run_dir / "adapter"))(ids).logits
    assert (wanted - before).abs().max() > 1e-3
    shown("cli.py", "merge", run_dir, "--out", tmp_path / "merged")
    merged: Any = AutoModelForCausalLM.from_pretrained(tmp_path / "merged", dtype=torch.float32)
    torch.testing.assert_close(merged(ids).logits, wanted, rtol=1e-4, atol=1e-5)


@pytest.mark.thorough
@pytest.mark.usefixtures("_installed")
def test_an_adapter_of_another_package_is_listed_and_other_settings_refused(
    tmp_path: Path, write_recipe
) -> None:
    text = write_recipe(adapter=ADAPTED).read_text().replace("  rank: 4", "  alpha: 8\n  rank: 4")
    (tmp_path / "r.yaml").write_text(text)
    line = text.splitlines().index("  alpha: 8") + 1
    found = shown("cli.py", "plan", tmp_path / "r.yaml", code=1)
    assert f"r.yaml:{line}: adapter.alpha is 8 and adapter.method is acme_hra" in found
    assert "acme_hra has method, targets, init_from, modules_to_save, rank, symmetric" in found
    listed = shown("-c", "from tests.tools import reference as r; print(r.settings())")
    assert "### `adapter.method: acme_hra`\n\nA chain of mirrors in front" in listed
    assert "| `symmetric` | `true` or `false` | `true` | Whether mirrors begin in" in listed
