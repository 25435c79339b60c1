"""States of a layer in one block of memory."""

import torch

from finetune.full.state_layout import StateLayout


def test_views_do_not_overlap_and_have_the_states_forms() -> None:
    states = {
        "a": {"low": torch.empty(3, 5, dtype=torch.int16), "mean": torch.empty(3, 5)},
        "b": {"mean": torch.empty(7, dtype=torch.uint8), "scale": torch.empty(1)},
    }
    layout = StateLayout.of(states)
    memory = torch.zeros(layout.num_bytes, dtype=torch.uint8)
    views = layout.views(memory)
    for number, (name, one) in enumerate(states.items(), start=1):
        for state, like in one.items():
            assert views[name][state].shape == like.shape
            assert views[name][state].dtype is like.dtype
            views[name][state].fill_(number)
    assert all((view == 1).all() for view in views["a"].values())
    assert all((view == 2).all() for view in views["b"].values())
    again = layout.views(memory.clone())
    assert torch.equal(again["a"]["mean"], views["a"]["mean"])
