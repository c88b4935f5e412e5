"""`python -m bench.validation`: see validate.py."""

import sys

from bench.validation.validate import main

if __name__ == "__main__":  # its worker processes import this module again
    sys.exit(main())
