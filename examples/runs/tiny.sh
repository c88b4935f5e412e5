#!/usr/bin/env bash
# A whole sigmoid: the built-in 0.16 M model learns two-digit addition.
# Time: six minutes on 2 AVX2 cores. Needs: `make setup`, 2 GB of memory, no GPU.
set -euo pipefail
cd "$(dirname "$0")/../.."
"${PYTHON:-.venv/bin/python}" -m trainer.main --recipe tiny "$@"
