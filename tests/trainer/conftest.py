"""The runs of seconds that tests of whole programs start."""

from collections.abc import Callable
from functools import partial

import pytest


@pytest.fixture(scope="session")
def begin(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., list[str]]:
    """The command of such a run in a folder, with further flags."""
    from small import command, make_data, make_model

    folder = tmp_path_factory.mktemp("small")
    return partial(command, make_model(folder / "model"), make_data(folder))
