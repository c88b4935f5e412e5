"""vLLM itself loads the adapter of a checkpoint beside its base, as a user does who serves it."""

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from adapters import push
from engine_process import teacher_forced

SERVES = """
import sys
from pathlib import Path

from trainer.engines.vllm.engine import set_environment

folder, out = map(Path, sys.argv[1:3])
set_environment(1, out)
import numpy as np
from vllm import LLM, SamplingParams
from vllm.lora.request import LoRARequest

llm = LLM(str(folder), dtype="float32", enforce_eager=True, enable_lora=True, max_lora_rank=8, block_size=32,
          max_model_len=128, kv_cache_memory_bytes=1 << 24, skip_tokenizer_init=True)
adapter = LoRARequest("adapter", 1, str(out / "adapter"))
for name, lora in ("adapted", adapter), ("base", None):
    (done,) = llm.generate(
        [{"prompt_token_ids": [*range(1, 40)]}],
        SamplingParams(max_tokens=20, temperature=0, logprobs=1, detokenize=False), lora_request=lora,
    )
    (answer,) = done.outputs
    tokens = [*answer.token_ids]
    np.savez(out / name, tokens=tokens, logprobs=[p[t].logprob for p, t in zip(answer.logprobs, tokens)])
"""


@pytest.mark.slow
def test_vllm_serves_a_checkpoints_adapter_beside_its_base(
    vllm_installed: None, tied_llama: str, tmp_path: Path
) -> None:
    pushed = push(tied_llama, tmp_path)
    subprocess.run([sys.executable, "-c", SERVES, tied_llama, tmp_path], check=True, timeout=300)
    adapted, base = (np.load(tmp_path / f"{name}.npz") for name in ("adapted", "base"))
    expected = teacher_forced(pushed.model, [*range(1, 40)], adapted["tokens"].tolist())
    np.testing.assert_allclose(adapted["logprobs"], expected, atol=1e-4)
    differ = teacher_forced(pushed.model, [*range(1, 40)], base["tokens"].tolist())
    assert np.abs(base["logprobs"] - differ).max() > 1e-2  # else the test shows nothing
