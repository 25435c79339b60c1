"""What may be imported by name: a name that goes or comes needs a line here."""

import importlib
import subprocess
import sys

import pytest

PUBLIC = {
    "offload": {
        "CodecError",
        "DoesNotFitError",
        "MachineError",
        "OffloadError",
        "SluiceError",
        "StoreError",
        "TransferError",
        "UnsupportedModelError",
        "attach",
        "detach",
    },
    "offload.plan": {
        "AdapterSpec",
        "Choice",
        "Machine",
        "ModelFacts",
        "Plan",
        "PlanRequest",
        "Rate",
        "Timeline",
        "Workload",
        "described_machine",
        "model_facts",
        "named_machine",
        "plan",
        "search",
    },
    "finetune": {
        "CheckpointError",
        "ConfigError",
        "DataError",
        "FinetuneError",
        "MergeError",
        "Merged",
        "ModelError",
        "RankError",
        "Recipe",
        "load_recipe",
        "merge",
    },
}


@pytest.mark.parametrize("package", PUBLIC)
def test_a_package_exports_what_it_declares_and_each_name_has_a_docstring(package: str) -> None:
    module = importlib.import_module(package)
    assert set(module.__all__) == PUBLIC[package]
    for name in PUBLIC[package]:
        assert getattr(module, name).__doc__, name


def test_a_name_that_a_package_lacks_is_an_attribute_error() -> None:
    import finetune

    with pytest.raises(AttributeError, match="module 'finetune' has no attribute 'lora'"):
        _ = finetune.lora


def test_plan_is_the_function_in_the_package_and_the_module_by_its_full_name() -> None:
    code = (
        "import offload.plan.facts.codec\n"
        "from offload.plan.plan import Plan, plan as by_module\n"
        "from offload.plan import plan\n"
        "assert plan is by_module and callable(plan)\n"
        "import sys; assert 'torch' not in sys.modules and 'pydantic' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize("package", PUBLIC)
def test_importing_a_package_loads_no_torch(package: str) -> None:
    code = f"import sys, {package}; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
