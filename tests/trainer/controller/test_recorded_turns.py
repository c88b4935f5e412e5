"""Promises of the journal of episodes: after a crash no turn on record is asked for again, none is lost."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fakes import (
    FakeEngine,
    FakeLearner,
    Request,
    configured,
    context,
    controller,
    experts_of,
    having,
    journal,
)
from fakes import prompts as items

from trainer.config import Config, ConfigError, EnvironmentConfig
from trainer.controller.episode import play
from trainer.controller.journal import Journal, replay
from trainer.controller.sampler import IssuedPrompt
from trainer.controller.turns import Part, Past, Tape
from trainer.environments.pool import EnvironmentFailure, Step
from trainer.types import Rollout

KIND = {"kind": "fakes:Fake", "max_turns": 5}


@dataclass
class Story:
    """An environment of so many turns that says their number; with `fails` its last turn is an error. Without
    a number it follows from the model's first turn, and every fourth episode fails."""

    turns: int = 0
    says: str = "turn"
    fails: bool = False
    count: int = 0
    seconds: float = 0.25

    async def start(self, row: dict[str, Any]) -> Step:
        return Step(({"role": "user", "content": "begin"},))

    async def step(self, message: dict[str, Any]) -> Step:
        self.count += 1
        if not self.turns:
            self.turns = 1 + len(message["content"].split()) % 4
            self.fails = self.turns == 4
        await asyncio.sleep(0.001)
        if self.fails and self.count == self.turns:
            raise EnvironmentFailure("environment Fake: it broke")
        says = ({"role": "user", "content": f"{self.says} {self.count}"},)
        return Step(says, self.count / 8, self.count == self.turns)


class Stories:
    """A pool of these environments, in turn, and then of others."""

    def __init__(self, *stories: Story) -> None:
        self.stories, self.opened = stories, 0

    @asynccontextmanager
    async def episode(self, evaluation: bool = False) -> AsyncIterator[Story]:
        self.opened += 1
        yield self.stories[self.opened - 1] if self.stories else Story()


def played(story: Story, tape: Tape, engine: FakeEngine) -> Rollout:
    config = having(Config(environment=EnvironmentConfig(**KIND)), engine={"max_new_tokens": 200})
    pools: Any = {"": Stories(story)}
    encode = lambda text: [ord(c) + 500 for c in text]  # noqa: E731  # a one-line tokenizer
    ctx = context(config, engine, environments=pools, encode=encode)
    request = Request("g5", items(1)[0].token_ids, 1, 200, 1.0, frozenset({0}), 7, experts_from=0)
    return asyncio.run(play(ctx, items(1)[0], request, 3, 200, tape))


def assert_equal(rollout: Rollout, expected: Rollout) -> None:
    for a, b in zip(asdict(rollout).values(), asdict(expected).values(), strict=True):
        np.testing.assert_array_equal(a, b)
        assert getattr(a, "dtype", None) == getattr(b, "dtype", None)


@pytest.mark.parametrize("fails", [False, True])
def test_an_episode_goes_on_from_the_journal_as_if_it_had_never_stopped(tmp_path: Path, fails: bool) -> None:
    written, issued = Journal(tmp_path / "journal"), IssuedPrompt(5, 0, items(1)[0], 0)
    written.issued(issued)
    unbroken, turns = FakeEngine(lambda request, index: 1 + len(request.prompt_ids) % 4), list[Part]()

    def record(number: int, part: Part) -> None:
        turns.append(part)
        written.turn(5, 3, number, part)

    whole = played(Story(4, fails=fails), Tape(record=record, end=lambda r: written.ended(5, 3, r)), unbroken)
    assert len(turns) == 4 and whole.scored is not fails
    np.testing.assert_array_equal(whole.experts, experts_of([*items(1)[0].token_ids, *whole.token_ids]))
    issued_again, finished, pasts = replay(tmp_path / "journal", 0, {items(1)[0].prompt_id: items(1)[0]})
    assert issued_again == {5: issued} and not finished and pasts.keys() == {5} and pasts[5].keys() == {3}
    past = pasts[5][3]
    assert past.rollout is not None
    assert_equal(past.rollout, whole)
    assert played(Story(0), Tape(past), FakeEngine()) is past.rollout  # nobody is asked
    for count in range(4):
        engine = FakeEngine(unbroken.lengths)
        again = list[int]()
        tape = Tape(Past(past.parts[:count]), lambda number, part: again.append(number))  # noqa: B023
        assert_equal(played(Story(4, fails=fails), tape, engine), whole)
        assert engine.requests == unbroken.requests[count:] and again == [*range(count, 4)]


def test_an_episode_that_ends_earlier_in_a_resumed_run_has_its_own_tokens(tmp_path: Path) -> None:
    """Not also those of the turns that followed before the run was killed."""
    turns, differs = list[Part](), list[int]()
    record = lambda number, part: turns.append(part)  # noqa: E731  # a one-line spy
    whole = played(Story(4), Tape(record=record), FakeEngine(lambda request, index: 2))
    written = Journal(tmp_path / "journal")
    written.issued(IssuedPrompt(5, 0, items(1)[0], 0), {3: Past(list(turns))})
    end = lambda rollout: written.ended(5, 3, rollout)  # noqa: E731  # a one-line spy
    tape = Tape(Past(list(turns)), end=end, differs=lambda: differs.append(1))
    short = played(Story(2), tape, FakeEngine())
    assert 0 < len(short.token_ids) < len(whole.token_ids) and differs == [1]
    rollout = replay(tmp_path / "journal", 0, {items(1)[0].prompt_id: items(1)[0]})[2][5][3].rollout
    assert rollout is not None
    assert_equal(rollout, short)


