"""Promises of LoRA: peft's outputs and gradients; only adapters are trained, engines get the sum."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import peft
import pytest
import torch
from fakes import having
from safetensors.torch import load_file
from training import (
    NoClock,
    config,
    error,
    gradients_of_step,
    learner,
    moved,
    of_the_data,
    oracle,
    plain_logprobs,
    save,
    sequences,
)
from transformers import AutoModelForCausalLM

from trainer.config import Config, ConfigError, KLConfig, LoraConfig
from trainer.engines.torch.engine import TorchEngine
from trainer.learner.lora import adapted_layers, adapter_of, add_adapters, without_adapters
from trainer.learner.process import LearnerService
from trainer.learner.ranks import Ranks
from trainer.learner.sharding import full_tensor
from trainer.learner.weight_file import WeightFiles
from trainer.messages import StepDone
from trainer.models.lora import read_adapter, write_adapter
from trainer.models.merge import main
from trainer.types import TrainBatch

LORA = LoraConfig(rank=4, alpha=10)
LAYERS = 2 * 7  # of linear layers
# Numbers of A and B: q and o (32, 32), k and v (16, 32), gate and up (48, 32), down (32, 48), in two layers.
SIZE = 2 * 4 * (2 * 64 + 2 * 48 + 3 * 80)


def adapted(model_dir: str, dtype: Any = "float32", **more: Any) -> Config:
    return having(config(lr=1e-2), model={"lora": LORA, "path": model_dir, "dtype": dtype}, **more)


@pytest.mark.parametrize("targets", [(), ("q_proj", "down_proj")])
@pytest.mark.parametrize("kind", ["tied", "moe"])
def test_outputs_and_gradients_are_pefts_in_float64(
    kind: str, targets: tuple[str, ...], models: dict[str, str], tmp_path: Path
) -> None:
    options: dict[str, Any] = {"dtype": torch.float64, "experts_implementation": "eager"}
    ours, base = (AutoModelForCausalLM.from_pretrained(models[kind], **options) for _ in range(2))
    targets = targets[: 1 if kind == "moe" else 2]  # its experts are no linear layers
    lora = LoraConfig(rank=4, alpha=10, targets=targets)
    add_adapters(ours, torch.float64, lora, seed=0)
    ours.double()
    torch.manual_seed(1)
    for layer in adapted_layers(ours).values():
        assert layer.lora_A.abs().max() < layer.in_features**-0.5 and not layer.lora_B.any()
        layer.lora_B.data.normal_()
    adapter = adapter_of(ours, models[kind], lora)
    assert adapter is not None
    write_adapter(tmp_path / "adapter", adapter)
    peft_model = peft.PeftModel.from_pretrained(base, tmp_path / "adapter", is_trainable=True)
    assert isinstance(peft_model.peft_config["default"], peft.LoraConfig)
    ids, weights = torch.randint(0, 31, (2, 9)), torch.randn(2, 9, 31, dtype=torch.float64)
    outputs = [lm(ids).logits for lm in (ours, peft_model)]
    for out in outputs:
        (out * weights).sum().backward()
    torch.testing.assert_close(*outputs, rtol=1e-6, atol=1e-6)
    assert (outputs[0] - without_adapters(ours, ids).logits).abs().max() > 0.1
    trained = {n: p for n, p in ours.named_parameters() if p.requires_grad}
    expected = {
        n.removeprefix("base_model.model.").replace(".default.weight", ""): p.grad
        for n, p in peft_model.named_parameters()
        if p.requires_grad
    }
    assert len(trained) == 2 * len(adapter.pairs) and all(g.abs().max() > 1e-3 for g in expected.values())
    assert error({n: p.grad for n, p in trained.items()}, expected) < 1e-6  # type: ignore[misc,arg-type]
    again = read_adapter(tmp_path / "adapter")
    assert all(
        torch.equal(a, b)
        for n in adapter.pairs
        for a, b in zip(adapter.pairs[n], again.pairs[n], strict=True)
    )


@pytest.mark.parametrize("checkpointing", [False, True])
def test_gradients_of_a_step_are_those_of_the_whole_weights_times_the_other_factor(
    checkpointing: bool, model_dir: str, tmp_path: Path
) -> None:
    """dA = s Bᵀ dW and dB = s dW Aᵀ, with dW of transformers alone, in float64, at the sum W."""
    c = having(
        adapted(model_dir), learner={"checkpoint_activations": checkpointing, "micro_batch_tokens": 80}
    )
    one, batch = moved(learner(model_dir, c)), sequences(seed=1)
    save(one, tmp_path / "step-000000")
    assert one.adapter is not None
    pairs = one.adapter.pairs.items()
    factors = {name: (a.detach().double(), b.detach().double()) for name, (a, b) in pairs}
    whole = oracle(str(tmp_path / "step-000000"), batch, 2.0)[1]
    expected = {}
    for name, (a, b) in factors.items():
        dw = whole[f"{name}.weight"]
        expected |= {f"{name}.lora_A": 2.5 * b.T @ dw, f"{name}.lora_B": 2.5 * dw @ a.T}
    gradients = gradients_of_step(one, TrainBatch(1, batch, {}))[1]["policy"]
    assert len(gradients) == 2 * LAYERS and error(gradients, expected) < 1e-5


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("kind", ["tied", "untied"])
def test_the_base_is_frozen_in_the_models_type_and_engines_get_the_sum(
    kind: str, dtype: str, models: dict[str, str], tmp_path: Path
) -> None:
    one = moved(learner(models[kind], adapted(models[kind], dtype)))
    frozen = {n: w.detach().clone() for n, w in one.model.lm.named_parameters() if not w.requires_grad}
    assert {w.dtype for w in frozen.values() if w.dim() > 1} == {getattr(torch, dtype)}
    metrics = one.train(TrainBatch(1, sequences(), {}))
    assert metrics["learner/grad_norm"] > 0
    trained = one.policy.weights
    assert all(torch.equal(w, frozen[n]) for n, w in one.model.lm.named_parameters() if n not in trained)
    assert one.adapter_parameters == SIZE == sum(w.numel() for w in trained.values())
    held = [*trained.values(), *one.policy.moments()]
    assert {x.dtype for x in held} == {torch.float32} and sum(x.numel() for x in held) == 3 * SIZE
    path = WeightFiles(str(tmp_path), 0, 1, getattr(torch, dtype)).write(one.weights, 1)
    written, lm = (
        load_file(path),
        AutoModelForCausalLM.from_pretrained(models[kind], dtype=getattr(torch, dtype)),
    )
    assert written.keys() == dict(lm.named_parameters()).keys()
    for name, w in lm.named_parameters():
        base, layer = w.detach(), adapted_layers(one.model.lm).get(name.removesuffix(".weight"))
        if layer is not None:
            whole = base.double() + 2.5 * layer.lora_B.double() @ layer.lora_A.double()
            assert (written[name] - base).abs().max() > 0
            rounded = 2**-8 if dtype == "bfloat16" else 1e-6
            np.testing.assert_allclose(written[name].double(), whole.detach(), rtol=rounded, atol=1e-6)
        elif base.dim() > 1:
            assert torch.equal(written[name], base)


def test_an_adapted_learner_scores_as_the_saved_model_and_its_reference_is_the_base(
    model_dir: str, tmp_path: Path
) -> None:
    c = adapted(model_dir, objective={"kl": KLConfig(coefficient=0.1)})
    one = moved(learner(model_dir, c))
    assert one.reference is None
    save(one, tmp_path / "step-000000")
    sum_, base = (
        AutoModelForCausalLM.from_pretrained(f, dtype=torch.float32)
        for f in (tmp_path / "step-000000", model_dir)
    )
    scores = one.score(sequences())
    for s, got in zip(sequences(), scores, strict=True):
        assert got.logprobs is not None and got.logprobs_ref is not None
        np.testing.assert_allclose(got.logprobs, plain_logprobs(sum_, s.prompt_ids, s.token_ids), atol=1e-5)
        np.testing.assert_allclose(
            got.logprobs_ref, plain_logprobs(base, s.prompt_ids, s.token_ids), atol=1e-5
        )
    plain = learner(model_dir, having(c, model={"lora": LoraConfig()}))
    assert plain.reference is not None
    for ours, expected in zip(scores, plain.score(sequences()), strict=True):
        np.testing.assert_array_equal(ours.logprobs_ref, expected.logprobs_ref)


def test_under_bfloat16_the_policys_weights_are_bit_for_bit_the_engines(
    model_dir: str, tmp_path: Path
) -> None:
    """A learner of all weights that starts from the sum scores the same: so no mismatch comes from LoRA."""
    one = moved(learner(model_dir, adapted(model_dir, "bfloat16")))
    save(one, tmp_path / "step-000000")
    other = learner(tmp_path / "step-000000", having(config(), model={"dtype": "bfloat16"}))
    for ours, expected in zip(one.score(sequences()), other.score(sequences()), strict=True):
        np.testing.assert_array_equal(ours.logprobs, expected.logprobs)


def test_a_head_that_is_frozen_has_no_gradient_in_the_loss(
    model_dir: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    import kernels.chunk_loop as loop

    needed = []
    empty = loop.StepOutputs.empty
    monkeypatch.setattr(
        loop.StepOutputs,
        "empty",
        staticmethod(lambda h, head, *needs: needed.append(needs) or empty(h, head, *needs)),
    )
    for c in (config(), adapted(model_dir)):
        learner(model_dir, c).train(TrainBatch(1, sequences(), {}))
    assert needed == [(True, True), (True, False)]  # of hidden states, of the head


def test_what_does_not_fit_is_one_line(model_dir: str, models: dict[str, str], tmp_path: Path) -> None:
    def refused(c: Config, resume_from: Path | None = None) -> str:
        with pytest.raises(ConfigError) as refusal:
            learner(model_dir, c, resume_from)
        return str(refusal.value)

    c = adapted(model_dir)
    wrong = refused(having(c, model={"lora": LoraConfig(rank=2, targets=("q_proj", "query"))}))
    assert wrong == (
        "model.lora.targets: no linear layer of this model is named query; expected some of down_proj, "
        "gate_proj, k_proj, o_proj, q_proj, up_proj, v_proj"
    )
    path = tmp_path / "step-000001"
    save(learner(model_dir, c), path)
    for lora in (LoraConfig(), LoraConfig(rank=3), LoraConfig(rank=4, targets=("q_proj",))):
        assert "holds other trained weights than this run's" in refused(having(c, model={"lora": lora}), path)
    settings = json.loads((path / "adapter" / "adapter_config.json").read_text())
    for key, value in {"use_dora": True, "bias": "all", "rank_pattern": {"q_proj": 8}}.items():
        (path / "adapter" / "adapter_config.json").write_text(json.dumps(settings | {key: value}))
        with pytest.raises(ConfigError, match=f"{key} .*expected plain LoRA"):
            read_adapter(path / "adapter")


def test_a_checkpoint_loads_in_peft_and_merges_into_a_model(
    model_dir: str, models: dict[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    one = moved(learner(model_dir, adapted(model_dir)))
    save(one, tmp_path / "step-000000")
    adapter, out = tmp_path / "step-000000" / "adapter", tmp_path / "merged"
    assert main([str(adapter), str(out)]) == 0
    saved, lm = (AutoModelForCausalLM.from_pretrained(folder) for folder in (tmp_path / "step-000000", out))
    for name, w in saved.named_parameters():
        assert torch.equal(w, lm.get_parameter(name))
    expected = peft.AutoPeftModelForCausalLM.from_pretrained(adapter).merge_and_unload()
    for name, w in expected.named_parameters():
        torch.testing.assert_close(w, lm.get_parameter(name), rtol=1e-6, atol=1e-6)
    expected.save_pretrained(tmp_path / "peft's")
    assert main([str(adapter), str(out)]) == 2 and "exists already" in capsys.readouterr().err
    small = AutoModelForCausalLM.from_pretrained(models["tied"])
    small.resize_token_embeddings(8)
    del small.model.layers[1]
    small.config.num_hidden_layers = 1
    small.save_pretrained(tmp_path / "small")
    (tmp_path / "small" / "tokenizer.json").write_text("{}")
    assert main([str(adapter), str(tmp_path / "new"), "--base", str(tmp_path / "small")]) == 2
    assert "has no such layer; give its --base" in capsys.readouterr().err
    assert main([str(tmp_path), str(tmp_path / "new")]) == 2
    assert "cannot be read as an adapter" in capsys.readouterr().err


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("kind", ["tied", "moe"])
def test_engines_here_get_adapters_alone_and_the_torch_engine_has_the_learners_weights_bit_for_bit(
    kind: str, dtype: str, models: dict[str, str], tmp_path: Path
) -> None:
    c = having(adapted(models[kind], dtype), engine={"kind": "torch"})
    clock: Any = NoClock()
    c = replace(c, run_dir=str(tmp_path))
    service = LearnerService(c, models[kind], None, clock, None, Ranks.single())
    one = moved(service._learner)
    engine = TorchEngine(models[kind], getattr(torch, dtype), True, 2)
    for step in (1, 2):
        done = service.answer(TrainBatch(step, sequences(step), {}))
        assert isinstance(done, StepDone)
        assert Path(done.weights_path).stat().st_size < 4 * one.adapter_parameters + 4096  # its header
        engine.update_weights(step, done.weights_path)
    service.close()
    weights = dict(engine.model.named_parameters())
    for name, weight in one.weights.items():
        if len(weight.shape) > 1:
            assert torch.equal(weights[name], full_tensor(weight, getattr(torch, dtype))), name
    c = having(c, engine={"kind": "vllm"})
    for engine_settings in ({}, {"urls": ("http://x",)}, {"weight_push": "nccl"}):
        other = LearnerService(
            having(c, engine=engine_settings), models[kind], None, clock, None, Ranks.single()
        )
        trained, sums = other._learner.policy.weights, other._learner.weights
        # A server by URL has no files of the base, and from GPU to GPU all weights go.
        assert other._published is (sums if engine_settings else trained)
        other.close()


def test_the_frozen_base_leaves_a_shared_gpu_too(model_dir: str) -> None:
    one, batch = learner(model_dir, adapted(model_dir, engine={"colocate": True})), sequences()
    for w in one.model.lm.parameters():
        w.data = w.data if w.requires_grad else w.data.clone()  # no memory of the file, as on a GPU
    one.leave_device()
    assert not any(w.untyped_storage().nbytes() for w in one.model.lm.parameters())
    with one.on_device():
        ours = one.train(TrainBatch(1, batch, {}))
    stays = learner(model_dir, adapted(model_dir))
    assert of_the_data(ours) == of_the_data(stays.train(TrainBatch(1, batch, {})))


def test_runs_of_another_seed_start_with_another_adapter(model_dir: str) -> None:
    first, same, other = (
        dict(learner(model_dir, replace(adapted(model_dir), seed=seed)).policy.weights) for seed in (0, 0, 1)
    )
    for name, w in first.items():
        assert torch.equal(w, same[name]) and torch.equal(w, other[name]) == name.endswith("lora_B")
