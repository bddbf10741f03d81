"""A run on the federation: start it, follow it to its end, and resume it if its process dies."""

import contextlib
import json
import re
import threading
import time
import tomllib
from collections.abc import Callable, Mapping
from datetime import datetime
from pathlib import Path
from typing import Any, NamedTuple

import tomli_w

from simfbo.errors import UserError, brief, plain
from simfbo.flower.ops import control_api, supervisor
from simfbo.flower.ops.folder import Layout
from simfbo.runs.files import Json, require_no_way_out, write_atomic
from simfbo.runs.history import FILE, History
from simfbo.runs.interrupts import held_back

_REASON = re.compile(r"(?:[\w.]+\.)?\w*(?:Error|Exception): (.*)")

OnLine = Callable[[Json], object]
OnEvent = Callable[[str], object]


class Run(NamedTuple):
    """A run that is ready to start.

    Attributes:
        layout: of the federation.
        app: the folder of the app.
        folder: for the history and checkpoints.
    """

    layout: Layout
    app: Path
    folder: Path

    @property
    def history(self) -> Path:
        """The file of the history."""
        return self.folder / FILE

    @property
    def settings(self) -> Path:
        """The file with the app's settings in this run."""
        return self.folder / "run.toml"

    @property
    def log(self) -> Path:
        """The log of the server."""
        return self.folder / "server.log"

    @property
    def end(self) -> Json | None:
        """The end record of the history, if the run has ended."""
        lines = self.history.read_bytes().splitlines() if self.history.is_file() else []
        last = _parsed(lines[-1]) if lines else {}
        return last if last.get("kind") == "end" else None


def prepare(
    federation: Path,
    app: Path,
    settings: Mapping[str, str],
    output: Path | None = None,
    resume: Path | None = None,
) -> Run:
    """Validate the requirements of a run, and write its settings.

    Args:
        federation: folder of the federation, which must be running.
        app: folder of a Flower app.
        settings: changed settings of the app, as texts by key.
        output: folder of a new run; one under runs/ by default.
        resume: folder of a run to resume with its original settings.
    """
    layout = Layout(federation.resolve())
    if not layout.read_setup().link:
        raise UserError("The SuperLink runs on another machine: start runs there.")
    if supervisor.running(layout) is None:
        raise UserError("The federation is not running: start it with 'simfbo flower up'.")
    config = read_config(app)
    folder = _new_folder(app, output) if resume is None else _old_folder(resume)
    run = Run(layout, app.resolve(), folder)
    changed = changed_settings(settings, config, None if resume is None else run.history)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        write_atomic(run.settings, tomli_w.dumps({**changed, "folder": str(folder)}))
    except OSError as error:
        raise UserError(f"Cannot write to {folder}: {error}.") from None
    return run


def train(run: Run, retries: int, watch: OnLine, say: OnEvent) -> Json | None:
    """Start a run and wait for its end; resume it if its server dies.

    Args:
        run: the run.
        retries: the largest number of times to resume it.
        watch: called with the app's digest, the header of the history and every new line.
        say: called with messages about other events.

    Returns:
        The end record; None if the server died too often.
    """
    end = _follow(run, watch)
    for _ in range(retries):
        if end is not None:
            break
        say("The server's process died. Resuming from the last checkpoint.")
        end = _follow(run, watch)
    return end


def _follow(run: Run, watch: OnLine) -> Json | None:
    """Start a run and wait for its end; return the end record, None if its server died."""
    reader, number = HistoryReader(run.history), ""
    watch({"kind": "app", "digest": control_api.digest(run.app)})
    if reader.header:
        watch(reader.header)
    try:
        with held_back():  # once the run has started, its number is known
            number = control_api.start_run(*run[:2], run.settings)
        log = _Log(run, number)
        while not log.done or not control_api.is_over(run.layout, number):
            if log.done:  # the SuperLink died, but not the run
                log = _Log(run, number)
            for line in reader.new_lines():
                watch(line)
            time.sleep(0.1)
        for line in reader.new_lines():
            watch(line)
    except KeyboardInterrupt:
        if number:
            with contextlib.suppress(UserError):
                control_api.stop_run(run.layout, number)
        raise
    if run.end is None and log.reason is not None:
        raise UserError(f"The run failed: {log.reason}. The full log is in {run.log}.")
    return run.end