def test_where_the_environment_says_something_else_the_rest_is_generated_again() -> None:
    turns, differs = list[Part](), list[int]()
    record = lambda number, part: turns.append(part)  # noqa: E731  # a one-line spy
    played(Story(4), Tape(record=record), FakeEngine(lambda request, index: 2))
    assert [len(injected) for injected, _ in turns] == [5, 6, 6, 6]
    other = Story(4, says="twist")
    tape = Tape(
        Past(turns[:3]), lambda number, part: differs.append(number), differs=lambda: differs.append(-1)
    )
    engine = FakeEngine(lambda request, index: 2)
    played(other, tape, engine)
    assert differs == [-1, 1, 2, 3]  # said once; the first turn is still true
    assert [r.request_id for r in engine.requests] == ["g5.3.1", "g5.3.2", "g5.3.3"]


def test_a_turn_replaces_the_later_ones_and_a_new_issue_takes_along_what_it_goes_on_with(
    tmp_path: Path,
) -> None:
    turns, prompt = list[Part](), items(1)[0]
    whole = played(Story(4), Tape(record=lambda n, part: turns.append(part)), FakeEngine())
    written, issued = Journal(tmp_path / "journal"), IssuedPrompt(2, 0, prompt, 0)

    def pasts() -> dict[int, tuple[int, bool]]:
        found = replay(tmp_path / "journal", 0, {prompt.prompt_id: prompt})[2].get(2, {})
        return {i: (len(past.parts), past.rollout is not None) for i, past in found.items()}

    written.issued(issued)
    for number, part in enumerate(turns):
        written.turn(2, 0, number, part)
        written.turn(2, 1, number, part)
    written.ended(2, 1, whole)
    assert pasts() == {0: (4, False), 1: (4, True)}
    written.turn(2, 1, 2, turns[2])
    assert pasts() == {0: (4, False), 1: (3, False)}
    known = replay(tmp_path / "journal", 0, {prompt.prompt_id: prompt})[2][2]
    written.issued(
        issued, {0: known[0].keep(lambda versions: False), 1: Past(known[1].parts[:2]), 2: Past(turns, whole)}
    )
    written.close()
    assert pasts() == {1: (2, False), 2: (4, True)}
    file = tmp_path / "journal" / "000000.jsonl"
    file.write_text(file.read_text()[:-9])  # as if the machine died in it: what was there before counts
    assert pasts() == {0: (4, False), 1: (3, False)}


@pytest.mark.parametrize("k", [0, 2])
def test_a_run_that_ends_between_turns_asks_only_for_those_that_are_not_on_record(
    tmp_path: Path, k: int
) -> None:
    config = having(configured(tmp_path, k, steps=8), environment=KIND, evaluation={"every": 100})
    config = having(config, engine={"max_new_tokens": 200}, pipeline={"completions_per_prompt": 4})

    def begin(learner: FakeLearner, state: dict[str, Any] | None = None) -> FakeEngine:
        engine = FakeEngine(lambda request, index: 1 + request.seed // (1 << 16) % 5)
        run = controller(config, engine, learner)
        run.ctx.environments[""] = Stories()  # type: ignore[assignment]  # it obeys the protocol
        if state is not None:
            run.restore(state)

        async def train() -> None:
            await run.weights.push(run.version)
            await run.run()

        asyncio.run(train())
        return engine

    def names(engine: FakeEngine) -> list[str]:
        return [r.request_id for r in engine.requests if r.request_id.startswith("g")]

    killed, learner = FakeLearner(0.02, refused=4), FakeLearner()
    with pytest.raises(ConfigError, match="step 4"):
        begin(killed)
    state = killed.saved[-1][1]
    by_id = {p.prompt_id: p for p in items(20)}
    _, finished, pasts = replay(tmp_path / "journal", state["group_id"], by_id)
    recorded = {
        f"g{g}.{i}" + f".{n}" * (n > 0)
        for g, episodes in pasts.items()
        for i, past in episodes.items()
        for n in range(len(past.parts))
    }
    assert not k or recorded  # with lag, episodes were open
    asked = names(begin(learner, state))
    assert len(asked) == len(set(asked)) and not recorded.intersection(asked)
    assert not {f"g{g}" for g in finished} & {name.partition(".")[0] for name in asked}
    trained = [(r["first"], r["last"]) for r in journal(config, "trained")]
    assert trained == [(4 * i, 4 * i + 3) for i in range(8)]
    ended = {r["finished"]: r["episode"] for r in journal(config, "finished")}
    assert ended.keys() >= {*range(32)}
    for number in range(state["group_id"], 32):  # each turn of it was recorded before, or asked for now
        played_turns = {
            f"g{number}.{i}" + f".{n}" * (n > 0)
            for i, episode in enumerate(ended[number])
            for n in range(episode["count"])
        }
        here = {name for name in (*recorded, *asked) if name.split(".")[0] == f"g{number}"}
        assert number in finished or here == played_turns
    lag = max(b.step - 1 - int(s.versions.min()) for b in learner.batches for s in b.sequences)
    assert lag <= k
