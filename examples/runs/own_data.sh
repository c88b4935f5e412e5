#!/usr/bin/env bash
# A data file and a reward of your own: SmolLM2-135M learns to subtract; an answer that is nearly right earns a little.
# Time: about that of the demo, ten minutes on 2 AVX2 cores. Needs: `make setup`, 8 GB of memory, no GPU.
set -euo pipefail
cd "$(dirname "$0")/../.."
PYTHON=${PYTHON:-.venv/bin/python}
folder=runs/own-data-files
mkdir -p "$folder"

# One JSON object a line, with any columns; data.prompt_column and data.answer_column name the two that matter.
for ((a = 0; a <= 20; a++)); do
    for ((b = 0; b <= a; b++)); do
        echo "{\"problem\": \"$a - $b\", \"result\": \"$((a - b))\"}"
    done
done > "$folder/subtraction.jsonl"

# 1 counts as a pass; what lies between 0 and 1 scales the reward only.
cat > "$folder/nearly_right.py" <<'PY'
def score(completion: str, answer: str, metadata: dict) -> float:
    try:
        distance = abs(int(completion) - int(answer))
    except ValueError:
        return 0.0
    return 1.0 if distance == 0 else 0.2 if distance == 1 else 0.0
PY

PYTHONPATH="$folder${PYTHONPATH:+:$PYTHONPATH}" "$PYTHON" -m trainer.main --run-dir runs/own-data-0 \
    --data.source "$folder/subtraction.jsonl" --data.prompt_column problem --data.answer_column result \
    --data.template $'Question: 30 - 4\nAnswer: 26\nQuestion: {question}\nAnswer:' --data.held_out 60 \
    --verifier.kind nearly_right:score --engine.stop '["\n"]' --engine.max_new_tokens 8 --engine.slots 192 \
    --learner.lr 4e-6 --pipeline.steps 40 --pipeline.prompts_per_step 24 --evaluation.every 5 "$@"
