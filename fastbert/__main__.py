"""`python -m fastbert` is `fastbert`."""

import sys

from fastbert.cli import main

if __name__ == "__main__":
    sys.exit(main())
