"""The recipes that differ in what they ask of an engine, two steps each, on vLLM."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from recipe_run import SHOWS, check_two_steps, make_task

IN_FLOAT16 = ("reinforce", "scalerl-bf16-head")  # bfloat16 takes AMX, which not all hosts grant


@pytest.fixture(scope="module")
def task(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    with pytest.MonkeyPatch.context() as patch:
        yield make_task(tmp_path_factory.mktemp("task"), "vllm", patch)


@pytest.mark.slow
@pytest.mark.usefixtures("vllm_installed")
@pytest.mark.parametrize("recipe", sorted(SHOWS))
def test_a_recipe_trains_two_steps_on_vllm(recipe: str, task: Path, tmp_path: Path) -> None:
    dtype = "float16" if recipe in IN_FLOAT16 else "float32"
    check_two_steps(recipe, task, tmp_path / "run", "--model.dtype", dtype)
