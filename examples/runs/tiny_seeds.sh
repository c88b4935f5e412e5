#!/usr/bin/env bash
# Three seeds of one recipe: do their ceilings, efficiencies and midpoints differ by more than chance? They should not.
# Time: about 20 minutes on 2 AVX2 cores (three runs of 6). Needs: `make setup`, 2 GB of memory, no GPU.
set -euo pipefail
cd "$(dirname "$0")/../.."
PYTHON=${PYTHON:-.venv/bin/python}
for seed in 0 1 2; do
    "$PYTHON" -m trainer.main --recipe tiny --seed "$seed" --run-dir "runs/tiny-$seed" "$@"
done
case " $* " in *" --dry-run "*) exit ;; esac
"$PYTHON" -m trainer.scaling compare runs/tiny-0 runs/tiny-1 runs/tiny-2
"$PYTHON" -m trainer.scaling report runs/tiny-0 runs/tiny-1 runs/tiny-2 --out runs/tiny-seeds.html
