"""An environment of verifiers in several turns: its user says whether the number is higher or lower.

The reward is 1 for the number, and up to .5 for short turns: the best is to say a digit.
"""

import random
from collections.abc import Iterator

import verifiers.v1 as vf

__all__ = ["HigherLower", "HigherLowerEnv"]


class Data(vf.TaskData):
    number: int


class Task(vf.Task[Data]):
    @vf.reward
    async def guessed(self, trace: vf.Trace) -> float:
        return float(trace.last_reply == str(self.data.number))

    @vf.reward(weight=0.5)
    async def short(self, trace: vf.Trace) -> float:
        turns = [(message.content or "").strip() for message in trace.assistant_messages]
        return sum(turn.isdigit() / max(len(turn), 1) for turn in turns) / len(turns)


class HigherLower(vf.Taskset[Task, vf.TasksetConfig]):
    def load(self) -> Iterator[Task]:
        for i in range(4000):
            secret = random.Random(i).randint(1, 7)
            yield Task(Data(prompt=f"{i:04d}\n", number=secret), self.config.task)


class HigherLowerEnvConfig(vf.EnvConfig):
    player: vf.AgentConfig = vf.AgentConfig(max_turns=3)


class HigherLowerEnv(vf.Env[HigherLowerEnvConfig]):
    async def run(self, task: vf.Task, agents: vf.Agents) -> None:
        async with agents.player.interaction(task) as interaction:
            segment = await interaction.turn()
            while not segment.terminated and segment.last_reply != str(task.data.number):
                low = segment.last_reply.isdigit() and int(segment.last_reply) < task.data.number
                segment = await interaction.turn("+\n" if low else "-\n")
