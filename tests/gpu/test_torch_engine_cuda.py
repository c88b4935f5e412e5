"""On a GPU: the torch engine gives the CPU's completions, with CUDA graphs, and what `step` waits for."""

import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from trainer.engines.torch.engine import TorchEngine
from trainer.types import Completion, Request

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=1067, hidden_size=64, intermediate_size=96, num_hidden_layers=3, num_attention_heads=4,
        num_key_value_heads=2, initializer_range=0.2, max_position_embeddings=512, tie_word_embeddings=True,
    )  # fmt: skip
    folder = str(tmp_path_factory.mktemp("model"))
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder


def completions(engine: TorchEngine) -> dict[tuple[str, int], Completion]:
    """Of 12 requests of all temperatures that come one after the other; the cache grows meanwhile."""
    rng = np.random.default_rng(0)
    done: dict[tuple[str, int], Completion] = {}
    for i in range(400):
        if i < 12:
            prompt = tuple(rng.integers(0, 1067, 3 + i).tolist())
            t = (1.0, 0.6, 0.0)[i % 3]
            engine.submit(Request(f"r{i}", prompt, 1 + i % 3, 5 + 13 * i, t, frozenset({i, i + 99}), i))
        done |= {(c.request_id, c.index): c for c in engine.step()}
    assert engine.idle
    return done


def test_completions_are_those_of_a_cpu(model: str) -> None:
    on_gpu = TorchEngine(model, torch.float32, True, 7, "cuda")
    found = completions(on_gpu)
    assert on_gpu._decoder is not None and any(on_gpu._decoder._captured.values())  # graphs were replayed
    for key, c in completions(TorchEngine(model, torch.float32, True, 7)).items():
        assert found[key].token_ids.tolist() == c.token_ids.tolist()
        np.testing.assert_allclose(found[key].logprobs_gen, c.logprobs_gen, atol=5e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_graphs_replay_the_bits_of_eager_decoding(model: str, dtype: torch.dtype) -> None:
    found = []
    for graphs in (True, False):
        engine = TorchEngine(model, dtype, True, 7, "cuda")
        assert engine._decoder is not None
        engine._decoder.graphs = graphs
        found.append(completions(engine))
    for key, c in found[1].items():
        assert found[0][key].token_ids.tolist() == c.token_ids.tolist()
        assert found[0][key].logprobs_gen.tobytes() == c.logprobs_gen.tobytes()


def test_a_step_waits_once(model: str) -> None:
    engine = TorchEngine(model, torch.float32, True, 8, "cuda")
    engine.submit(Request("a", (1, 2, 3), 8, 60, 1.0, frozenset(), 0))
    for _ in range(4):
        engine.step()
    torch.cuda.set_sync_debug_mode("warn")
    try:
        with pytest.warns(UserWarning, match="synchronizing") as waits:
            engine.step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert len(waits) == 1
