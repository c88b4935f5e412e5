#!/usr/bin/env bash
# ScaleRL as the paper runs it, on one node of 8 GPUs of 80 or 141 GB: 3 learner ranks, the fastest split that fits at
# assumed rates, and vLLM engines on the others. No GPU has run this yet;
# `scalerl_8gpu.sh --dry-run` prints which GPU does what and how much memory it takes.
# Time: not measured. Needs: 8 GPUs of 80 GB; vLLM 0.32.0 and datasets (`pip install -e '.[vllm,datasets]'`); access to
# the Hugging Face hub, or a model folder in $MODEL and a data file in $DATA.
set -euo pipefail
cd "$(dirname "$0")/../.."
"${PYTHON:-.venv/bin/python}" -m trainer.main --recipe scalerl \
    --model.path "${MODEL:-Qwen/Qwen3-8B-Base}" \
    --data.source "${DATA:-datasets:POLARIS-Project/Polaris-Dataset-53K}" "$@"
