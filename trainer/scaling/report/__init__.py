"""report.html: one page for one or many runs, complete in itself.

The charts are inline SVG drawn by page.js, some 300 lines: plotly.min.js would add 4.5 MB to every run's
folder, follows neither the reader's dark mode nor the printer's paper, and hiding a run in all charts at
once would be our code all the same. The page asks nothing of any network, and its Content-Security-Policy
lets no script run but page.js: what models and users wrote stays text.
"""

from trainer.scaling.report.page import page, write_report
from trainer.scaling.report.run import Run, runs_of

__all__ = ["Run", "page", "runs_of", "write_report"]
