"""Empty libraries in the place of CUDA's, so that a torch built with CUDA starts where it cannot be installed.

    python tests/support/empty_libraries.py SITE/torch/lib --prefix aarch64-linux-gnu-

torch's wheels for aarch64 need CUDA's libraries from 2.11 on. Under emulation only its CPU part runs. Each library that
is missing gets the functions that torch's libraries want of it. They return 100: to torch there is no GPU.
"""

from __future__ import annotations

import argparse
import re
import subprocess
from collections import defaultdict
from pathlib import Path

NAMES = re.compile(r"lib(cu|nccl|nvrtc|nvshmem)\w*\.so")
FUNCTIONS = re.compile(r"(cu|nccl|nvrtc|nvshmem|_*cuda)")
NO_DEVICE = 100  # cudaErrorNoDevice


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("libraries", type=Path, help="torch's folder lib")
    parser.add_argument("--prefix", default="", help="of readelf and gcc")
    options = parser.parse_args()

    def read(*arguments: str) -> str:
        return subprocess.run([f"{options.prefix}readelf", "-W", *arguments], check=True, text=True, stdout=-1).stdout

    needed, wanted = set[str](), defaultdict[str, set[str]](set)  # functions by version; "" has those without one
    for path in options.libraries.glob("*.so*"):
        needed.update(re.findall(r"NEEDED.*\[(.*)\]", read("-d", str(path))))
        for line in read("--dyn-syms", str(path)).splitlines():
            fields = line.split()
            if len(fields) > 7 and fields[6] == "UND" and FUNCTIONS.match(fields[7]):
                name, _, version = fields[7].partition("@")
                wanted[version.lstrip("@")].add(name)
    missing = sorted(name for name in needed if NAMES.match(name) and not (options.libraries / name).exists())
    for name in missing:
        # Versions have their library's name, but for NVSHMEM's; without one a function is found in any of them.
        version = "NVSHMEM" if "nvshmem" in name else name
        source = options.libraries / f"{name}.c"
        functions = wanted[version] | (wanted[""] if name == missing[0] else set())
        source.write_text("".join(f"long {each}(void) {{ return {NO_DEVICE}; }}\n" for each in sorted(functions)))
        script = source.with_suffix(".map")
        script.write_text(f"{version} {{ global: *; }};\n")
        command = [f"{options.prefix}gcc", "-w", "-fno-builtin", "-shared", "-fPIC", f"-Wl,-soname,{name}"]
        command += [f"-Wl,--version-script={script}", "-o", str(options.libraries / name), str(source)]
        subprocess.run(command, check=True)
        source.unlink()
        script.unlink()


if __name__ == "__main__":
    main()
