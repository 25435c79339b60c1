"""Optimizers, a module each. `offload.plan.facts.optimizer` has them by name."""
