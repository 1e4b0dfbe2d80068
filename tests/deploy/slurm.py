"""A real Slurm of two nodes on this machine: its daemons, with configuration, keys and state in one folder."""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from tests.deploy.tools import DEPLOY, ROOT, free_port, missing, require, run
from tests.harness import DEADLINE_S, wait_until

__all__ = ["Cluster", "Job", "running_cluster"]

CONFIGURATION = """\
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={port}
SlurmUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
ReturnToService=2
StateSaveLocation={folder}/state
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdSpoolDir={folder}/spool-%n
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmdParameters=config_overrides
{nodes}
PartitionName=all Nodes=ALL Default=YES OverSubscribe=YES State=UP
"""
NODE = "NodeName={name} NodeHostname={host} NodeAddr=127.0.0.1 Port={port} CPUs=8 RealMemory=4000 State=UNKNOWN"
NODES = ("n1", "n2")
ENDED = {"COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "OUT_OF_MEMORY"}


@dataclass(frozen=True)
class Job:
    """A batch job that was submitted from a folder."""

    cluster: Cluster
    number: int
    folder: Path

    @property
    def log(self) -> str:
        """What the script, torchrun and the ranks have said so far."""
        path = self.folder / f"train-{self.number}.log"
        return path.read_text() if path.exists() else ""

    @property
    def server_log(self) -> str:
        return (self.folder / f"run-{self.number}" / "packhorse.log").read_text()

    @property
    def steps(self) -> list[tuple[int, int]]:
        """(number, trained tokens) of each step, as rank 0 has logged them."""
        return [
            (int(step), int(tokens)) for step, tokens in re.findall(r"step (\d+): loss \S+, (\d+) tokens", self.log)
        ]

    def wait_step(self, number: int) -> None:
        _wait(lambda: len(self.steps) > number or self.state in ENDED, f"step {number} of job {self.number}")
        assert len(self.steps) > number, self.log

    @property
    def state(self) -> str:
        return self._shown("JobState")

    def wait_end(self) -> tuple[str, str]:
        """(state, exit code) once it has ended."""
        _wait(lambda: self.state in ENDED, f"the end of job {self.number}")
        return self.state, self._shown("ExitCode")

    def _shown(self, name: str) -> str:
        """Of the first component of the job."""
        shown = self.cluster.run("scontrol", "show", "--oneliner", "job", str(self.number))
        values: list[str] = re.findall(rf"\b{name}=(\S+)", shown)
        return values[0]


@dataclass
class Cluster:
    folder: Path
    started: list[subprocess.Popen[bytes]] = field(default_factory=list)

    @property
    def environment(self) -> dict[str, str]:
        """What Slurm's commands need, and the jobs: this Python's programs before any others."""
        path = f"{self.folder / 'bin'}{os.pathsep}{os.environ['PATH']}"
        roots = os.pathsep.join(str(ROOT / name) for name in ("client", "service"))
        return {
            "SLURM_CONF": str(self.folder / "slurm.conf"),
            "PATH": path,
            "PYTHONPATH": roots,
            "OMP_NUM_THREADS": "1",
        }

    def run(self, *command: str, environment: Mapping[str, str] | None = None) -> str:
        return run(command, {**self.environment, **(environment or {})})

    def submit(self, script: str, folder: Path, *arguments: str, options: tuple[str, ...], **settings: str) -> Job:
        """Submit a script of ``deploy/slurm`` from ``folder``; ``settings`` are environment variables."""
        slurm = DEPLOY / "slurm"
        command = ("sbatch", "--parsable", f"--chdir={folder}", *options, str(slurm / script), *arguments)
        printed = self.run(*command, environment={"PACKHORSE_SLURM": str(slurm), **settings})
        return Job(self, int(printed), folder)

    def start(self, program: str, *arguments: str) -> None:
        with (self.folder / f"{program}-{len(self.started)}.log").open("wb") as log:
            command = [require(program), *arguments]
            environment = {**os.environ, **self.environment}
            self.started.append(subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, env=environment))

    def close(self) -> None:
        """End all jobs, and then the daemons, the last one first."""
        if not all(daemon.poll() is None for daemon in self.started):
            self._end_daemons()
            return
        self.run("scancel", "--user=root")
        _wait(lambda: not self.run("squeue", "--noheader"), "the end of all jobs")
        self._end_daemons()

    def _end_daemons(self) -> None:
        for daemon in reversed(self.started):
            daemon.terminate()
            daemon.wait(20)


@contextlib.contextmanager
def running_cluster(folder: Path) -> Iterator[Cluster]:
    """A cluster whose nodes are idle; it is gone afterwards."""
    if os.geteuid() != 0:
        missing("root, who alone can run jobs for users,")
    for tool in ("munged", "slurmctld", "slurmd", "sbatch"):
        require(tool)
    _write_files(folder)
    cluster = Cluster(folder)
    try:
        names = ("key-file", "socket", "pid-file", "log-file", "seed-file")
        paths = [f"--{name}={folder}/munge.{name.partition('-')[0]}" for name in names]
        cluster.start("munged", "--foreground", "--force", *paths)
        wait_until((folder / "munge.socket").exists, "munge's socket")
        cluster.start("slurmctld", "-D")
        for node in NODES:
            cluster.start("slurmd", "-D", "-N", node)
        idle = ["sinfo", "--noheader", "--states=idle", "--format=%D"]
        _wait(lambda: _answer(cluster, idle) == str(len(NODES)), "all nodes")
        yield cluster
    finally:
        cluster.close()


def _wait(holds: Callable[[], bool], what: str) -> None:
    """Ask no more than a few times a second: each time it is a process, beside jobs that need the cores."""
    pause = threading.Event()
    wait_until(lambda: holds() or pause.wait(0.3), what, deadline_s=120)


def _answer(cluster: Cluster, command: list[str]) -> str:
    """What a command prints; nothing while the controller does not answer yet."""
    done = subprocess.run(
        [require(command[0]), *command[1:]],
        env={**os.environ, **cluster.environment},
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        check=False,
    )
    return done.stdout.strip()


def _write_files(folder: Path) -> None:
    folder.chmod(0o755)
    (folder / "state").mkdir()
    host = socket.gethostname().partition(".")[0]
    nodes = "\n".join(NODE.format(name=name, host=host, port=free_port()) for name in NODES)
    text = CONFIGURATION.format(host=host, port=free_port(), folder=folder, nodes=nodes)
    (folder / "slurm.conf").write_text(text)
    key = folder / "munge.key"
    key.write_bytes(secrets.token_bytes(128))
    key.chmod(0o600)
    (folder / "bin").mkdir()
    for name, module in (("packhorse", "packhorse_service"), ("torchrun", "torch.distributed.run")):
        program = folder / "bin" / name
        program.write_text(f'#!/bin/sh\nexec {sys.executable} -m {module} "$@"\n')
        program.chmod(0o755)
