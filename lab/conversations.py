"""Requests that follow from each other: conversations, whose turns begin with all before them, and trees of agents."""

from __future__ import annotations

from random import Random
from typing import ClassVar

from pydantic import Field

from engine.lab.arrivals import Arrival, Piece, Workload, seed_of
from engine.lab.lengths import distribution, whole
from engine.lab.spelled import Source


class Conversations(Source):
    """People who talk: each turn is asked after the answer before it and a pause, and begins with all said so far."""

    name: ClassVar[str] = "conversations"
    rate: float = Field(..., gt=0, description="conversations that begin a second (Poisson)")
    sessions: int = Field(200, ge=1, description="conversations")
    turns: str = Field("1-8", description="turns of one")
    system: int = Field(256, ge=0, description="tokens with which all begin alike")
    systems: int = Field(1, ge=1, description="different such beginnings, all equally often")
    prompt: str = Field("lognormal:128:1:4000", description="tokens that a turn adds")
    output: str = Field("lognormal:192:0.7:2000", description="tokens of an answer")
    pause: str = Field("exp:15", description="seconds from an answer to the next turn")

    def make(self, seed: int = 0) -> Workload:
        """Turns of a conversation bear its name, and are told to policies as one session."""
        prompt, output = distribution(self.prompt, "prompt"), distribution(self.output, "output")
        turns, pause = distribution(self.turns, "turns"), distribution(self.pause, "pause")
        clock, rng = Random(seed_of(seed, "conversations", "times")), Random(seed_of(seed, "conversations"))
        now, arrivals = 0.0, []
        for number in range(self.sessions):
            now += clock.expovariate(self.rate)
            start = seed_of(seed, "system", rng.randrange(self.systems))
            before = ""
            for turn in range(whole(turns, rng)):
                own = Piece(seed_of(seed, "turn", number, turn), whole(prompt, rng))
                system = () if before or not self.system else (Piece(start, self.system),)
                name = f"s{number}.{turn}"
                arrivals.append(
                    Arrival(
                        name,
                        max(0.0, pause(rng)) if before else now,
                        (*system, own),
                        whole(output, rng),
                        after=(before,) if before else (),
                        continues=before,
                        session=f"s{number}",
                    )
                )
                before = name
        return Workload(arrivals, self.spelled())


class Agents(Source):
    """Runs of agents: one call plans, workers fan out over tools, and a last call reads what they report.

    All planners begin alike, and so do all workers; those of one run share its task, too. A worker's every call begins
    with all of its calls before and what the tool has answered.
    """

    name: ClassVar[str] = "agents"
    rate: float = Field(..., gt=0, description="runs that begin a second (Poisson)")
    runs: int = Field(50, ge=1, description="runs")
    fanout: str = Field("2-6", description="workers of a run")
    calls: str = Field("2-8", description="calls of a worker")
    system: int = Field(1024, ge=0, description="tokens of instructions and tools, alike in all runs")
    task: str = Field("lognormal:256:0.7:4000", description="tokens of a run's task, alike in its workers")
    output: str = Field("lognormal:96:0.8:2000", description="tokens that a call answers")
    tool: str = Field("lognormal:384:1:8000", description="tokens that a tool answers")
    pause: str = Field("exp:1.5", description="seconds that a tool takes")

    def make(self, seed: int = 0) -> Workload:
        """A worker's calls are a session of their own; a run is a tenant."""
        clock, rng = Random(seed_of(seed, "agents", "times")), Random(seed_of(seed, "agents"))
        now, arrivals = 0.0, []
        for number in range(self.runs):
            now += clock.expovariate(self.rate)
            arrivals += self._run(seed, number, now, rng)
        return Workload(arrivals, self.spelled())

    def _run(self, seed: int, number: int, start: float, rng: Random) -> list[Arrival]:
        output, tool = distribution(self.output, "output"), distribution(self.tool, "tool")
        pause = distribution(self.pause, "pause")
        run = f"run{number}"
        task = Piece(seed_of(seed, run), whole(distribution(self.task, "task"), rng))
        shared = (lambda who: (Piece(seed_of(seed, who), self.system), task)) if self.system else lambda who: (task,)
        plan = Arrival(f"{run}.plan", start, shared("planner"), whole(output, rng), tenant=run, session=run)
        found, ends = [plan], []
        for worker in range(whole(distribution(self.fanout, "fanout"), rng)):
            session, before = f"{run}.w{worker}", ""
            for call in range(whole(distribution(self.calls, "calls"), rng)):
                own = Piece(seed_of(seed, session, call), whole(tool, rng))
                name = f"{session}.{call}"
                found.append(
                    Arrival(
                        name,
                        max(0.0, pause(rng)) if before else 0.0,
                        (own,) if before else (*shared("worker"), own),
                        whole(output, rng),
                        after=(before or plan.id,),
                        continues=before,
                        tenant=run,
                        session=session,
                    )
                )
                before = name
            ends.append(before)
        report = Piece(seed_of(seed, run, "report"), sum(whole(output, rng) for _ in ends))
        found.append(
            Arrival(
                f"{run}.end",
                0.0,
                (report,),
                whole(output, rng),
                after=(plan.id, *ends),
                continues=plan.id,
                tenant=run,
                session=run,
            )
        )
        return found


KINDS = (Conversations, Agents)
