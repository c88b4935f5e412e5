"""The end of a run: the fit in words and JSON, the picture of the curve, the report, the advice."""

from __future__ import annotations

import json
import traceback
from collections.abc import Sequence
from pathlib import Path

from trainer.config import Config
from trainer.jsonl import write_atomic
from trainer.launcher.advice import advise_run
from trainer.launcher.ledger import Ledger
from trainer.launcher.terminal import summary_text
from trainer.scaling import EvalPoint, Fit, curve_of, explain, plot_curve, write_report
from trainer.scaling.forecast import backtest
from trainer.scaling.text import describe_backtest


def finish(config: Config, points: Sequence[EvalPoint], fit: Fit | None, ledger: Ledger) -> str:
    """Write fit.json, curve.png and report.html into the run folder; returns the summary to print."""
    run_dir = Path(config.run_dir)
    advice = advise_run(ledger.to_json(), ledger.idle_shares(), config).text
    if fit is None:
        words = "no evaluation was finished, so there is no curve yet"
        return summary_text(run_dir, points, ledger, words, advice)
    write_atomic(run_dir / "fit.json", json.dumps(fit.to_json(), indent=1))
    plot_curve(points, fit, run_dir / "curve.png", ledger.unit, run_dir.name)
    test = describe_backtest(backtest(curve_of(run_dir.name, ledger.unit, points)), ledger.unit)
    words = "\n".join(filter(None, (explain(fit, ledger.unit), test)))
    write_atomic(run_dir / "fit.txt", words)
    try:
        write_report(run_dir)
    except Exception as e:  # whatever it is: the run is over and whole, and its end must be told
        traceback.print_exc()
        again = f"python -m trainer.scaling report {run_dir} --out {run_dir}/report.html"
        words += (
            f"\n\nreport.html could not be written ({e!r}); the run itself is whole. Once mended: {again}"
        )
    return summary_text(run_dir, points, ledger, words, advice)
