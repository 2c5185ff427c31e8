"""Records of a made-up run, beside the plain truth: every token of every request, noted as it came."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import numpy as np

from headway.core.record import (
    REQUEST_COLUMNS,
    SEGMENT_COLUMNS,
    STRETCH_COLUMNS,
    Cause,
    Columns,
    Outcome,
    Records,
    ReplicaRecord,
)
from headway.sim.timeline import boundary_s

NAN = float("nan")
FLOATS = {"a_s", "b_s", "score"}


def columns(names: tuple[str, ...], rows: list[tuple]) -> Columns:
    values = zip(*rows, strict=True) if rows else [()] * len(names)
    return {
        name: np.array(column, dtype="f8" if name.endswith("_s") or name in FLOATS else "i8")
        for name, column in zip(names, values, strict=True)
    }


@dataclass
class Job:
    """One request on its way."""

    id: int
    arrival_s: float
    prompt: int
    output: int
    reasoning: int
    ready_s: float
    tokens: list[float] = field(default_factory=list)
    placed_s: float = NAN
    admitted_s: float = NAN
    preemptions: int = 0
    attempts: int = 1
    swapped: bool = False
    segment: dict = field(default_factory=dict)


class Replica:
    """Steps one iteration at a time and writes records as an engine would."""

    def __init__(self, run: Run, id: int) -> None:
        self.run, self.id, self.now, self.tick = run, id, 0.0, 0
        self.waiting: list[Job] = []
        self.decoding: list[Job] = []
        self.stretch: dict | None = None
        self.busy_s = self.kv_token_s = 0.0

    def close_stretch(self) -> None:
        if self.stretch:
            self.run.stretches.append(tuple(self.stretch[name] for name in STRETCH_COLUMNS))
        self.stretch = None

    def close_segment(self, job: Job, cause: Cause) -> None:
        self.close_stretch()
        part = job.segment | {"left_tick": self.tick, "end_s": self.now, "cause": int(cause)}
        self.run.segments.append(tuple(part[name] for name in SEGMENT_COLUMNS))
        job.segment = {}

    def disturb(self) -> None:
        """Preempt, cancel or crash, now and then."""
        rng = self.run.rng
        for job in list(self.decoding):
            if rng.random() < self.run.trouble:
                cause = rng.choice([Cause.PREEMPTED, Cause.SWAPPED, Cause.CANCELLED])
                self.decoding.remove(job)
                self.close_segment(job, cause)
                if cause is Cause.CANCELLED:
                    self.run.end(job, Outcome.CANCELLED, self.id, self.now)
                    continue
                job.preemptions += 1
                job.swapped = cause is Cause.SWAPPED
                job.ready_s = self.now
                self.waiting.append(job)
        if rng.random() < self.run.trouble / 5:
            for job in self.decoding:
                self.close_segment(job, Cause.CRASHED)
                job.attempts += 1
                job.ready_s = self.now
                rng.choice(self.run.replicas).waiting.append(job)
            self.decoding = []

    def step(self) -> None:
        if not self.decoding:
            self.now = max(self.now, min(job.ready_s for job in self.waiting))
            self.close_stretch()
        self.disturb()
        room = self.run.max_batch - len(self.decoding)
        joining = [job for job in self.waiting if job.ready_s <= self.now][:room]
        for job in joining:
            self.admit(job)
        if self.decoding or joining:
            self.iterate(joining)

    def admit(self, job: Job) -> None:
        self.waiting.remove(job)
        if not job.tokens and job.admitted_s != job.admitted_s:
            job.admitted_s, job.placed_s = self.now, job.ready_s
        job.segment = {
            "request": job.id,
            "replica": self.id,
            "attempt": job.attempts - 1,
            "stage": -1,
            "enqueued_s": job.ready_s,
            "admitted_s": self.now,
            "prefill_end_s": NAN,
        }

    def iterate(self, joining: list[Job]) -> None:
        rng = self.run.rng
        advances = bool(self.decoding) and (not joining or rng.random() < 0.5)
        if joining or not self.stretch or not self.stretch["advances"] or self.stretch["prefill_tokens"]:
            self.open_stretch(joining, advances)
        stretch = self.stretch
        assert stretch is not None
        stretch["iterations"] += 1
        before = self.now
        self.now = boundary_s(stretch["start_s"], stretch["a_s"], stretch["b_s"], stretch["iterations"])
        self.busy_s += self.now - before
        self.kv_token_s += (self.now - before) * sum(job.prompt + len(job.tokens) for job in self.decoding)
        if advances:
            self.tick += 1
            for job in self.decoding:
                job.tokens.append(self.now)
        for job in joining:
            if job.swapped:
                job.swapped = False
            else:
                job.tokens.append(self.now)
                job.segment["prefill_end_s"] = self.now
            job.segment["joined_tick"] = self.tick
            self.decoding.append(job)
        for job in [job for job in self.decoding if len(job.tokens) == job.output]:
            self.decoding.remove(job)
            self.close_segment(job, Cause.FINISHED)
            self.run.end(job, Outcome.FINISHED, self.id, self.now)

    def open_stretch(self, joining: list[Job], advances: bool) -> None:
        self.close_stretch()
        rng = self.run.rng
        self.stretch = {
            "replica": self.id,
            "tick": self.tick,
            "start_s": self.now,
            "a_s": rng.uniform(0.01, 0.03),
            "b_s": rng.choice([0.0, rng.uniform(0, 1e-3)]),
            "iterations": 0,
            "advances": int(advances),
            "num_decode": len(self.decoding),
            "prefill_tokens": sum(job.prompt for job in joining),
            "context_tokens": sum(job.prompt + len(job.tokens) for job in self.decoding),
            "num_waiting": len(self.waiting),
        }


class Run:
    """`records`, and the truth: `tokens[id]` = the times of its tokens."""

    def __init__(
        self,
        seed: int,
        num_requests: int = 60,
        num_replicas: int = 3,
        trouble: float = 0.01,
        stop_s: float = 1e9,
    ) -> None:
        self.rng = random.Random(seed)
        self.trouble, self.max_batch = trouble, 6
        self.stretches: list[tuple] = []
        self.segments: list[tuple] = []
        self.requests: list[tuple] = []
        self.replicas = [Replica(self, i) for i in range(num_replicas)]
        arrivals = sorted(self.rng.uniform(0, num_requests / 10) for _ in range(num_requests))
        self.jobs = [self.make(i, t) for i, t in enumerate(arrivals)]
        for job in self.jobs[1:]:
            self.rng.choice(self.replicas).waiting.append(job)
        if self.jobs:
            self.end(self.jobs[0], Outcome.REJECTED, -1, self.jobs[0].arrival_s)
        self.play(stop_s)
        self.tokens = {job.id: job.tokens for job in self.jobs}
        self.records = self.make_records()

    def make(self, id: int, arrival_s: float) -> Job:
        output = self.rng.choice([1, 2, self.rng.randint(3, 90)])
        reasoning = self.rng.choice([0, output // 2])
        return Job(id, arrival_s, self.rng.randint(1, 500), output, reasoning, arrival_s)

    def play(self, stop_s: float) -> None:
        while busy := [r for r in self.replicas if r.decoding or r.waiting]:
            replica = min(busy, key=lambda r: r.now)
            if replica.now > stop_s:
                break
            replica.step()
        self.end_s = max((r.now for r in self.replicas), default=0.0)
        for replica in self.replicas:
            replica.close_stretch()
            for job in replica.decoding:
                replica.close_segment(job, Cause.UNFINISHED)
            for job in replica.decoding + replica.waiting:
                self.end(job, Outcome.UNFINISHED, replica.id, self.end_s)

    def end(self, job: Job, outcome: Outcome, replica: int, now: float) -> None:
        tokens = job.tokens
        answer_s = tokens[job.reasoning] if len(tokens) > job.reasoning else NAN
        first_s = tokens[0] if tokens else NAN
        reasoning_end_s = tokens[job.reasoning - 1] if 0 < job.reasoning <= len(tokens) else NAN
        row = (
            job.id, int(outcome), job.attempts, job.preemptions, replica, job.placed_s, job.admitted_s,
            first_s, answer_s, now, len(tokens), job.prompt // 2 if tokens else 0,
            reasoning_end_s, 0, -1, NAN,
        )  # fmt: skip
        self.requests.append(row)

    def make_records(self) -> Records:
        jobs, rng = self.jobs, self.rng
        workload: Columns = {
            "arrival_s": np.array([j.arrival_s for j in jobs]),
            "prompt_tokens": np.array([j.prompt for j in jobs], dtype="i4"),
            "output_tokens": np.array([j.output for j in jobs], dtype="i4"),
            "reasoning_tokens": np.array([j.reasoning for j in jobs], dtype="i4"),
            "model": np.array([rng.randrange(2) for _ in jobs], dtype="i2"),
            "tier": np.array([rng.randrange(3) for _ in jobs], dtype="i2"),
            "region": np.array([rng.randrange(2) for _ in jobs], dtype="i2"),
            "tenant": np.array([j.prompt % 2 for j in jobs], dtype="i2"),
            "slo_ttft_s": np.array([rng.choice([NAN, 0.5, 5.0]) for _ in jobs]),
            "slo_e2e_s": np.array([rng.choice([NAN, 1.0, 20.0]) for _ in jobs]),
        }
        replicas = tuple(
            ReplicaRecord(
                id=r.id,
                pool="pool",
                model=("llama-a", "llama-b")[r.id % 2],
                gpu="h100",
                region="east",
                num_gpus=2,
                usd_per_hour=4.0,
                watts=700.0,
                kv_capacity_tokens=4000,
                max_num_seqs=6,
                up=((0.0, self.end_s),),
            )
            for r in self.replicas
        )
        return Records(
            workload=workload,
            models=("llama-a", "llama-b"),
            regions=("east", "west"),
            tenants=("ann", "bob"),
            requests=columns(REQUEST_COLUMNS, self.requests),
            segments=columns(SEGMENT_COLUMNS, self.segments),
            stretches=columns(STRETCH_COLUMNS, self.stretches),
            replicas=replicas,
            end_s=self.end_s,
        )

    def gaps(self, ids: list[int] | None = None) -> list[float]:
        """Every inter-token latency, one by one."""
        chosen = range(len(self.jobs)) if ids is None else ids
        return [gap for i in chosen for gap in np.diff(self.tokens[i])]