def read_config(app: Path) -> Json:
    """Read the settings of an app; raise unless it is one with a `folder` setting."""
    file = app / "pyproject.toml"
    try:
        config = tomllib.loads(file.read_text())["tool"]["flwr"]["app"]["config"]
    except (OSError, KeyError, TypeError, ValueError):
        raise UserError(
            f"{app} is not a Flower app: it needs a pyproject.toml with [tool.flwr.app.config], "
            "like examples/flower_app."
        ) from None
    if "folder" not in config:
        raise UserError(f'{file} must have folder = "" under [tool.flwr.app.config].')
    return config


def changed_settings(given: Mapping[str, str], config: Json, history: Path | None = None) -> Json:
    """Return the settings that differ from an app's own.

    Args:
        given: as texts by key.
        config: the app's own.
        history: of the run to resume, whose settings are kept.
    """
    changed: Json = {}
    if history is not None:
        previous = History.load(history.parent).header.get("config", {})
        changed = {key: value for key, value in previous.items() if key in config}
    for key, text in given.items():
        if key not in config or key == "folder":
            available = ", ".join(sorted(config.keys() - {"folder"}))
            raise UserError(f"Unknown setting '{plain(key)}'. The app has {available}.")
        changed[key] = _value(key, text, config[key])
    return changed


def _value(key: str, text: str, default: Any) -> Any:
    """Parse a setting's value to the type of the app's own."""
    try:
        value = tomllib.loads(f"value = {text}")["value"]
    except ValueError:
        value = text
    if isinstance(default, float) and type(value) is int:
        value = float(value)
    if isinstance(default, str) and type(value) is not str:
        value = text
    if type(value) is not type(default):
        raise UserError(f"Setting '{key}' must be a value like {default!r}, got {brief(text)}.")
    return value


def _new_folder(app: Path, output: Path | None) -> Path:
    """Return the folder of a new run."""
    default = Path("runs") / f"{app.resolve().name}-{datetime.now():%Y%m%d-%H%M%S}"
    folder = (output or default).resolve()
    if (folder / FILE).exists():
        raise UserError(f"{folder} already holds a run: resume it, or choose another folder.")
    return folder


def _old_folder(resume: Path) -> Path:
    """Return the folder of a run to resume."""
    if not (resume / FILE).is_file() and not any(resume.glob("checkpoint-*.npz")):
        raise UserError(f"{resume} does not hold a run that could be resumed.")
    require_no_way_out(resume)
    return resume.resolve()


class HistoryReader:
    """Reads a history that another process is writing.

    Attributes:
        header: its first line; empty if there is none yet.
    """

    def __init__(self, file: Path) -> None:
        """Take the file, and skip its existing lines."""
        self._file, self._read = file, file.stat().st_size if file.is_file() else 0
        self.header = _parsed(file.read_bytes().partition(b"\n")[0]) if file.is_file() else {}

    def new_lines(self) -> list[Json]:
        """Return the lines added since the last call."""
        if not self._file.is_file():
            return []
        with open(self._file, "rb") as history:
            if history.seek(0, 2) < self._read:
                self._read = history.tell()  # a resumed run has removed the lines that it repeats
            history.seek(self._read)
            text = history.read()
        complete = text[: text.rfind(b"\n") + 1]
        self._read += len(complete)
        return [line for line in map(_parsed, complete.splitlines()) if line]


class _Log:
    """The log of a run's server, written to a file as it arrives.

    Attributes:
        done: it has ended.
        reason: the message of the last exception in it.
    """

    def __init__(self, run: Run, number: str) -> None:
        self.reason: str | None = None
        self.done = False
        self._file, self._parts = run.log, control_api.stream_log(run.layout, number)
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        rest = ""
        try:
            with open(self._file, "w", errors="replace") as out:  # the log starts over
                for part in self._parts:
                    out.write(part)
                    out.flush()
                    *lines, rest = (rest + part).split("\n")
                    for match in filter(None, map(_REASON.match, lines)):
                        self.reason = match[1].strip().rstrip(".")
        except UserError:
            pass  # the SuperLink died or rejects the request, which is noticed in `_follow`
        finally:
            self.done = True


def _parsed(line: bytes) -> Json:
    """Parse a line of a history; empty if it is incomplete."""
    try:
        return json.loads(line)
    except ValueError:
        return {}
