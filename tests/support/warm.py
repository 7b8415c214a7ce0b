"""Processes that begin with torch imported, which takes longer than most of what they are started for.

`run` and `Process` are what subprocess has, for the commands `python -c PROGRAM` and `python -m MODULE`. Each process
is a fork of one that has imported torch and nothing of fastbert, so that fastbert reads the environment that is given.
It has its own streams, signals reach it, and it ends as any Python does. A test that looks at torch's import, at
PYTHONPATH, or at what torch reads when it is imported (OMP_NUM_THREADS) takes a process of subprocess.
"""

from __future__ import annotations

import functools
import gc
import json
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import types
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
LARGEST = 1 << 20  # of a request: the command and its environment
_lock = threading.Lock()


@functools.cache
def _server() -> socket.socket:
    """One for each of pytest-xdist's workers. It ends when the worker does, whose end of the socket is then closed."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    for end in (ours, theirs):
        end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, LARGEST)
    streams: dict[str, Any] = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.DEVNULL)
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, __file__, str(theirs.fileno())]
    _server.process = subprocess.Popen(  # type: ignore[attr-defined]
        command, pass_fds=[theirs.fileno()], env=environment, cwd=ROOT, **streams
    )
    theirs.close()
    return ours


def _ask(request: dict[str, Any], descriptors: Sequence[int] = ()) -> Any:
    with _lock:
        server = _server()
        socket.send_fds(server, [json.dumps(request).encode()], descriptors)
        answer = server.recv(LARGEST)
    assert answer, "the process that others are forked from has ended"
    return json.loads(answer)


class Process:
    """`stdout` and `stderr`: files in text mode where nothing else was given, for them or for what is in them."""

    def __init__(
        self,
        words: Sequence[object],
        *,
        env: dict[str, str] | None = None,
        stdin: Any = subprocess.DEVNULL,
        stdout: Any = subprocess.PIPE,
        stderr: Any = subprocess.PIPE,
    ):
        assert words[0] == sys.executable and words[1] in ("-c", "-m"), words
        self.args, self.returncode = words, None
        theirs = [os.open(os.devnull, os.O_RDONLY) if stdin == subprocess.DEVNULL else os.dup(stdin.fileno())]
        ours = []
        for given in (stdout, stderr):
            reader = None
            if given == subprocess.PIPE:
                descriptor, writer = os.pipe()
                theirs.append(writer)
                reader = open(descriptor, encoding="utf-8")  # noqa: SIM115  (its reader's)
            elif given == subprocess.DEVNULL:
                theirs.append(os.open(os.devnull, os.O_WRONLY))
            else:
                theirs.append(os.dup(given if isinstance(given, int) else given.fileno()))
            ours.append(reader)
        self.stdout, self.stderr = ours
        try:
            environment = dict(os.environ) if env is None else env
            self.pid = _ask({"words": list(map(str, words[1:])), "env": environment, "cwd": os.getcwd()}, theirs)
        finally:
            for descriptor in theirs:
                os.close(descriptor)

    def poll(self) -> int | None:
        if self.returncode is None:
            self.returncode = _ask({"ended": self.pid})
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        if self.returncode is None:
            ended = os.pidfd_open(self.pid)
            try:
                if not select.select([ended], [], [], timeout)[0]:
                    raise subprocess.TimeoutExpired(self.args, timeout)
            finally:
                os.close(ended)
            self.poll()
        assert self.returncode is not None
        return self.returncode

    def communicate(self, timeout: float | None = None) -> tuple[str, str]:
        """What the process says from now on; its end is waited for."""
        said = {}
        readers = []
        for name, file in (("stdout", self.stdout), ("stderr", self.stderr)):
            said[name] = ""
            if file is not None and not file.closed:
                readers.append(threading.Thread(target=lambda name=name, file=file: said.update({name: file.read()})))
                readers[-1].start()
        try:
            self.wait(timeout)
        except subprocess.TimeoutExpired:
            self.kill()
            raise
        for reader in readers:
            reader.join()
        for file in (self.stdout, self.stderr):
            if file is not None:
                file.close()
        return said["stdout"], said["stderr"]

    def send_signal(self, number: int) -> None:
        if self.poll() is None:  # else the number may be another's
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


def run(words: Sequence[object], *, input: str = "", timeout: float = 300, **options: Any) -> Any:
    """A process from its beginning to its end, as subprocess.run(capture_output=True, text=True) gives it."""
    with tempfile.TemporaryFile("w+", encoding="utf-8") as stdin:
        stdin.write(input)
        stdin.seek(0)
        process = Process(words, stdin=stdin, **options)
    out, err = process.communicate(timeout)
    return subprocess.CompletedProcess(words, process.returncode, out, err)


# --------------------------------------------------------------------------------------------------------------------
# The process that the others are forked from


def _serve(connection: socket.socket) -> tuple[dict[str, Any], list[int]]:
    """Fork on request and tell how forks ended. Returns in a fork, with what it is to be."""
    while True:
        message, descriptors, *_ = socket.recv_fds(connection, LARGEST, 3)
        if not message:
            os._exit(0)
        request = json.loads(message)
        if "ended" in request:
            pid, status = os.waitpid(request["ended"], os.WNOHANG)
            connection.send(json.dumps(os.waitstatus_to_exitcode(status) if pid else None).encode())
            continue
        pid = os.fork()
        if pid == 0:
            connection.close()
            return request, descriptors
        for descriptor in descriptors:
            os.close(descriptor)
        connection.send(json.dumps(pid).encode())


def _become(request: dict[str, Any], descriptors: list[int]) -> None:
    for number, descriptor in enumerate(descriptors):
        os.dup2(descriptor, number)
        os.close(descriptor)
    sys.stdin = open(0, closefd=False)  # noqa: SIM115
    sys.stdout = open(1, "w", closefd=False)  # noqa: SIM115
    sys.stderr = open(2, "w", closefd=False, buffering=1, errors="backslashreplace")  # noqa: SIM115
    os.environ.clear()
    os.environ.update(request["env"])
    os.chdir(request["cwd"])
    signal.signal(signal.SIGINT, signal.default_int_handler)
    option, program, *arguments = request["words"]
    sys.argv = [option, *arguments]
    sys.path[0] = "" if option == "-c" else request["cwd"]
    del sys.modules["__main__"]
    if option == "-m":
        runpy.run_module(program, run_name="__main__", alter_sys=True)
    else:
        main = sys.modules["__main__"] = types.ModuleType("__main__")
        exec(compile(program, "<string>", "exec"), vars(main))


if __name__ == "__main__":
    import torch  # noqa: F401

    gc.freeze()  # the collector's marks, too, would copy pages
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal sends it to all; the worker ends this process
    _become(*_serve(socket.socket(fileno=int(sys.argv[1]))))
