"""`python -m benchmarks.gpu` is `make gpu`."""

import sys

from benchmarks.gpu.suite import main

sys.exit(main())
