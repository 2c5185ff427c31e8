"""Counts the tokens of an answer with several choices."""

from __future__ import annotations

from headway.gateway.upstream.chunks import Chunk, Usage


class ChoiceCounts:
    """Counts the tokens of an answer with several choices, for each engine's way to report usage. vLLM and SGLang
    report the total at the end and, on request, each choice's tokens with the choice's chunks. llama.cpp reports one
    choice's tokens in `timings`, a field of no other engine: at the end of each choice, and in an unstreamed answer.
    """

    def __init__(self, num_choices: int, num_prompts: int = 1) -> None:
        self._num_choices, self._num_prompts = num_choices, max(num_prompts, 1)
        self._prompts: dict[int, tuple[int, int]] = {}
        """Tokens of each prompt and how many of them were cached, if each choice reports its own prompt."""
        self._finished: set[int] = set()
        self._by_choice: dict[int, int] = {}
        self._total = self._sum = 0
        """(last usage that belongs to no choice, sum of all usages that belong to no choice)."""
        self._is_of_choices = False
        """Whether usages without a choice cover one choice each."""
        self._are_usages_of_choices = False
        """Whether the usages of a choice cover only that choice."""

    @property
    def num_finished(self) -> int:
        return len(self._finished)

    @property
    def num(self) -> int:
        """Tokens of all choices so far."""
        if self._is_of_choices:
            return max(self._sum, sum(self._by_choice.values()))
        return self._total or sum(self._by_choice.values())

    def add(self, chunk: Chunk) -> int:
        """Add a chunk of a stream; returns the tokens of all choices so far."""
        usage, timings, choices = chunk.usage, chunk.timings, chunk.choices
        one = choices[0] if len(choices) == 1 else None
        was_over = self.num_finished >= self._num_choices
        for choice in choices:
            if choice.finish_reason is not None:
                self._finished.add(choice.index)
            counted, delta = self._by_choice.get(choice.index, 0), choice.delta
            if choice.token_ids is not None:
                counted += len(choice.token_ids)
            elif choice.text or (
                delta is not None
                and (delta.content or delta.reasoning or delta.reasoning_content or delta.tool_calls is not None)
            ):
                counted += 1
            if choice is one and timings is not None:
                counted = timings.predicted_n or counted
            if choice.usage is not None:
                counted = choice.usage.completion_tokens or counted
            self._by_choice[choice.index] = counted
        if usage is None or not usage.completion_tokens:
            return self.num
        is_over = self.num_finished >= self._num_choices
        self._are_usages_of_choices |= one is not None and not is_over
        if one is not None and (timings is not None or was_over or self._are_usages_of_choices):
            self._by_choice[one.index] = usage.completion_tokens
        else:
            self._is_of_choices |= timings is not None or not is_over
            self._total = usage.completion_tokens
            self._sum += usage.completion_tokens
        return self.num

    def add_prompt(self, choice: int, usage: Usage) -> tuple[int, int]:
        """Add the prompt of an ended choice. Returns (prompt tokens, cached prompt tokens) of all ended choices, each
        prompt counted once."""
        prompt = choice * self._num_prompts // self._num_choices
        self._prompts.setdefault(prompt, (usage.prompt_tokens, usage.cached_tokens))
        return sum(tokens for tokens, _ in self._prompts.values()), sum(cached for _, cached in self._prompts.values())

    def of_whole(self, chunk: Chunk) -> int:
        """Tokens of all choices of an answer that is not streamed."""
        usage, timings, num = chunk.usage, chunk.timings, len(chunk.choices)
        reported = 0 if usage is None else usage.completion_tokens
        counts = [each.usage.completion_tokens for each in chunk.choices if each.usage is not None]
        if len(counts) == num and num:
            return max(reported, sum(counts))
        is_of_one = timings is not None and timings.predicted_n == reported
        return reported * max(num, 1) if is_of_one else reported
