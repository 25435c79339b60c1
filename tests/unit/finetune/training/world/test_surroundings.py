import torch

from finetune.training.world.surroundings import surroundings


def test_what_changes_the_last_bits_is_listed() -> None:
    found = surroundings()
    assert found["torch"] == torch.__version__
    assert {"transformers", "peft", "bitsandbytes", "Python"} <= found.keys()
    if not torch.cuda.is_available():
        assert found["torch's threads"] == str(torch.get_num_threads())
