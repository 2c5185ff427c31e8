"""One replica, stepped iteration by iteration over plain lists: what the fast engine must agree with.

Independent of `headway.sim` and naive on purpose. First come, first served; no prefix cache; preemption by
recompute. Every block and every token is counted one request at a time, and time is a running sum.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

Step = Callable[[int, int, list[tuple[int, int]]], float]
"""(decoding requests, their KV tokens before, prefill (tokens, KV tokens before) pairs) -> seconds."""


@dataclass(eq=False)
class Job:
    """A request, and in the end what became of it."""

    id: int
    arrival_s: float
    prompt_tokens: int
    output_tokens: int
    admitted_s: float | None = None
    """When its first prefill was first scheduled."""
    token_s: list[float] = field(default_factory=list)
    preemptions: int = 0
    kv_tokens: int = 0
    target_tokens: int = 0
    """KV tokens at which its prefill is complete."""
    blocks: int = 0

    @property
    def is_decoding(self) -> bool:
        """Its prefill is complete. Asked of running requests only."""
        return self.kv_tokens >= self.target_tokens


@dataclass
class ReferenceEngine:
    """The replica. `num_blocks` KV blocks, of which admission leaves `int(watermark * num_blocks)` free."""

    step: Step
    batching: str = "chunked"
    max_num_seqs: int = 256
    max_num_batched_tokens: int = 8192
    block_size_tokens: int = 16
    num_blocks: int = 10**9
    watermark: float = 0.0
    waiting: list[Job] = field(default_factory=list)
    running: list[Job] = field(default_factory=list)
    """In order of admission."""
    chunks: list[tuple[Job, int]] = field(default_factory=list)
    """Who prefills how many tokens in the coming iteration."""
    was_preempted: bool = False
    """Somebody was, while the coming iteration was being scheduled."""

    def run(self, requests: Sequence[tuple[float, int, int]]) -> list[Job]:
        """Serve (arrival_s, prompt_tokens, output_tokens), in order of arrival, to the end."""
        jobs = [Job(id, *request) for id, request in enumerate(requests)]
        coming = list(jobs)
        now = 0.0
        while coming or self.waiting or self.running:
            while coming and coming[0].arrival_s <= now:
                self.wait(coming.pop(0))
            if not self.waiting and not self.running:
                now = coming[0].arrival_s
                continue
            decoding = self.schedule(now)
            if decoding or self.chunks:
                now += self.duration(decoding)
                self.finish_iteration(decoding, now)
            elif not self.was_preempted:
                raise RuntimeError(f"stuck at {now} s with {len(self.waiting)} requests waiting")
        return jobs

    def wait(self, job: Job) -> None:
        """Stand in line, in order of arrival, to prefill the prompt and whatever was generated."""
        job.kv_tokens = job.blocks = 0
        job.target_tokens = job.prompt_tokens + len(job.token_s)
        self.waiting.append(job)
        self.waiting.sort(key=lambda other: (other.arrival_s, other.id))

    # One scheduling step.

    def schedule(self, now: float) -> list[Job]:
        """Fill `chunks`; returns who decodes."""
        self.chunks = []
        self.was_preempted = False
        whole = self.batching != "chunked"
        if self.batching == "prefill-first":
            self.admit(self.max_num_batched_tokens, whole, now)
            return [] if self.chunks else self.schedule_decodes()
        was_empty = not self.running
        decoding = self.schedule_decodes()
        budget = self.max_num_batched_tokens - len(decoding)
        if self.batching == "request-level":
            if was_empty:
                self.admit(budget, whole, now)
            return decoding
        budget = self.continue_prefills(budget)
        decoding = [job for job in decoding if job in self.running]
        if not self.was_preempted:
            self.admit(budget, whole, now)
        return decoding

    def schedule_decodes(self) -> list[Job]:
        """A token for every decoding request, and a block where its last one is full."""
        return [
            job
            for job in list(self.running)
            if job in self.running and job.is_decoding and self.take_blocks(job, job.kv_tokens + 1)
        ]

    def continue_prefills(self, budget: int) -> int:
        """The next chunk of every prompt in progress; returns the budget that is left."""
        for job in list(self.running):
            if job in self.running and not job.is_decoding and budget > 0:
                chunk = min(job.target_tokens - job.kv_tokens, budget)
                if self.take_blocks(job, job.kv_tokens + chunk):
                    self.chunks.append((job, chunk))
                    budget -= chunk
        return budget

    def take_blocks(self, job: Job, tokens: int) -> bool:
        """Have blocks for `tokens`, preempting the last admitted until there are; False if that was `job`."""
        wanted = self.blocks_of(tokens) - job.blocks
        while self.num_free() < wanted:
            victim = self.running.pop()
            victim.preemptions += 1
            self.was_preempted = True
            self.wait(victim)
            if victim is job:
                return False
        job.blocks += wanted
        return True

    def admit(self, budget: int, whole: bool, now: float) -> None:
        """From the head of the line, while seats, budget and blocks last."""
        spare = int(self.watermark * self.num_blocks)
        while self.waiting and len(self.running) < self.max_num_seqs and budget > 0:
            job = self.waiting[0]
            chunk = job.target_tokens if whole else min(job.target_tokens, budget)
            if chunk > budget and self.chunks:
                return
            if self.num_free() - self.blocks_of(chunk) < spare:
                return
            self.waiting.pop(0)
            self.running.append(job)
            job.blocks = self.blocks_of(chunk)
            if job.admitted_s is None:
                job.admitted_s = now
            self.chunks.append((job, chunk))
            budget -= chunk

    def blocks_of(self, tokens: int) -> int:
        """Blocks that these tokens of one request take."""
        return (tokens + self.block_size_tokens - 1) // self.block_size_tokens

    def num_free(self) -> int:
        """Blocks that nobody holds."""
        return self.num_blocks - sum(job.blocks for job in self.running)

    # One iteration.

    def duration(self, decoding: list[Job]) -> float:
        """How long the scheduled iteration takes."""
        context_tokens = sum(job.kv_tokens for job in decoding)
        return self.step(len(decoding), context_tokens, [(n, job.kv_tokens) for job, n in self.chunks])

    def finish_iteration(self, decoding: list[Job], now: float) -> None:
        """Tokens are out: one for who decoded, one for whose prefill is complete."""
        for job, chunk in self.chunks:
            job.kv_tokens += chunk
            if job.is_decoding:
                job.token_s.append(now)
        for job in decoding:
            job.kv_tokens += 1
            job.token_s.append(now)
        self.running = [job for job in self.running if len(job.token_s) < job.output_tokens]
