#!/usr/bin/env bash
# The curve of runs that another trainer made (verl, TRL, prime-rl, OpenRLHF): ceiling, prediction and one page.
#     curve_of_other_trainers.sh verl.jsonl --reward-column val-core/aime24/acc/mean@16 --devices 64
# Without arguments it takes a simulated run with the curve that the paper published for ScaleRL 8B.
# Time: seconds. Needs: `make setup`.
set -euo pipefail
cd "$(dirname "$0")/../.."
PYTHON=${PYTHON:-.venv/bin/python}
mkdir -p runs
if [ $# = 0 ]; then
    set -- runs/simulated-scalerl.csv
    "$PYTHON" - "$1" <<'PY'
import sys

import numpy as np

from trainer.scaling import Sigmoid

compute = np.arange(0, 12_001, 500)
noise = np.random.default_rng(1).normal(0, 0.005, len(compute))
reward = Sigmoid(R0=0.30, A=0.61, B=2.01, C_mid=2542).reward(compute) + noise
with open(sys.argv[1], "w") as file:
    file.write("gpu_hours,pass_rate,pass_rate_se\n")
    file.writelines(f"{c:g},{r:.4f},0.005\n" for c, r in zip(compute, reward, strict=True))
PY
fi
"$PYTHON" -m trainer.scaling fit "$@"
"$PYTHON" -m trainer.scaling predict "$@" --at 24000 --reach 0.6 --price 2.5
"$PYTHON" -m trainer.scaling report "$@" --out runs/curve.html
