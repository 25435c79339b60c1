"""The model that clients train adapters of: loaded once, on an engine with a scheduler."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from finetune.adapter.lora import ALONE, add_pattern
from finetune.clients.scheduler import Scheduler
from finetune.data.chat_template import eos_ids
from finetune.errors import ConfigError
from finetune.model.load import load_model
from finetune.model.tokenizer import load_tokenizer
from finetune.serve.planned import ServePlan
from offload.engine.adapters import AdapterSettings
from offload.engine.engine import EngineOptions
from offload.engine.shared import SharedEngine

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

IsEnded = Callable[[Sequence[int]], bool]


@dataclass(frozen=True, kw_only=True, slots=True)
class Base:
    """A base that is served."""

    names: tuple[str, ...]  # what clients call it; it is shown by the first
    scheduler: Scheduler
    linears: Mapping[
        str, str
    ]  # each linear that adapters may be on -> the part of the model it is in
    head: str  # the last name of the head
    tokenizer: "PreTrainedTokenizerBase"  # the base's
    eos_ids: frozenset[int]  # tokens that end an answer where a client names none
    architecture: str

    @property
    def name(self) -> str:
        """The name that it is shown by."""
        return self.names[0]

    @property
    def shown(self) -> str:
        """What each client should know."""
        left = "" if "mlp" in self.linears.values() else "; its experts get no adapters"
        return f"{self.name} on this machine, by sluice{left}"

    @property
    def smallest(self) -> AdapterSettings:
        """The settings of an adapter that computes nothing."""
        return AdapterSettings(rank=1, alpha=1.0, targets=frozenset([next(iter(self.linears))]))

    def require_named(self, name: str) -> None:
        """Check that a client means this base.

        Raises:
            ConfigError: It means another one.
        """
        if name not in self.names:
            raise ConfigError(
                f"the model {name[:120]!r}",
                limit=f"this server has {', '.join(self.names)}",
                hint=f"`model_name={self.name}`, or `sluice serve --name {name[:120]}` if it is"
                " that model",
            )

    def targets(self, *, mlp: bool, attention: bool, head: bool) -> frozenset[str]:
        """Return the last names of the linears that an adapter is on.

        Args:
            mlp: Whether those of MLPs are, of experts that are shared too.
            attention: Whether those of attention are.
            head: Whether the head is.

        Raises:
            ConfigError: None is.
        """
        parts = {"attention"} if attention else set[str]()
        parts |= {"mlp", "shared_experts"} if mlp else set()
        found = {name for name, part in self.linears.items() if part in parts}
        found |= {self.head} if head else set()
        if not found:
            raise ConfigError(
                "an adapter on nothing",
                limit=f"adapters are on {', '.join(self.linears)} and {self.head}",
                hint="`train_attn=True`",
            )
        return frozenset(found)

    def stops(
        self, stop: str | Sequence[str] | Sequence[int] | None
    ) -> tuple[frozenset[int], IsEnded | None]:
        """Return the tokens that end an answer, and what says of its tokens whether they end it.

        Args:
            stop: Texts or tokens; None for the model's own, an empty list for none.

        Raises:
            ConfigError: Both kinds, or an empty text.
        """
        if stop is None:
            return self.eos_ids, None
        several = [stop] if isinstance(stop, str) else list(stop)
        texts = [one for one in several if isinstance(one, str)]
        if not texts:
            return frozenset(one for one in several if isinstance(one, int)), None
        if len(texts) < len(several) or "" in texts:
            raise ConfigError(
                f"stop is {several}",
                limit="it is texts that are not empty, or numbers of tokens",
                hint="give the numbers of tokens",
            )

        def is_ended(ids: Sequence[int]) -> bool:
            said = str(self.tokenizer.decode(list(ids), skip_special_tokens=False))
            return any(text in said for text in texts)

        return frozenset(), is_ended


@contextmanager
def opened(plan: ServePlan, *, names: Sequence[str]) -> Iterator[Base]:
    """Load the base as planned, and put it on an engine in this context.

    Args:
        plan: Plan of the server.
        names: Names that clients call the base by, at least one.

    Raises:
        ModelError: Weights are missing or damaged.
        UnsupportedModelError: The model cannot be trained layer by layer.
    """
    recipe, facts = plan.subject.recipe, plan.subject.facts
    capacity, device = plan.capacity, plan.machine.device
    assert capacity.cached_tokens is not None, "it is planned"
    options = EngineOptions.planned(plan.plan)
    loaded = load_model(
        recipe.model,
        codec=options.codec,
        device=device,
        seed=recipe.train.seed,
        tier=options.tier,
        experts_implementation=plan.plan.experts_implementation,
    )
    head = next(
        name
        for name, module in loaded.model.named_modules()
        if module is loaded.model.get_output_embeddings()
    )
    model = add_pattern(loaded.model).eval()
    engine = SharedEngine(
        model, device=torch.device(device), options=options, backing=loaded.backing
    )
    with closing(engine):
        scheduler = Scheduler(
            engine,
            pattern=ALONE,
            max_clients=capacity.num_clients + capacity.num_samplers,
            max_rank=capacity.max_rank,
            max_cached_tokens=capacity.cached_tokens,
            state_tokens=plan.state_tokens,
        )
        tokenizer = load_tokenizer(recipe.model)
        fields = loaded.model.generation_config.to_diff_dict()
        ends = eos_ids(fields, source=names[0]) or (tokenizer.eos_token_id,)
        linears = {
            linear.name: linear.group
            for layer in facts.layers
            for linear in layer.linears
            if linear.is_module and linear.name in scheduler.adapters.targets
        }
        yield Base(
            names=tuple(names),
            scheduler=scheduler,
            linears=linears,
            head=head.rpartition(".")[2],
            tokenizer=tokenizer,
            eos_ids=frozenset(one for one in ends if isinstance(one, int)),
            architecture=facts.model_type,
        )
