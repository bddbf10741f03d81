"""The devices that a command computes on."""

import os

from simfbo.errors import UserError, plain

_KINDS = {"cpu": "cpu", "gpu": "cuda", "rocm": "rocm", "tpu": "tpu"}  # as JAX calls them
_MOST = 64


def use_device(name: str) -> None:
    """Select the devices of JAX; must be called before JAX is used.

    Args:
        name: cpu, gpu (NVIDIA's), rocm (AMD's) or tpu; cpu:4 for four devices, which share the
            processor.
    """
    kind, colon, count = name.partition(":")
    devices = int(count) if count.isdecimal() and len(count) < 4 else 0
    if kind not in _KINDS or (colon and not (kind == "cpu" and 1 <= devices <= _MOST)):
        raise UserError(
            f"--device takes cpu, gpu, rocm, tpu, or cpu:2 to cpu:{_MOST}; got '{plain(name)}'."
        )
    os.environ["JAX_PLATFORMS"] = _KINDS[kind]
    if devices:
        flag = f"--xla_force_host_platform_device_count={devices}"
        os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {flag}".strip()
    _require_there(kind)


def _require_there(kind: str) -> None:
    """Raise unless JAX has a device of this kind."""
    import jax

    try:
        jax.devices()
    except (AssertionError, RuntimeError):
        raise UserError(
            f"JAX finds no {kind} here: install it for one, as in pip install 'jax[cuda12]' or "
            "'jax[tpu]', or omit --device."
        ) from None
