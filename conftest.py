"""Tests run in double precision, with strict dtype promotion and warnings as errors."""

import gc
import os
import signal
import subprocess
import sys
import time
from importlib.util import find_spec
from pathlib import Path

# Threads of BLAS and OpenMP wait by spinning, at the cost of the other process of tests.
# This stands here since libraries read it when they are imported.
for library in ("OMP", "OPENBLAS", "MKL"):
    os.environ.setdefault(f"{library}_NUM_THREADS", "1")

import jax  # noqa: E402
import pytest  # noqa: E402
import shapes  # noqa: E402

# Docstrings' examples of simfbo.torch run where PyTorch is installed.
collect_ignore_glob = [] if find_spec("torch") else ["src/simfbo/torch/*"]

# Most of the time of a first run is compilation, half of it in XLA's emitters of fused loops, and
# a tenth in dividing small programs among threads.
# XLA_FLAGS in the environment, empty in `make test-all`, decides instead.
if jax.__version_info__ < (0, 11):  # later ones have no such flag, and need less time
    os.environ.setdefault(
        "XLA_FLAGS", "--xla_cpu_use_fusion_emitters=false --xla_cpu_parallel_codegen_split_count=1"
    )

jax.config.update("jax_enable_x64", True)
jax.config.update("jax_numpy_dtype_promotion", "strict")
# Many tests build the same federation anew: what one of them compiled serves the others.
_CACHE = Path(__file__).parent / ".pytest_cache" / "jax"
jax.config.update("jax_compilation_cache_dir", str(_CACHE))
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)

# From here on the shapes in annotations are checked, and those of the fields of dataclasses.
_CHECKED = [f"simfbo.{room}" for room in ("core", "engines", "algorithms", "robust")]
shapes.check_in(_CHECKED)
from simfbo.engines.base import PROGRAMS, TRACES  # noqa: E402
from simfbo.runs import files  # noqa: E402

# It would move the cache to the user's folder, for all tests that follow in the same process.
files.keep_compilations = lambda: None

# Nothing that is imported or collected is garbage: look for some less often than usual.
gc.set_threshold(10_000, 20, 20)


@pytest.fixture(scope="module", autouse=True)
def quick_compilation(request):
    """Compile without optimisations, but for the command line: other programs are small.

    JAX_DISABLE_MOST_OPTIMIZATIONS=0 (or 1) in the environment decides for all tests instead.
    """
    if "JAX_DISABLE_MOST_OPTIMIZATIONS" not in os.environ:
        small = request.path.parent.name not in ("cli", "experiments")
        jax.config.update("jax_disable_most_optimizations", small)


@pytest.fixture
def optimised():
    """Compile as users do."""
    jax.config.update("jax_disable_most_optimizations", False)
    yield
    jax.config.update("jax_disable_most_optimizations", True)


_MAPPED = Path("/proc/self/maps")  # Linux allows a process 65,530 of them
_MOST = 25_000


@pytest.fixture(scope="module", autouse=True)
def few_programs():
    """Forget compiled programs before there are more than a process can hold.

    Every program takes several mappings of memory; when there are no more of them, XLA crashes.
    """
    yield
    if _MAPPED.is_file() and _MAPPED.read_bytes().count(b"\n") > _MOST:
        PROGRAMS.clear()
        TRACES.clear()
        jax.clear_caches()
        gc.collect()


def pytest_collection_finish():
    """Spare the garbage collector what is there for good."""
    gc.collect()
    gc.freeze()


def pytest_collection_modifyitems(items):
    """Allow long tests more than pyproject.toml does: there too, a guard against hangs only."""
    for item in items:
        if item.get_closest_marker("slow"):
            item.add_marker(pytest.mark.timeout(1800))


def pytest_addoption(parser):
    parser.addoption(
        "--strategy", choices=("auto", "lanes", "batches"),
        help="how the simulated engine computes clients, where a test does not say it",
    )  # fmt: skip


@pytest.fixture(autouse=True)
def strategy(request, monkeypatch):
    """Let all tests run with one strategy, as in pytest --strategy lanes."""
    if chosen := request.config.getoption("--strategy"):
        from simfbo import SimulatedFederation

        defaults = SimulatedFederation.__init__.__kwdefaults__
        monkeypatch.setitem(defaults, "strategy", chosen)


@pytest.fixture
def single_precision():
    """Run a test in float32, as users do."""
    with jax.enable_x64(False):
        yield


_PATIENCE = 240  # seconds, for machines that are busy with other things
_DEFAULT_SIGNALS = """import signal
for number in (signal.SIGHUP, signal.SIGTERM):
    signal.signal(number, signal.SIG_DFL)
signal.signal(signal.SIGINT, signal.default_int_handler)
"""


class Script(subprocess.Popen):
    """A Python script in a process group of its own, whose waits are limited."""

    def __init__(self, script, *arguments, cwd):
        """Start it with the default answers to signals.

        Under nohup and in background shells, children would inherit that signals are ignored.
        """
        super().__init__(
            [sys.executable, "-c", _DEFAULT_SIGNALS + script, *arguments], cwd=cwd,
            env={**os.environ, "XDG_CACHE_HOME": str(cwd / "cache"), "COLUMNS": "300"},
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True,
        )  # fmt: skip

    def wait_until(self, condition):
        """Wait for a condition as long as the process lives."""
        deadline = time.monotonic() + _PATIENCE
        while not condition():
            assert self.poll() is None, self.communicate()
            assert time.monotonic() < deadline
            time.sleep(0.05)

    def outcome(self):
        """Wait for the end; return what was printed to stdout and stderr."""
        return self.communicate(timeout=_PATIENCE)

    def kill_group(self):
        """End whatever still runs."""
        if self.poll() is None:
            os.killpg(self.pid, signal.SIGKILL)
        self.outcome()


@pytest.fixture
def start(tmp_path):
    """Return a function that starts a script in the test's folder; it ends with the test."""
    started = []

    def call(script, *arguments):
        started.append(Script(script, *arguments, cwd=tmp_path))
        return started[-1]

    yield call
    for process in started:
        process.kill_group()


@pytest.fixture
def in_process(monkeypatch):
    """Run the jobs of a sweep one after the other in this process: workers take long to start."""
    from simfbo.studies import sweep

    def run_all(jobs, workers, data_dir, report):
        for job in jobs:
            sweep.run_job(job, data_dir)
            report()

    monkeypatch.setattr(sweep, "_run_all", run_all)
    monkeypatch.setattr(sweep, "_CACHE", {})
