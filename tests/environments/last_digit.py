"""A taskset of verifiers in one turn: the last digit of a number."""

from collections.abc import Iterator

import verifiers.v1 as vf

__all__ = ["LastDigit"]


class Data(vf.TaskData):
    answer: str


class Task(vf.Task[Data]):
    @vf.reward(weight=0.5)
    async def right(self, trace: vf.Trace) -> float:
        return float(trace.last_reply[-1:] == self.data.answer)

    @vf.reward(weight=0.5)
    async def short(self, trace: vf.Trace) -> float:
        return float(trace.last_reply.isdigit()) / max(len(trace.last_reply), 1)


class LastDigit(vf.Taskset[Task, vf.TasksetConfig]):
    def load(self) -> Iterator[Task]:
        for i in range(4000):
            yield Task(Data(prompt=f"{i:04d} = ", answer=str(i % 10)), self.config.task)
