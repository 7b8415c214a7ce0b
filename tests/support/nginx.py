"""nginx in front of a server, with the lines of docs/containers.md."""

from __future__ import annotations

import re
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

PAGE = Path(__file__).parents[2] / "docs" / "containers.md"
TEMPORARY = ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")


def program() -> str:
    """Debian's stands where only root looks for programs."""
    found = shutil.which("nginx") or shutil.which("nginx", path="/usr/sbin:/usr/local/sbin")
    if found is None:
        pytest.skip("there is no nginx: apt-get install nginx")
    return found


def lines(**settings: str) -> str:
    """Those of the page, with other values of some."""
    (block,) = re.findall(r"```nginx\n(.*?)```", PAGE.read_text(), re.DOTALL)
    for name, value in settings.items():
        block, count = re.subn(rf"\b{name} [^;]*;", f"{name} {value};", block)
        assert count == 1, name
    return block


def free_port() -> int:
    with socket.socket() as opened:
        opened.bind(("127.0.0.1", 0))
        return opened.getsockname()[1]


@contextmanager
def in_front_of(port: int, folder: Path, **settings: str) -> Iterator[int]:
    """The port of an nginx that hands on to `port`; its files are in `folder`."""
    own, nginx = free_port(), program()
    server = lines(listen=f"127.0.0.1:{own}", **settings).replace("127.0.0.1:8080", f"127.0.0.1:{port}")
    places = "".join(f"{name}_temp_path {folder / name};\n" for name in TEMPORARY)
    config = folder / "nginx.conf"
    config.write_text(
        f"daemon off; master_process off; pid {folder / 'pid'};\nerror_log {folder / 'error.log'};\n"
        f"events {{}}\nhttp {{\naccess_log off;\n{places}{server}}}\n"
    )
    process = subprocess.Popen([nginx, "-p", folder, "-c", config, "-e", folder / "error.log"])
    try:
        deadline = time.monotonic() + 60
        while True:
            try:
                socket.create_connection(("127.0.0.1", own), 5).close()
                break
            except ConnectionRefusedError:
                assert process.poll() is None and time.monotonic() < deadline, (folder / "error.log").read_text()
                time.sleep(0.01)
        yield own
    finally:
        process.kill()
        process.wait()
