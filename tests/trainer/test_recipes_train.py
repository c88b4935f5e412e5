"""The promise that every recipe file trains: two steps of the whole program, with a tiny random model.

The launcher runs in the test's process. Its roles are real processes, forked from a server that has
imported what they need, so that a run takes a second. On vLLM: engines/contract/test_recipes_served.py.
"""

from collections.abc import Iterator
from pathlib import Path

import pytest
from recipe_run import SHOWS, check_two_steps, make_task

from trainer.config.layers import RECIPES

RECIPE_NAMES = {path.stem for path in RECIPES.glob("*.yaml")}
QUICK = {"tiny", "scalerl"}  # those of `make test`
RECIPES_TO_TRAIN = [
    pytest.param(name, marks=[] if name in QUICK else pytest.mark.slow) for name in sorted(RECIPE_NAMES)
]


@pytest.fixture(scope="module")
def task(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    with pytest.MonkeyPatch.context() as patch:
        yield make_task(tmp_path_factory.mktemp("task"), "torch", patch)


@pytest.mark.parametrize("recipe", RECIPES_TO_TRAIN)
def test_every_recipe_trains_two_steps(recipe: str, task: Path, tmp_path: Path) -> None:
    check_two_steps(recipe, task, tmp_path / "run")


def test_what_recipes_must_show_is_of_recipes_that_exist() -> None:
    assert set(SHOWS) <= RECIPE_NAMES and set(QUICK) <= RECIPE_NAMES
