"""An adapter that learns from answers that it samples itself."""

from importlib import import_module

from finetune.online.rounds import Rounds
from finetune.training.kinds.adapter import AdapterRun
from finetune.training.session import Session
from offload.plan.plan import Plan


class OnlineRun(AdapterRun):
    """See `finetune.training.session.Kind`."""

    def timed(self, session: Session, plan: Plan) -> Plan:
        """Let the steps have their rows from rounds; return the plan of learning from them."""
        make = Rounds
        if dict(session.run.recipe.objective)["sampler"] is not None:
            make = import_module("finetune.online.outside").OutsideRounds
        session.rounds = make(session, plan)
        return plan
