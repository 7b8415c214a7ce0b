"""The Triton kernels. They are beside this file in an installation, and in the top-level kernels/ in a checkout.

The guard matters: in an installation, the path below would be the top-level `kernels` package of another project.
"""

from pathlib import Path

_checkout = Path(__file__).resolve().parents[2]
if (_checkout / "setup.py").is_file() and (_checkout / "csrc").is_dir():
    __path__.append(str(_checkout / "kernels"))
