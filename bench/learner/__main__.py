"""`python -m bench.learner`: see throughput.py."""

import sys

from bench.learner.throughput import main

if __name__ == "__main__":
    sys.exit(main())
