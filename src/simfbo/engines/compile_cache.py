"""Compiled programs: shared by all federations of a process, and kept on disk between processes."""

import os
from collections.abc import Callable, Hashable, MutableMapping
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import jax

from simfbo.core.federation import ClientStep

Program = Any  # compiled, or whatever else is kept with it


class ProgramCache:
    """Programs by client step and by everything else they depend on.

    When a client step is garbage-collected, so are its programs.

    Attributes:
        compiled: names of the client steps compiled so far, one entry per compilation.
    """

    def __init__(self) -> None:
        """Begin empty."""
        self.compiled: list[str] = []
        self._programs: MutableMapping[ClientStep, dict[Hashable, Program]] = WeakKeyDictionary()

    def get(self, client_step: ClientStep, form: Hashable, build: Callable[[], Program]) -> Program:
        """Return the program for a client step and inputs of some form, built if need be."""
        programs = self._programs.setdefault(client_step, {})
        if form not in programs:
            programs[form] = build()
            self.compiled.append(client_step.__name__)
        return programs[form]

    def clear(self) -> None:
        """Forget all programs."""
        self._programs.clear()


PROGRAMS = ProgramCache()
TRACES = ProgramCache()  # what is known of client steps before they run


def keep_compilations() -> None:
    """Keep compiled programs on disk, so that the next process starts at once."""
    if folder := cache_folder():
        jax.config.update("jax_compilation_cache_dir", str(folder))
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.1)


def cache_folder() -> Path | None:
    """Return this user's folder of compiled programs; None if there is none to write to.

    Then nothing is kept: programs in a folder that others can write to must not be run.
    """
    root = Path(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache"))
    folder = root / "simfbo" / "jax"
    try:
        if root.is_absolute():  # it is not where there is no home folder
            folder.mkdir(parents=True, exist_ok=True)
    except OSError:
        return None
    return folder if root.is_absolute() and os.access(folder, os.W_OK) else None
