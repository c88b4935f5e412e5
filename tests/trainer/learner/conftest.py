"""The models that tests of the learner share: random weights, made once."""

import pytest
from training import MODELS, make_model


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    return {kind: make_model(kind, tmp_path_factory.mktemp(kind)) for kind in MODELS}


@pytest.fixture(scope="session")
def model_dir(models: dict[str, str]) -> str:
    return models["tied"]
