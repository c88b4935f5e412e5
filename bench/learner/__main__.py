"""`python -m bench.learner`: see throughput.py."""

from bench.learner.throughput import main

main()
