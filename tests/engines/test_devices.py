"""Several devices: the same numbers, and every client's data on one of them only."""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import jax
import pytest

SCRIPT = Path(__file__).parent / "on_devices.py"
CACHED = {  # what was compiled in an earlier run of the tests serves this one
    "JAX_COMPILATION_CACHE_DIR": str(jax.config.jax_compilation_cache_dir),
    "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
    "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
}


def answers(*arguments, devices=4, timeout=400):
    flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count={devices}"
    environment = os.environ | {"XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu"} | CACHED
    found = subprocess.run(
        [sys.executable, str(SCRIPT), *arguments], env=environment, capture_output=True, text=True,
        timeout=timeout, check=False,
    )  # fmt: skip
    assert found.returncode == 0, found.stderr
    return json.loads(found.stdout.splitlines()[-1])


@pytest.fixture(scope="module")
def found():
    return answers("compare")


def test_four_devices_compute_what_one_does(found):
    """For cohorts of everyone, sampled with and without replacement, in chunks, with refusals."""
    assert len(found["differences"]) == 7
    assert max(found["differences"].values()) < 1e-12
    assert all(found["same ledgers"].values())
    assert all(found["same refusals"].values())


def test_data_is_divided_between_devices(found):
    """Eleven clients on four devices: three places each, none of them on two devices."""
    assert found["shards"] == [3, 3, 3, 3]
    assert found["clients on devices"] == [[0, 1, 2], [3, 4, 5], [6, 7, 8], [9, 10, 10]]


def test_a_run_on_devices_is_resumed_to_the_bit(found):
    assert found["resumed"] is True


def test_fewer_devices_may_be_asked_for(found):
    assert found["of two"] == 2


@pytest.mark.slow
def test_two_processes_find_what_one_does():
    """`jax.distributed` on this machine, as on two hosts."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    command = [sys.executable, str(SCRIPT), "distributed", str(port)]
    environment = os.environ | {"JAX_PLATFORMS": "cpu"}
    both = [
        subprocess.Popen([*command, str(i)], env=environment, stdout=subprocess.PIPE, text=True)
        for i in range(2)
    ]
    try:
        said = [one.communicate(timeout=400)[0] for one in both]
    finally:
        for one in both:
            one.kill()
    first, second = (json.loads(out.splitlines()[-1]) for out in said)
    assert first["devices"] == second["devices"] == 2
    assert first["x"] == second["x"]
    alone = answers("alone", devices=1)
    assert first["x"] == pytest.approx(alone["x"], rel=1e-12)
