"""report.html: one self-contained page for one or many runs.

The charts are inline SVG drawn by the 400 lines of page.js: plotly.min.js would add 4.5 MB to every run
folder, ignores dark mode and print layout, and hiding a run in all charts at once would still be our code.
The page loads nothing from a network, and its Content-Security-Policy allows only page.js to run, so that
text written by models and users stays text.
"""
