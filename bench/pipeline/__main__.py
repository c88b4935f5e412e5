"""`python -m bench.pipeline`: see splits.py."""

from bench.pipeline.splits import main

main()
