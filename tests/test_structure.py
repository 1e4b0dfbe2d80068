"""What the source itself must keep to: directions of imports, nothing executable, sizes, the public names."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

import packhorse
from tests.harness import DEADLINE_S
from tests.structure import (
    CLASS_METHODS,
    MODULES,
    ROOT,
    arrows,
    classes_in,
    crowded,
    cycles,
    docstrings_hard_to_read,
    hard_to_read,
    name_of,
    repeated,
    too_large,
    too_long,
    tree_of,
)

CLIENT = [path for path in MODULES if path.is_relative_to(ROOT / "client")]

SERVICE_ONLY = ("jinja2", "tokenizers", "pydantic", "yaml", "typer", "rich", "fsspec", "webdataset", "braceexpand")
# Modules that turn bytes or text into running code, or hand text to a shell.
EXECUTABLE_MODULES = {
    *("pickle", "dill", "cloudpickle", "jsonpickle", "marshal", "shelve", "joblib"),
    *("code", "codeop", "runpy", "pty", "pexpect", "webdataset.autodecode"),
}
# By whole or by last name, whatever they were imported as.
EXECUTABLE_CALLS = {
    *("eval", "exec", "compile", "__import__", "recv_pyobj", "send_pyobj", "read_pickle", "to_pickle", "autodecode"),
    *("os.system", "os.popen", "os.startfile", "os.posix_spawn", "os.posix_spawnp"),
    *("subprocess.getoutput", "subprocess.getstatusoutput", "create_subprocess_shell", "subprocess_shell"),
    *("yaml.load", "yaml.load_all", "full_load", "full_load_all", "unsafe_load", "unsafe_load_all"),
    *("torch.load", "torch.jit.load", "torch.hub.load", "torch.package.PackageImporter"),
}
EXECUTABLE_FAMILIES = ("os.exec", "os.spawn")
NUMPY_LOAD = {"numpy.load", "numpy.lib.format.read_array"}
SHELL_POSITION = 8  # of ``shell`` in the arguments of subprocess.Popen and its like

# file below its import root -> why it may
SOCKETS = {
    "packhorse/transport/dealer.py": "is the client's socket",
    "packhorse/transport/polling.py": "waits for sockets, of the client and of the server, and wakes who waits",
    "packhorse/transport/zmtp_probe.py": "asks a server that closes handshakes for its security mechanism",
    "packhorse/transport/key_files.py": "asks ZeroMQ for the public key of a secret, and what it is built with",
    "packhorse/transport/handshakes.py": "knows ZeroMQ's events by their names; opens no socket",
    "packhorse/launching/runtime_folder.py": "asks whether anybody listens on a launched server's socket",
    "packhorse_service/server/key_generation.py": "has ZeroMQ make a pair of keys; opens no socket",
    "packhorse_service/server/router.py": "is the server's socket",
    "packhorse_service/server/zmq_connections.py": "closes single connections of the server's socket",
    "packhorse_service/server/systemd.py": "tells systemd that the server's loop turns",
    "packhorse_service/monitoring/status_http.py": "is the status page's HTTP server",
    "packhorse_service/loadtest/ranks/rank_connection.py": "has the socket of a simulated rank under the selector",
    "packhorse_service/loadtest/ranks/swarm.py": "has the selector and the context of many simulated ranks",
    "packhorse_service/processes.py": "asks the kernel for a free port for the demo's processes",
}
CLOCKS = {
    "packhorse/feeding/hand_over.py": "when the loop asks, and has its answer",
    "packhorse/feeding/loop_waits.py": "deadlines of the loop",
    "packhorse/transport/connection.py": "how long ago the loop asked, and how long a reader that has ended stays",
    "packhorse/transport/socket_worker.py": "keep-alives",
    "packhorse/launching/local_server.py": "deadlines of a launched server's start and end",
    "packhorse_service/server/server.py": "gives `now` to the sessions",
    "packhorse_service/loading/decode.py": "pauses between tries of a read; the sleep is an argument",
    "packhorse_service/tap.py": "takes as long over a micro-batch as it was asked to",
    "packhorse_service/demo/__init__.py": "the demo's own deadline and the time it took",
    "packhorse_service/demo/demo_progress.py": "the demo's progress display",
    "packhorse_service/loadtest/ranks/swarm.py": "how long a worker waits for its next event",
    "packhorse_service/loadtest/ranks/rank_connection.py": "gives `now` to its simulated rank",
    "packhorse_service/monitoring/status_client.py": "the deadline of an answer",
    "packhorse_service/monitoring/show.py": "asks again after an interval, and how long nobody has answered",
    "packhorse_service/loadtest/run/coordinator.py": "deadlines of a load test, and the time it measures",
    "packhorse_service/processes.py": "deadlines of a start, and grace before child processes are killed",
}
THREADS = {
    "packhorse/feed.py": "wakes the loop that waits for its connection",
    "packhorse/feeding/hand_over.py": "starts none; what is owed is owed to a thread",
    "packhorse/transport/connection.py": "has the lock that the client's thread shares with the loop",
    "packhorse/transport/socket_worker.py": "works the socket under that lock",
    "packhorse/launching/local_server.py": "logs what the server that it started logs",
    "packhorse_service/server/producer.py": "runs a stream's pipeline beside the server's loop",
    "packhorse_service/loading/engine.py": "hands blocks to worker processes",
    "packhorse_service/monitoring/status_http.py": "answers HTTP beside the server's loop",
    "packhorse_service/loadtest/run/workers.py": "reads the pipes of the worker processes",
    "packhorse_service/loadtest/run/coordinator.py": "watches processes while ranks run",
    "packhorse_service/processes.py": "watches child processes",
    "packhorse_service/demo/__init__.py": "follows the ranks while the server runs",
}
# What a wall clock that jumps would change. Only the monotonic clock is read, and only differences of it count.
CALENDAR = {"now", "utcnow", "today", "time.time", "time.time_ns", "gmtime", "localtime", "time.strftime", "ctime"}


def imported(tree: ast.AST) -> Iterator[str]:
    """Every module that is imported, at any depth of the code."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield node.module or ""


