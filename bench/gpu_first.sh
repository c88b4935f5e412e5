#!/usr/bin/env bash
# What one GPU can show in ten minutes: bash bench/gpu_first.sh OUT
#   OUT     folder for the results: STAGE.json and STAGE.log of each stage, written when it ends; summary.txt
# A stage that fails or runs too long stops no other. The exit status is 1 if one failed; without a GPU all are
# skipped, and it is 0. Needs torch 2.11+, triton 3.6+, transformers, pytest; neither vLLM nor a network.
# DRY_RUN=1: tiny sizes, on the CPU too. PYTHON: the interpreter (python3). ONLY: names of stages to run.
set -uo pipefail

if [[ $# -ne 1 ]]; then
    sed -n '2,7s/^# \{0,1\}//p' "$0" >&2
    exit 2
fi
mkdir -p "$1" || exit 2
out=$(cd "$1" && pwd)
python=${PYTHON:-python3}
cd "$(dirname "$0")/.."
export PYTHONUNBUFFERED=1 PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}"
: >"$out/summary.txt"
gpu=1
"$python" -c 'import sys, torch; sys.exit(not torch.cuda.is_available())' || gpu=
status=0

stage() { # NAME SECONDS STAGE [ARGUMENTS]: run a stage of bench.first, and note how it ended
    local name=$1 limit=$2 kind=$3 start=$SECONDS code=0 said
    shift 3
    [[ -z ${ONLY:-} || " $ONLY " == *" $name "* ]] || return 0
    if [[ -z $gpu && -z ${DRY_RUN:-} ]]; then
        said="skipped: no GPU"
    else
        timeout --signal=INT --kill-after=10 "$limit" \
            "$python" -m bench.first "$kind" "$out/$name.json" "$@" 2>&1 | tee "$out/$name.log"
        code=${PIPESTATUS[0]}
        said="passed"
        [[ $code -eq 0 ]] || { said="failed ($code)" && status=1; }
        [[ $code -ne 124 && $code -ne 137 ]] || said="failed: over its $limit s"
    fi
    printf '%-16s %-24s %4d s\n' "$name" "$said" $((SECONDS - start)) | tee -a "$out/summary.txt"
}

stage machine 60 machine
stage flash 120 tests tests/gpu/test_attention.py tests/trainer/learner/test_learner_cuda.py
stage kernels 150 tests tests/gpu/test_gpu.py tests/gpu/test_gpu_body.py
stage engine-tests 90 tests tests/gpu/test_torch_engine_cuda.py
stage engine 60 engine
stage learner-0.6b 90 profile qwen3-0.6b
stage learner-4b 120 profile qwen3-4b
stage body 90 tests bench/kernels/bench_body.py --benchmark-only "--benchmark-json=$out/body-times.json"
stage syncs 60 syncs qwen3-0.6b
stage nccl 60 nccl
stage ipc 60 ipc
stage launcher 240 launcher

printf '\n'
cat "$out/summary.txt"
exit "$status"
