"""An adapter that learns from answers that it samples itself."""

from finetune.online.rounds import Rounds
from finetune.training.kinds.adapter import AdapterRun
from finetune.training.session import Session
from offload.plan.plan import Plan


class OnlineRun(AdapterRun):
    """See `finetune.training.session.Kind`."""

    def timed(self, session: Session, plan: Plan) -> Plan:
        """Let the steps have their rows from rounds; return the plan of learning from them."""
        session.rounds = Rounds(session, plan)
        return plan