@cache
def real_names(tree: ast.AST) -> dict[str, str]:
    """What the imported names of a module stand for: ``np`` for ``numpy``, ``run`` for ``subprocess.run``."""
    found = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found.update({alias.asname: alias.name for alias in node.names if alias.asname})
        elif isinstance(node, ast.ImportFrom):
            found.update({alias.asname or alias.name: f"{node.module}.{alias.name}" for alias in node.names})
    return found


def called(tree: ast.AST) -> Iterator[tuple[str, ast.Call]]:
    """(dotted name, call) of every call of a name or an attribute, by its whole and by its last name."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            first, dot, rest = ast.unparse(node.func).partition(".")
            dotted = real_names(tree).get(first, first) + dot + rest
            yield dotted, node
            if "." in dotted:
                yield dotted.rpartition(".")[2], node


def importers(*roots: str) -> set[str]:
    wanted = set(roots)
    return {name_of(p) for p in MODULES if any(m.partition(".")[0] in wanted for m in imported(tree_of(p)))}


def test_there_is_something_to_scan() -> None:
    assert {name_of(p) for p in MODULES} >= {"packhorse/feed.py", "packhorse_service/server/server.py"}


@pytest.mark.parametrize("path", CLIENT, ids=name_of)
def test_the_client_never_imports_the_service(path: Path) -> None:
    assert not [module for module in imported(tree_of(path)) if module.partition(".")[0] == "packhorse_service"]


def test_importing_the_client_loads_neither_torch_nor_what_only_the_service_needs() -> None:
    heavy = ("torch", "packhorse_service", *SERVICE_ONLY)
    script = f"import sys, packhorse; print([name for name in {heavy!r} if name in sys.modules])"
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=DEADLINE_S
    )
    assert done.stdout.strip() == "[]"


def test_only_the_adapter_imports_torch() -> None:
    in_client = {name for name in importers("torch") if name.startswith("packhorse/")}
    adapters = {name for name in in_client if name.startswith("packhorse/adapters/")}
    assert in_client - adapters == {
        "packhorse/feeding/torch_arrays.py",
        "packhorse/hf/experiment.py",
        "packhorse/hf/inputs.py",
        "packhorse/hf/model_check.py",
        "packhorse/feeding/peers.py",
    }


def test_the_public_names_are_these() -> None:
    assert packhorse.__all__ == [
        "AttentionOffsets",
        "AuthenticationFailed",
        "BatchContract",
        "ConfigError",
        "ContractError",
        "Coordinates",
        "Feed",
        "FeedStats",
        "HandshakeRefused",
        "LossReduction",
        "MicroBatch",
        "Objective",
        "PackhorseError",
        "Packing",
        "ParallelLayout",
        "Partition",
        "Position",
        "ProtocolError",
        "ReaderPolicy",
        "Remainder",
        "ServerFailed",
        "Severity",
        "SourceError",
        "StallTimeout",
        "StartTimeout",
        "TailPadding",
        "TrainerFacts",
        "TransportError",
        "Violation",
        "__version__",
        "launch",
    ]
    assert all(hasattr(packhorse, name) for name in packhorse.__all__)


@pytest.mark.parametrize("path", MODULES, ids=name_of)
def test_nothing_here_can_run_what_it_reads(path: Path) -> None:
    tree = tree_of(path)
    for module in {*imported(tree), *real_names(tree).values()}:
        assert not {module, module.partition(".")[0]} & EXECUTABLE_MODULES, module
    for name, call in called(tree):
        text = ast.unparse(call)
        assert name not in EXECUTABLE_CALLS or ast.unparse(call.func).startswith("re."), text
        assert not name.startswith(EXECUTABLE_FAMILIES), text
        # Its readers unpickle what a shard holds, and run the commands of pipe: URLs.
        assert not name.startswith("webdataset.") or name.endswith(".ShardWriter"), text
        assert name not in NUMPY_LOAD or len(call.args) <= 2, f"allow_pickle by its position: {text}"
        assert not name.startswith("subprocess.") or len(call.args) <= SHELL_POSITION, f"shell by its position: {text}"
        for keyword in call.keywords:
            hidden = keyword.arg is None and (name in NUMPY_LOAD or name.startswith("subprocess."))
            assert not hidden, f"options that cannot be seen: {text}"
            # Any value but a literal False: a variable may be true.
            if keyword.arg in ("shell", "allow_pickle"):
                assert isinstance(keyword.value, ast.Constant), text
                assert keyword.value.value is False, text


@pytest.mark.parametrize(
    "code",
    [
        "import pickle",
        "import pickle as harmless",
        "from marshal import loads",
        "from webdataset import autodecode",
        "import webdataset.autodecode",
        "eval(text)",
        "socket.recv_pyobj()",
        "os.system(command)",
        "os.popen(command)",
        "from os import system as look; look(command)",
        "os.execvp(name, arguments)",
        "asyncio.create_subprocess_shell(command)",
        "torch.load(path)",
        "from torch import load; load(path)",
        "np.load(path, allow_pickle=True)",
        "import numpy as np; np.load(path, None, True)",
        "from numpy import load; load(path, **options)",
        "pandas.read_pickle(path)",
        "yaml.load(text, Loader=yaml.Loader)",
        "yaml.unsafe_load(text)",
        "subprocess.run(command, shell=flag)",
        "subprocess.Popen(command, -1, None, None, None, None, None, True, True)",
        "from subprocess import run; run(command, **options)",
        "subprocess.getoutput(command)",
        "import webdataset as wds; wds.WebDataset(url)",
    ],
)
def test_the_scan_sees_what_it_looks_for(code: str, tmp_path: Path) -> None:
    path = tmp_path / "module.py"
    path.write_text(code)
    with pytest.raises(AssertionError):
        test_nothing_here_can_run_what_it_reads(path)


def test_sockets_are_owned_by_the_server_and_the_feed() -> None:
    assert importers("zmq", "socket", "socketserver", "asyncio", "selectors") <= SOCKETS.keys()


def test_clocks_are_read_by_the_server_and_the_feed() -> None:
    assert importers("time") <= CLOCKS.keys()
    for path in MODULES:
        of_calendar = [name for name, _ in called(tree_of(path)) if name in CALENDAR]
        assert not of_calendar, f"{name_of(path)} asks the calendar"


def test_threads_and_processes_are_started_by_these_alone() -> None:
    assert importers("threading", "concurrent", "multiprocessing") <= THREADS.keys()


@pytest.mark.parametrize("list_", [SOCKETS, CLOCKS, THREADS], ids=["sockets", "clocks", "threads"])
def test_the_lists_name_modules_that_exist(list_: dict[str, str]) -> None:
    assert list_.keys() <= {name_of(path) for path in MODULES}


@pytest.mark.parametrize("path", MODULES, ids=name_of)
def test_every_module_says_what_it_is(path: Path) -> None:
    assert ast.get_docstring(tree_of(path))


@pytest.mark.parametrize("path", MODULES, ids=name_of)
def test_modules_and_functions_stay_short(path: Path) -> None:
    assert not list(too_long(path))


def test_no_folder_imports_in_a_round_one_that_imports_it() -> None:
    assert not cycles(arrows())


def test_no_folder_is_a_heap_of_modules() -> None:
    assert not list(crowded())


def test_no_module_and_no_class_has_the_name_of_another_of_its_package() -> None:
    assert not list(repeated())


def test_classes_with_behaviour_have_one_job() -> None:
    assert not list(too_large(MODULES))


@pytest.mark.parametrize("path", MODULES, ids=name_of)
def test_docstrings_can_be_read_without_the_name_above_them(path: Path) -> None:
    assert not list(hard_to_read(path))


@pytest.mark.parametrize(
    ("edges", "found"),
    [
        ({"a": {"b"}, "b": {"c"}}, []),
        ({"a": {"b"}, "b": {"a"}}, [("a", "b")]),
        ({"a": {"b"}, "b": {"c"}, "c": {"a"}, "d": {"a"}}, [("a", "b", "c")]),
    ],
)
def test_cycles_of_folders_are_found_however_long_they_are(
    edges: dict[str, set[str]], found: list[tuple[str, ...]]
) -> None:
    assert cycles(edges) == found


def test_the_measures_see_what_they_look_for() -> None:
    methods = "\n".join(f"    def do_{i}(self):\n        self.a{i} = {i}" for i in range(CLASS_METHODS + 1))
    code = f'class Big:\n    """What it does."""\n{methods}\n\ndef f():\n    """Short one."""\n'
    tree = ast.parse(code)
    (big,) = classes_in(tree)
    assert (len(big.methods), len(big.attributes), big.behaves) == (CLASS_METHODS + 1, CLASS_METHODS + 1, True)
    assert len(list(docstrings_hard_to_read(tree))) == 2
