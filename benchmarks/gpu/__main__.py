"""`python -m benchmarks.gpu` is `make gpu`."""

import os
import sys

# Nothing of its own is said by torch's profiler, which reads this when torch is imported.
os.environ.setdefault("KINETO_LOG_LEVEL", "99")

from benchmarks.gpu.suite import main

sys.exit(main())
