"""A router of your own: long prompts keep out of each other's way."""

from headway.core.decision import Placement
from headway.core.view import FleetView, ReplicaView, RequestView


class LongPromptsApart:
    """A long prompt goes where the fewest prompt tokens wait, a short one where the fewest requests are."""

    def __init__(self, long_prompt_tokens: int = 2000) -> None:
        self.long_prompt_tokens = long_prompt_tokens

    def route(self, request: RequestView, view: FleetView) -> Placement:
        def load(replica: ReplicaView) -> int:
            is_long = request.prompt_tokens >= self.long_prompt_tokens
            return replica.prefill_tokens_left if is_long else replica.num_in_flight

        return Placement(min(view.replicas, key=load).id)
