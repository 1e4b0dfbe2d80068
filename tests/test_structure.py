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

ROOT = Path(__file__).parents[1]
CLIENT = sorted((ROOT / "client").rglob("*.py"))
MODULES = [*CLIENT, *sorted((ROOT / "service").rglob("*.py"))]

MODULE_LINES = 400
FUNCTION_LINES = 60

SERVICE_ONLY = ("jinja2", "tokenizers", "pydantic", "yaml", "typer", "rich", "fsspec", "webdataset", "braceexpand")
# Modules that turn bytes or text into running code.
EXECUTABLE_MODULES = {"pickle", "dill", "cloudpickle", "marshal", "shelve", "joblib"}
EXECUTABLE_CALLS = {"eval", "exec", "compile", "__import__", "recv_pyobj", "send_pyobj", "os.system", "os.popen"}

# file below its import root -> why it may
SOCKETS = {
    "packhorse/dealer.py": "is the client's socket",
    "packhorse_service/router.py": "is the server's socket",
    "packhorse_service/loadtest/swarm.py": "has the sockets of many simulated ranks under one selector and context",
    "packhorse_service/processes.py": "asks the kernel for a free port for the demo's processes",
}
CLOCKS = {
    "packhorse/feed.py": "deadlines of the loop",
    "packhorse/connection.py": "keep-alives, and how long ago the loop asked",
    "packhorse_service/server.py": "gives `now` to the sessions",
    "packhorse_service/decoding.py": "pauses between tries of a read; the sleep is an argument",
    "packhorse_service/tap.py": "takes as long over a micro-batch as it was asked to",
    "packhorse_service/demo/__init__.py": "the demo's own deadline and the time it took",
    "packhorse_service/demo/progress.py": "the demo's progress display",
    "packhorse_service/loadtest/swarm.py": "gives `now` to the simulated ranks",
    "packhorse_service/loadtest/coordinator.py": "deadlines of a load test, and the time it measures",
    "packhorse_service/processes.py": "deadlines of a start, and grace before child processes are killed",
}
# What a wall clock that jumps would change. Only the monotonic clock is read, and only differences of it count.
CALENDAR = {"now", "utcnow", "today", "time.time", "time.time_ns", "gmtime", "localtime", "time.strftime", "ctime"}


def name_of(path: Path) -> str:
    """The path below ``client`` or ``service``."""
    return "/".join(path.relative_to(ROOT).parts[1:])


@cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"), filename=str(path))


def imported(tree: ast.AST) -> Iterator[str]:
    """Every module that is imported, at any depth of the code."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield node.module or ""


def called(tree: ast.AST) -> Iterator[tuple[str, ast.Call]]:
    """(dotted name, call) of every call of a name or an attribute, by its whole and by its last name."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            dotted = ast.unparse(node.func)
            yield dotted, node
            if "." in dotted:
                yield dotted.rpartition(".")[2], node


def importers(*roots: str) -> set[str]:
    wanted = set(roots)
    return {name_of(p) for p in MODULES if any(m.partition(".")[0] in wanted for m in imported(tree_of(p)))}


def test_there_is_something_to_scan() -> None:
    assert {name_of(p) for p in MODULES} >= {"packhorse/feed.py", "packhorse_service/server.py"}


@pytest.mark.parametrize("path", CLIENT, ids=name_of)
def test_the_client_never_imports_the_service(path: Path) -> None:
    assert not [module for module in imported(tree_of(path)) if module.partition(".")[0] == "packhorse_service"]


def test_importing_the_client_loads_neither_torch_nor_what_only_the_service_needs() -> None:
    heavy = ("torch", "packhorse_service", *SERVICE_ONLY)
    script = f"import sys, packhorse; print([name for name in {heavy!r} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.strip() == "[]"


def test_only_the_adapter_imports_torch() -> None:
    in_client = {name for name in importers("torch") if name.startswith("packhorse/")}
    adapters = {name for name in in_client if name.startswith("packhorse/adapters/")}
    assert in_client - adapters == {"packhorse/torch_adapter.py", "packhorse/hf.py", "packhorse/peers.py"}


def test_the_public_names_are_these() -> None:
    assert packhorse.__all__ == [
        "AttentionOffsets",
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
        "Readers",
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
    ]
    assert all(hasattr(packhorse, name) for name in packhorse.__all__)


@pytest.mark.parametrize("path", MODULES, ids=name_of)
def test_nothing_here_can_run_what_it_reads(path: Path) -> None:
    tree = tree_of(path)
    assert not EXECUTABLE_MODULES & {module.partition(".")[0] for module in imported(tree)}
    for name, call in called(tree):
        assert name not in EXECUTABLE_CALLS or ast.unparse(call.func).startswith("re."), ast.unparse(call)
        assert not name.endswith("torch.load"), ast.unparse(call)
        for keyword in call.keywords:
            # Any value but a literal False: a variable may be true.
            if keyword.arg in ("shell", "allow_pickle"):
                assert isinstance(keyword.value, ast.Constant), ast.unparse(call)
                assert keyword.value.value is False, ast.unparse(call)


@pytest.mark.parametrize(
    "code",
    [
        "import pickle",
        "from marshal import loads",
        "eval(text)",
        "socket.recv_pyobj()",
        "os.system(command)",
        "torch.load(path)",
        "np.load(path, allow_pickle=True)",
        "subprocess.run(command, shell=flag)",
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


@pytest.mark.parametrize("path", MODULES, ids=name_of)
def test_every_module_says_what_it_is(path: Path) -> None:
    assert ast.get_docstring(tree_of(path))


@pytest.mark.parametrize("path", MODULES, ids=name_of)
def test_modules_and_functions_stay_short(path: Path) -> None:
    lines = len(path.read_text(encoding="utf-8").splitlines())
    assert lines <= MODULE_LINES, f"{name_of(path)} has {lines} lines"
    for node in ast.walk(tree_of(path)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            length = (node.end_lineno or node.lineno) - node.lineno + 1
            assert length <= FUNCTION_LINES, f"{name_of(path)}:{node.lineno} {node.name} has {length} lines"
