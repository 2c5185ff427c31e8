"""Requests of a cascade: which model answers first, whether its answer will do, and who answers next."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random

from headway.control.live import NEVER, Live
from headway.control.policies import CascadeOf
from headway.control.service import Service
from headway.core.errors import HeadwayError
from headway.core.policy import Auditor, Cascade
from headway.core.request import Phase
from headway.core.view import ReplicaView


class Stage:
    """One model. Satisfies `core.view.StageView`."""

    def __init__(self, service: Service) -> None:
        self.service = service
        self.model = service.model

    @property
    def replicas(self) -> Sequence[ReplicaView]:
        """Those that are up."""
        return [member.view for member in self.service.members if member.is_up]


class Cascading:
    """One cascade. Also `core.view.CascadeView`, refilled for every call."""

    def __init__(self, config: CascadeOf, policy: Cascade, services: Sequence[Service], random: Random) -> None:
        self.config = config
        self.policy = policy
        self.stages = [Stage(service) for service in services]
        self.random = random
        self.now = 0.0
        self.stage = 0
        self._judges_last = policy.judges_last if isinstance(policy, Auditor) else None

    def takes(self, live: Live) -> bool:
        """Whether the request is for the cascade."""
        return not live.model or live.model == self.config.name

    def enter(self, live: Live, now: float) -> None:
        """A request comes in: which model is first?"""
        self.now, self.stage = now, 0
        stage = self.policy.enter(live, self)
        if not 0 <= stage < len(self.stages):
            name = type(self.policy).__name__
            raise HeadwayError(f"cascade {name} chose stage {stage!r}; expected 0 to {len(self.stages) - 1}")
        self._ask(live, stage)

    def is_last(self, live: Live) -> bool:
        """Nobody would answer after this one, nor does anybody want to know how good it is."""
        if live.stage_index < len(self.stages) - 1:
            return False
        return self._judges_last is None or not self._judges_last(live)

    def accepts(self, live: Live, score: float, now: float) -> bool:
        """Whether a judged answer will do."""
        self.now, self.stage = now, live.stage_index
        live.score = score
        return self.policy.accept(live, score, self) or live.stage_index == len(self.stages) - 1

    def escalate(self, live: Live) -> None:
        """The next model answers anew."""
        live.generated_tokens = 0
        live.first_token_s = live.answer_s = live.reasoning_end_s = live.score = NEVER
        if live.reasoning_tokens:
            live.phase = Phase.REASONING
        self._ask(live, live.stage_index + 1)

    def _ask(self, live: Live, stage: int) -> None:
        live.stage_index = stage
        model = self.stages[stage].model
        for name, tokens in live.lengths:
            if name == model and tokens != live.output_tokens:
                # A later turn quotes the answer that the workload knows, not this one.
                live.output_id = None  # type: ignore[misc]  # of a frozen base, thawed here
                reasoning = round(live.reasoning_tokens * tokens / live.output_tokens)
                live.output_tokens, live.reasoning_tokens = tokens, reasoning  # type: ignore[misc]
        live.model = model  # type: ignore[misc]
