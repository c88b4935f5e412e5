"""A taskset of verifiers whose tasks use a tool, have no reward or a fault, or two conversations."""

from collections.abc import Iterator

import verifiers.v1 as vf

__all__ = ["OddEnv", "OddTasks"]


class Times(vf.Toolset[vf.ToolsetConfig, vf.State]):
    TOOL_PREFIX = "calculator"

    @vf.tool
    def times(self, a: int, b: int) -> str:
        """The product."""
        return str(a * b)


class Data(vf.TaskData):
    wants: str


class Task(vf.Task[Data]):
    @classmethod
    def toolsets(cls, config: vf.TaskConfig) -> list[vf.Toolset]:
        return [Times(vf.ToolsetConfig())]

    @vf.reward
    async def product(self, trace: vf.Trace) -> float | dict[str, float]:
        if self.data.wants == "a fault":
            raise ZeroDivisionError("of the taskset")
        return {} if self.data.wants == "no reward" else float("391" in trace.last_reply)


class OddTasks(vf.Taskset[Task, vf.TasksetConfig]):
    def load(self) -> Iterator[Task]:
        for wants in ("a product", "no reward", "a fault", "two conversations"):
            yield Task(Data(prompt="17 * 23?", system_prompt="Be brief.", wants=wants), self.config.task)


class OddEnvConfig(vf.EnvConfig):
    agent: vf.AgentConfig = vf.AgentConfig()


class OddEnv(vf.Env[OddEnvConfig]):
    async def run(self, task: vf.Task, agents: vf.Agents) -> None:
        await agents.agent.run(task)
        if task.data.wants == "two conversations":
            await agents.agent.run(task)


if __name__ == "__main__":  # verifiers starts the server so
    Times.run()
