#!/usr/bin/env bash
# The GPU suite: bash bench/gpu_suite.sh OUT STAGE [WHEELS]
#   OUT     folder for the results: STAGE.json (written after every case), STAGE.txt (tables), logs
#   STAGE   tests | kernels | trainer; each ends within 8 minutes
#   WHEELS  folder of wheels of the peers, if there is one: liger_kernel, cut_cross_entropy, trl ...
# Needs torch 2.11+, triton 3.6+, numpy, scipy, pytest, transformers; nothing is downloaded.
# DRY_RUN=1: tiny shapes, on the CPU too. PYTHON: the interpreter (python3). COMMIT: its name outside git.
set -euo pipefail

if [[ $# -lt 2 || $# -gt 3 ]]; then
    sed -n '2,8s/^# \{0,1\}//p' "$0" >&2
    exit 2
fi
mkdir -p "$1"
out=$(cd "$1" && pwd)
stage=$2
wheels=${3:-}
[[ -z $wheels ]] || wheels=$(cd "$wheels" && pwd)
python=${PYTHON:-python3}
cd "$(dirname "$0")/.."

if [[ -n $wheels ]]; then
    site=$(mktemp -d)
    trap 'rm -rf "$site"' EXIT
    "$python" -m pip install --quiet --no-index --no-deps --no-compile --target "$site" "$wheels"/*.whl
    export PYTHONPATH="$site${PYTHONPATH:+:$PYTHONPATH}"
fi
if [[ -n ${DRY_RUN:-} ]] && "$python" -c 'import sys, torch; sys.exit(torch.cuda.is_available())'; then
    export TRITON_INTERPRET=1  # no GPU: Triton's kernels run in its interpreter
fi
export PYTHONUNBUFFERED=1
timeout --signal=INT --kill-after=10 465 \
    "$python" -m bench.kernels.gpu_suite "$out" "$stage" ${DRY_RUN:+--dry-run} 2>&1 | tee "$out/$stage.log"
