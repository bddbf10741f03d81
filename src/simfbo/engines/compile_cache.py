"""Compiled programs: shared by all federations of a process, and kept on disk between processes."""

import os
from collections import OrderedDict
from collections.abc import Callable, Hashable
from pathlib import Path
from typing import Any

import jax

Program = Any  # compiled, or whatever else is kept with it


class ProgramCache:
    """The programs used last, by the structure of what they run and by all else they depend on.

    The structure of a method or client step is all of it but its numbers, which are inputs.

    Attributes:
        compiled: names of what was compiled so far, one entry per compilation.
    """

    def __init__(self, most: int) -> None:
        """Begin empty; hold at most so many programs."""
        self.compiled: list[str] = []
        self._most, self._programs = most, OrderedDict[Hashable, Program]()

    def get(self, name: str, key: Hashable, build: Callable[[], Program]) -> Program:
        """Return a program, built if need be.

        Args:
            name: of the method or client step.
            key: its structure, and all else that the program depends on.
            build: () -> the program.
        """
        if key in self._programs:
            self._programs.move_to_end(key)
        else:
            built = self._programs[key] = build()
            if built is not None and not isinstance(built, bool):
                self.compiled.append(name)
            if len(self._programs) > self._most:
                self._programs.popitem(last=False)
        return self._programs[key]

    def clear(self) -> None:
        """Forget all programs."""
        self._programs.clear()


PROGRAMS = ProgramCache(256)
TRACES = ProgramCache(1024)  # what is known of client steps before they run


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
