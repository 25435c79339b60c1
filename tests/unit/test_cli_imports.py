"""What a command imports before it shows something, and what libraries say meanwhile."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

HEAVY = {"torch", "transformers", "peft", "bitsandbytes", "numpy"}


@pytest.mark.thorough
def test_help_imports_no_torch() -> None:
    asked = [["--help"], ["finetune", "--help"], ["merge", "--help"], ["recipes", "list"]]
    code = (
        "import sys\nfrom finetune.app import main\n"
        f"for words in {asked!r}:\n"
        "    try:\n        main(words)\n    except SystemExit as end:\n"
        "        assert not end.code\n"
        f"    heavy = {HEAVY!r} & set(sys.modules)\n"
        "    assert not heavy, (words, heavy)\n"
    )
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True, stdout=subprocess.DEVNULL)


@pytest.mark.thorough
def test_a_plan_for_a_card_imports_no_torch() -> None:
    code = (
        "import sys\nfrom finetune.app import main\n"
        "try:\n    main(['plan', 'qwen3-235b-a22b', '--machine', 'h100', '--json',"
        " 'train.seq_len=2048'])\n"
        "except SystemExit as end:\n    assert end.code == 3, end.code\n"
        "assert 'torch' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True, capture_output=True)


@pytest.mark.thorough
def test_a_recipe_for_a_card_imports_no_torch() -> None:
    code = (
        "import sys\nfrom finetune.app import main\n"
        "try:\n    main(['recipes', 'for', 'llama-3.2-1b', '--vram', '8'])\n"
        "except SystemExit as end:\n    assert not end.code, end.code\n"
        "assert 'torch' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True, capture_output=True)


@pytest.mark.thorough
def test_a_plan_for_235b_needs_no_torch() -> None:
    words = ["plan", "qwen3-235b-a22b", "--machine", "h200", "offload.codec=nf4"]
    words += ["offload.sent_graphs=none", "offload.attention_outputs=none"]
    code = (
        "import sys\nfrom finetune.app import main\n"
        f"try:\n    main({words!r})\n"
        "except SystemExit as end:\n    assert not end.code, end.code\n"
        "assert 'torch' not in sys.modules\n"
    )
    program = [sys.executable, "-c", code]
    done = subprocess.run(program, cwd=ROOT, check=True, capture_output=True, text=True)
    assert "235.09 B" in done.stdout


@pytest.mark.slow
def test_what_libraries_say_to_developers_is_not_shown(tmp_path: Path) -> None:
    config = tmp_path / "config.json"
    sizes = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2}
    sizes |= {"num_attention_heads": 4, "num_key_value_heads": 4, "vocab_size": 100}
    rope = {"rope_type": "default", "rope_theta": 10000.0, "funny": 3, "partial_rotary_factor": 0.5}
    values = {"model_type": "stablelm", "max_position_embeddings": 512, "rope_parameters": rope}
    config.write_text(json.dumps(values | sizes))  # transformers logs a warning of `funny`
    words = ["plan", str(config), "--machine", "rtx3060"]
    code = (
        "import sys, logging\nfrom finetune.app import main\n"
        f"try:\n    main({words!r})\nexcept SystemExit as end:\n    assert not end.code\n"
        "assert 'transformers' in sys.modules\n"
        "logging.getLogger('transformers').error('an error')\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, check=True, capture_output=True, text=True
    )
    shown = ["Building the model without its weights ...", "[transformers] an error"]
    assert done.stderr.splitlines() == shown


# What the model is built with: seconds of imports, for which rows and plan need not wait.
LATE = {"accelerate", "bitsandbytes", "peft", "sympy", "transformers", "triton"}
LATE |= {"torch._dynamo", "torch._inductor", "datasets"}


@pytest.mark.thorough
def test_a_run_plans_before_it_imports_what_its_model_is_built_with() -> None:
    code = "import sys\nimport finetune.train, finetune.training.prepare\nprint(*sys.modules)\n"
    words = [sys.executable, "-c", code]
    done = subprocess.run(words, cwd=ROOT, check=True, capture_output=True, text=True)
    loaded = set(done.stdout.split())
    assert "torch" in loaded
    assert not loaded & LATE


@pytest.mark.parametrize(
    ("words", "first_line"),
    [
        (["finetune", "quickstart"], "Recipe quickstart, run directory runs/quickstart\n"),
        (["plan", "quickstart"], "Building the model without its weights ...\n"),
        (["plan", "qwen3-8b"], "Measuring this machine ...\n"),
        (["probe"], "Measuring this machine ...\n"),
    ],
)
def test_the_first_line_is_shown_before_torch_is_imported(
    words: list[str], first_line: str, tmp_path: Path
) -> None:
    code = (
        "import sys\nfrom finetune.app import main\n"
        "class Refusal:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        if name in ('torch', 'transformers'):\n"
        "            print(f'{name} is asked for', file=sys.stderr, flush=True)\n"
        "            sys.exit(9)\n"
        f"sys.meta_path.insert(0, Refusal())\nmain({words!r})\n"
    )
    env = {"PYTHONPATH": str(ROOT), "PATH": "", "HOME": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, env=env, capture_output=True, text=True
    )
    assert done.returncode == 9
    assert done.stderr.endswith("torch is asked for\n")
    assert (done.stdout + done.stderr).startswith(first_line)
