"""Admission of requests: their callers' limits, their models' context, and the room in hold queues."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import count
from math import inf
from typing import TYPE_CHECKING, Final

from headway.control.live import Live
from headway.control.service import Service
from headway.core.request import Phase
from headway.gateway.auth.keys import Caller, RateHold
from headway.gateway.clock import Clock
from headway.gateway.errors import ApiError
from headway.gateway.kv_events.prompts import PromptBlocks
from headway.gateway.relay.features import Features
from headway.gateway.relay.quarantine import Quarantine
from headway.gateway.relay.request import ClientRequest
from headway.gateway.scheduling.driver import Driver
from headway.gateway.scheduling.in_flight import InFlightRequest
from headway.gateway.served_models import ServedModels
from headway.gateway.settings import Settings
from headway.gateway.upstream.engine import count_prompt
from headway.gateway.upstream.stored_responses import StoredResponses
from headway.limits.budgets import MostTokens, most_tokens

if TYPE_CHECKING:
    from headway.gateway.accounts.budgets import BudgetHold
    from headway.gateway.charges import Charges

_TOKENS_PER_CHAR = 0.25
"""Estimated tokens per character of prompts, until an engine has counted one."""
_RATIO_WEIGHT = 0.05
"""Weight of the newest count in the moving average of tokens per character."""
_MIN_COUNTED_CHARS: Final = 32
"""Shorter prompts are not used to estimate tokens per character."""


class Admission:
    """Checks and reserves a request's needs, passes the request to control, and settles its reservations at its end."""

    def __init__(
        self,
        clock: Clock,
        driver: Driver,
        models: ServedModels,
        settings: Settings,
        quarantine: Quarantine,
        responses: StoredResponses,
        charges: Charges | None,
        prompt_blocks: PromptBlocks | None,
    ) -> None:
        """`charges`: set if keys have budgets. `prompt_blocks`: set if engines publish their KV cache events."""
        self._clock, self._driver, self._models, self.settings = clock, driver, models, settings
        self._quarantine, self._responses = quarantine, responses
        self.charges, self._prompt_blocks = charges, prompt_blocks
        self.is_closing = False
        """Whether new requests are answered with 503."""
        self.reasons: dict[str, bool] = {}
        """Maps each model to whether its last answer began with reasoning."""
        self._ids = count()
        self._last_arrival_s = 0.0
        self._tokens_per_char = _TOKENS_PER_CHAR
        self._least_limits: dict[str, float] = {}
        """Cached results of `_find_least_limit` by model, until a replica's limit may have changed."""

    def forget_limits(self) -> None:
        """Forget the replicas' limits, which may have changed."""
        self._least_limits.clear()

    async def features(self, request: ClientRequest, has_cost: bool = True) -> Features:
        """The features of a request that arrives now. They include the prompt's blocks if engines publish theirs, and
        the prompt's token count by an engine if the number matters. Raises ApiError if the request is quarantined."""
        now = self._clock.now
        if self._quarantine.until_s:
            self._quarantine.check(request.raw, now)
        if self._prompt_blocks is not None:
            await self._prompt_blocks.name(request, self._models.replicas_of(request.model))
        if request.prompt_ids is None and request.counted_tokens is None:
            longest_tokens = len(request.text) + (request.max_tokens or 1)
            limit = self._least_limits.get(request.model)
            if longest_tokens > (self._find_least_limit(request.model) if limit is None else limit):
                engines = self._models.replicas_of(request.model)
                request.counted_tokens = await count_prompt(
                    request.body, len(request.text), request.max_tokens or 1, engines
                )
        return request.features(now, has_cost)

    def _find_least_limit(self, model: str) -> float:
        """The smallest token limit of a model's engines; infinite if all limits are equal or none is known."""
        limits = {engine.max_request_tokens for engine in self._models.replicas_of(model)}
        limit = min(limits) if len(limits) > 1 else inf
        if model in self._driver.services:
            self._least_limits[model] = limit
        return limit

    def admit(
        self,
        features: Features,
        new_request: Callable[[Live], InFlightRequest],
        caller: Caller,
        deadline_s: float | None = None,
    ) -> InFlightRequest:
        """Reserve the request's tokens in its caller's limits, and pass it to control. Raises ApiError if it is not
        admitted.

        `deadline_s`: seconds from now.
        """
        rate_hold: RateHold | None = None
        budget_hold: BudgetHold | None = None
        try:
            if caller.owner:
                most = self.most_tokens(features)
                rate_hold = RateHold(caller, most.total)
                if self.charges is not None:
                    budget_hold = self.charges.hold(caller.owner, features.model, most)
            if self.is_closing:
                raise ApiError(503, "the gateway is shutting down", "shutting_down", retry_after_s=1)
            service, model = self._models.answering(features)
            longest = service.longest_tokens
            if (cascade := self._driver.cascade) is not None and model == cascade.config.name:
                longest = max(longest, *[stage.service.longest_tokens for stage in cascade.stages])
            live = self._live(features, model, caller.tenant, deadline_s, longest)
            if features.response_id is not None:
                live.allowed = self._keepers(features.response_id, caller.owner, service)
            self._check_room(features, live, service, longest)
            request = new_request(live)
            request.owner = caller.owner
            self._driver.arrived(request)
        except BaseException as error:
            if rate_hold is not None:
                rate_hold.give_back()
            if budget_hold is not None and self.charges is not None:
                self.charges.accounts.give_back(budget_hold)
            if isinstance(error, ApiError):
                caller.count_refusal(error)
            raise
        request.rate_hold, request.budget_hold = rate_hold, budget_hold
        request.num_chars = 0 if features.has_media else features.num_chars
        return request

    def _check_room(self, features: Features, live: Live, service: Service, longest_tokens: int) -> None:
        """Raises ApiError if neither the service, whose longest request has `longest_tokens`, nor a fallback has
        room."""
        fallbacks, max_held = self._driver.control.fallbacks, self.settings.max_held
        if live.prompt_tokens + live.output_tokens > longest_tokens and not fallbacks.takes(live, service):
            prompt = "the prompt" if features.prompt_tokens is None else f"{live.prompt_tokens:,} prompt tokens"
            wanted = f"{prompt} and {live.output_tokens:,} output tokens"
            what = f"{wanted} exceed the context of {longest_tokens:,} tokens that {service.model} is served with"
            raise ApiError(400, what, "context_length_exceeded")
        is_full = service.hold_queue.num >= max_held and service.hold_queue.is_full(live, max_held)
        if features.is_flex and self._driver.control.num_kept(service) >= max_held:
            is_full = True
        if is_full and not fallbacks.takes(live, service):
            retry_s = 1 + int(service.hold_queue.oldest_s(live, self._clock.now))
            raise ApiError(429, f"{service.model}: too many requests are waiting", "queue_full", retry_after_s=retry_s)
        if self.settings.max_waiting is not None and not fallbacks.takes(live, service):
            self._check_waiting(self.settings.max_waiting, service)

    def _check_waiting(self, max_waiting: int, service: Service) -> None:
        """Raises ApiError if each replica that is up reports at least this many waiting requests."""
        waiting = [self._driver.replicas[view.id].num_waiting for view in service.up_views()]
        if waiting and min(waiting) >= max_waiting:
            what = f"{service.model}: {min(waiting)} requests or more wait at each replica"
            raise ApiError(429, what, "overloaded", retry_after_s=1)

    def _keepers(self, response_id: str, owner: str, service: Service) -> frozenset[int] | None:
        """The replica that stores the response which a request continues; None if no running replica of the service
        does."""
        known = self._responses.holder(response_id)
        if known is None or known[1] != owner:
            return None
        member = service.member(known[0])
        return None if member is None or not member.is_up else frozenset((known[0],))

    def _live(self, features: Features, model: str, tenant: str, deadline_s: float | None, longest: int) -> Live:
        """The request as control sees it. The estimate of its prompt is limited to `longest` tokens."""
        prompt_tokens, output_tokens = self._prompt_tokens(features), features.max_tokens or 1
        if features.prompt_tokens is None:  # an estimate must not cause a refusal, which is left to the engine
            prompt_tokens = max(1, min(prompt_tokens, longest - output_tokens))
        # Messages of two workers may come in another order than their requests.
        self._last_arrival_s = now = max(features.arrival_s, self._last_arrival_s)
        timeout_s = deadline_s or self.settings.timeout_s
        if deadline_s is None and features.is_flex:
            deadline_s = min(self.settings.flex_s, timeout_s)
        live = Live(
            next(self._ids),
            now,
            prompt_tokens,
            output_tokens,
            model,
            features.tier,
            region=features.region,
            session_id=features.session_id,
            prefix=features.prefix,
            slo_ttft_s=features.slo_ttft_s,
            slo_tpot_s=features.slo_tpot_s,
            timeout_s=timeout_s,
            deadline_s=None if deadline_s is None else now + deadline_s,
            tenant=tenant,
            lora=features.model if self._driver.roster.adapters and self._models.parent_of(features.model) else "",
        )
        live.keeps_model, live.num_sequences = features.keeps_model, features.num_sequences
        if self.reasons.get(model):
            live.phase = Phase.REASONING
        return live

    def _prompt_tokens(self, features: Features) -> int:
        """Prompt tokens: exact if given as token ids or counted, otherwise estimated from the length."""
        if features.prompt_tokens is not None:
            return features.prompt_tokens
        return max(1, round(features.num_chars * self._tokens_per_char))

    def most_tokens(self, features: Features) -> MostTokens:
        """The largest possible use of a request, for its caller's rates and budgets. For an unlimited answer, or a
        prompt whose estimate was too low, more is reserved as it is used."""
        cost, cascade = features.cost, self._driver.cascade
        prompt_tokens = self._prompt_tokens(features) + cost.num_tokens + round(cost.num_chars * self._tokens_per_char)
        if features.response_id is not None:
            prompt_tokens += self._responses.num_tokens(features.response_id)
        num_stages = 1 if cascade is None else cascade.num_models(features.model)
        return most_tokens(prompt_tokens, cost.max_tokens, cost.num_sequences, cost.echoes, num_stages)

    def raise_holds(self, requests: Iterable[InFlightRequest]) -> None:
        """Reserve the tokens that requests have already used beyond their reservation."""
        for request in requests:
            hold, live = request.rate_hold, request.live
            if hold is not None and live.generated_tokens:
                hold.raise_to(live.prompt_tokens + live.generated_tokens)
                if self.charges is not None:
                    self.charges.raise_hold(request)

    def settle(self, request: InFlightRequest) -> None:
        """Charge the caller for the tokens used, and learn from the engine's count of the prompt."""
        if request.rate_hold is not None:
            request.rate_hold.settle(request.used_tokens)
            if self.charges is not None:
                self.charges.settle(request)
        if request.counted_prompt_tokens and request.num_chars >= _MIN_COUNTED_CHARS:
            ratio = request.counted_prompt_tokens / request.num_chars
            self._tokens_per_char += _RATIO_WEIGHT * (min(ratio, 2.0) - self._tokens_per_char)
