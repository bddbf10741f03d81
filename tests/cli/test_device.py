"""`--device`: which devices JAX is told to use."""

import os

import jax
import pytest

from simfbo.cli.device import use_device
from simfbo.cli.main import main
from simfbo.errors import UserError


@pytest.fixture(autouse=True)
def environment(monkeypatch):
    """Restore what is set: JAX itself has begun in this process and takes no notice."""
    for name in ("JAX_PLATFORMS", "XLA_FLAGS"):
        monkeypatch.setenv(name, "")


@pytest.mark.parametrize(
    ("name", "platform", "flags"),
    [
        ("cpu", "cpu", ""),
        ("gpu", "cuda", ""),
        ("rocm", "rocm", ""),
        ("cpu:4", "cpu", "--xla_force_host_platform_device_count=4"),
    ],
)
def test_what_jax_is_told(name, platform, flags):
    use_device(name)
    assert (os.environ["JAX_PLATFORMS"], os.environ["XLA_FLAGS"]) == (platform, flags)


@pytest.mark.parametrize("name", ["quantum", "cpu:0", "cpu:", "cpu:-1", "cpu:1000", "gpu:2", ""])
def test_wrong_names_are_one_sentence(name):
    with pytest.raises(UserError) as caught:
        use_device(name)
    assert str(caught.value) == (
        f"--device takes cpu, gpu, rocm, tpu, or cpu:2 to cpu:64; got '{name}'."
    )


@pytest.mark.parametrize("error", [RuntimeError, AssertionError])
def test_a_device_that_is_not_there(monkeypatch, error, capsys):
    def devices():
        raise error

    monkeypatch.setattr(jax, "devices", devices)
    assert main(["run", "quadratic", "--device", "tpu"]) == 2
    said = capsys.readouterr().err
    assert said.startswith("simfbo: JAX finds no tpu here: install it for one, as in pip install")
