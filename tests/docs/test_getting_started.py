"""Whoever follows the page arrives: its files and commands are taken from it, and run in its order."""

from __future__ import annotations

import contextlib
import json
import re
import shlex
import socket
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.docs.pages import blocks, text_of
from tests.harness import DEADLINE_S, wait_until
from tests.service.shards_on_disk import save_tiny_tokenizer

# Commands by their first word, as this interpreter has them.
PROGRAMS = {"packhorse": ["-m", "packhorse_service"], "torchrun": ["-m", "torch.distributed.run"]}
LISTENS, MONITORS = "127.0.0.1:5555", "127.0.0.1:9555"


def free_address() -> str:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return f"127.0.0.1:{probe.getsockname()[1]}"


class Reader:
    """Somebody at a shell, in a folder with a tokenizer and some text."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.addresses = {LISTENS: free_address(), MONITORS: free_address()}
        self.servers: list[subprocess.Popen[str]] = []
        save_tiny_tokenizer(folder / "tokenizer.json")
        rows = (json.dumps({"text": f"horse {number} carries packs " * (number % 20 + 1)}) for number in range(400))
        (folder / "docs.jsonl").write_text("\n".join(rows))

    def elsewhere(self, text: str) -> str:
        """On ports that are free here."""
        return re.sub("|".join(self.addresses), lambda found: self.addresses[found[0]], text)

    def types(self, command: str) -> str:
        """What the command printed; one in the background is a server, and awaited until it listens."""
        program, *arguments = shlex.split(self.elsewhere(command).removesuffix("&"))
        line = [sys.executable, *PROGRAMS[program], *arguments]
        if command.endswith("&"):
            return self._serves(line)
        if arguments[0] == "status":  # the monitor is where the test put it, not beside the readers' port
            line[-1] = self.addresses[MONITORS]
        done = subprocess.run(line, cwd=self.folder, capture_output=True, text=True, timeout=DEADLINE_S, check=False)
        assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
        return done.stdout

    def _serves(self, line: list[str]) -> str:
        if self.servers:
            assert self.servers[-1].wait(DEADLINE_S) == 0, "the server before has not ended by itself"
        server = subprocess.Popen(
            [*line, "--monitor", self.addresses[MONITORS]], cwd=self.folder, stderr=subprocess.DEVNULL, text=True
        )
        self.servers.append(server)
        wait_until(lambda: server.poll() is not None or self._is_ready(), "a server that is ready")
        return ""

    def _is_ready(self) -> bool:
        with contextlib.suppress(OSError), urllib.request.urlopen(f"http://{self.addresses[MONITORS]}/readyz") as said:
            return bool(said.status == 200)
        return False

    @contextlib.contextmanager
    def at_work(self) -> Iterator[None]:
        try:
            yield
        finally:
            for server in self.servers:
                server.kill()
                server.wait()


@pytest.mark.timeout(300)  # torch is imported by six processes
def test_its_files_and_commands_train_stop_and_go_on(tmp_path: Path) -> None:
    reader = Reader(tmp_path)
    said: dict[str, str] = {}
    with reader.at_work():
        for block in blocks(text_of("getting-started.md")):
            if block.file:
                (tmp_path / block.file).write_text(reader.elsewhere(block.text))
            elif block.language == "console":
                said |= {line: reader.types(line) for line in re.findall(r"^\$ (.*)$", block.text, re.MULTILINE)}
        assert reader.servers[-1].wait(DEADLINE_S) == 0
    trained = [int(text.split()[-1]) for line, text in said.items() if line.startswith("torchrun")]
    assert trained[0] == 4 < trained[1]
    assert torch.load(tmp_path / "checkpoint.pt")["feed"]
    assert {line.split()[1] for line in said} >= {"prepare", "check", "plan", "serve", "status", "loadtest"}
