"""Codecs: the forms in which layers wait, a module each. `offload.plan.facts.codec` has them."""
