"""Whole encoders side by side: `fastbert bench` from a checkout. The code is in fastbert/bench/compete.py."""

import sys

from fastbert.cli import main

if __name__ == "__main__":
    sys.exit(main(["bench", *sys.argv[1:]]))
