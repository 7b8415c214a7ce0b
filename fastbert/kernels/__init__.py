"""In a checkout the Triton kernels lie in the top-level kernels/ folder; here it becomes fastbert.kernels.

A wheel holds those files in this package's place and leaves this one out. The guard matters: installed, the path below
would be the top-level `kernels` package of another project.
"""

from pathlib import Path

_checkout = Path(__file__).resolve().parents[2]
if (_checkout / "setup.py").is_file() and (_checkout / "csrc").is_dir():
    __path__.append(str(_checkout / "kernels"))
