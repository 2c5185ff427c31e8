"""The stages of a model cascade: the model that answers first, whether its answer is accepted, and the next model."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random

from mypy_extensions import mypyc_attr

from headway.control.live import NEVER, Live
from headway.control.policies import CascadeConfig
from headway.control.service import Service
from headway.core.errors import HeadwayError
from headway.core.policy import Auditor, Cascade
from headway.core.request import Phase
from headway.core.view import ReplicaView


class CascadeStage:
    """One model of a cascade. Implements `core.view.StageView`."""

    def __init__(self, service: Service) -> None:
        self.service = service
        self.model = service.model

    @property
    def replicas(self) -> Sequence[ReplicaView]:
        """The model's replicas that are up."""
        return self.service.up_views()


@mypyc_attr(allow_interpreted_subclasses=True)
class CascadeStages:
    """One cascade and its policy. Implements `core.view.CascadeView`; `now` and `stage` are set before every policy
    call."""

    def __init__(self, config: CascadeConfig, policy: Cascade, services: Sequence[Service], random: Random) -> None:
        self.config = config
        self.policy = policy
        self.stages = [CascadeStage(service) for service in services]
        self.random = random
        self.now = 0.0
        self.stage = 0
        self.judged: dict[int, Live] = {}
        """Requests whose answers are being judged, by id."""
        self._judges_last = policy.judges_last if isinstance(policy, Auditor) else None

    def serves(self, live: Live) -> bool:
        """Whether the request is for the cascade."""
        return not live.model or live.model == self.config.name

    def num_models(self, model: str) -> int:
        """Number of models that may answer a request for this model, one after the other."""
        return len(self.stages) if not model or model == self.config.name else 1

    def enter(self, live: Live, now: float) -> None:
        """Assign an arriving request to the stage that the policy chooses."""
        self.now, self.stage = now, 0
        stage: object = self.policy.enter(live, self)
        if not isinstance(stage, int) or not 0 <= stage < len(self.stages):
            name = type(self.policy).__name__
            raise HeadwayError(f"cascade {name} chose stage {stage!r}; expected 0 to {len(self.stages) - 1}")
        self._assign(live, stage)

    def is_final(self, live: Live) -> bool:
        """Whether the current stage's answer is accepted unjudged: it is the last stage and no audit is due."""
        if live.stage_index < len(self.stages) - 1:
            return False
        return self._judges_last is None or not self._judges_last(live)

    def accepts(self, live: Live, score: float, now: float) -> bool:
        """Whether an answer with this score (0 to 100) is accepted."""
        self.now, self.stage = now, live.stage_index
        live.score = score
        return self.policy.accept(live, score, self) or live.stage_index == len(self.stages) - 1

    def escalate(self, live: Live) -> None:
        """Discard the answer and assign the request to the next stage."""
        live.generated_tokens = 0
        live.first_token_s = live.answer_s = live.reasoning_end_s = live.score = NEVER
        if live.reasoning_tokens:
            live.phase = Phase.REASONING
        self._assign(live, live.stage_index + 1)

    def _assign(self, live: Live, stage: int) -> None:
        live.stage_index = stage
        model = self.stages[stage].model
        live.take_lengths_of(model)
        live.model = model
