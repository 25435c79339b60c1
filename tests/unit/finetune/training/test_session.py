"""What recomputes leave out, as planned and as found."""

from finetune.training.attach import with_unread
from offload.plan.machine.machine import named_machine
from offload.plan.plan import plan
from tests.builders import qwen3_8b, request, workload

FOUND = (frozenset({"mlp.down_proj"}),) * 36


def test_a_plan_that_knew_what_is_left_out_stays() -> None:
    made = plan(qwen3_8b(), named_machine("rtx5090"), request(typical=workload()))
    assert with_unread(made, FOUND) == (made, "")
    by_peft = (frozenset({"mlp.down_proj.base_layer"}),) * 36
    assert with_unread(made, by_peft) == (made, "")


def test_a_plan_that_did_not_is_priced_again_and_says_so() -> None:
    made = plan(qwen3_8b(), named_machine("rtx5090"), request(typical=workload()))
    again, note = with_unread(made, (frozenset(), *FOUND[1:]))
    assert note == "Recomputes leave out 35 products, and the plan counted on 36: priced again"
    assert again.costs.layers[0].recompute_frac == 1
    assert again.costs.layers[0].backward_s > made.costs.layers[0].backward_s
    assert again.costs.layers[1:] == made.costs.layers[1:]
    more, note = with_unread(made, (FOUND[0] | {"self_attn.o_proj"}, *FOUND[1:]))
    assert note.startswith("Recomputes leave out 37 products")
    assert more.costs.layers[0].backward_s < made.costs.layers[0].backward_s
    none, _ = with_unread(made, (frozenset(),) * 36)
    assert with_unread(none, (frozenset(),) * 36) == (none, "")
