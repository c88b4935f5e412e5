#!/usr/bin/env bash
# Sixty steps of the demo with three seeds: how far the end of a run depends on chance (.863, .900, .902 in README.md).
# Time: about 40 minutes on 2 AVX2 cores (three runs of 12, and start-up). Needs: `make setup`, 8 GB of memory, no GPU.
set -euo pipefail
cd "$(dirname "$0")/../.."
for seed in 0 1 2; do
    "${PYTHON:-.venv/bin/python}" -m trainer.main --recipe demo --pipeline.steps 60 --seed "$seed" \
        --run-dir "runs/demo-60-$seed" "$@"
done
