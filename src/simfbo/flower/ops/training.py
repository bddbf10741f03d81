"""`simfbo flower run`: a run on the federation, followed to its end and gone on with if need be."""

import argparse
import json
import re
import subprocess
import threading
import time
import tomllib
from datetime import datetime
from pathlib import Path
from typing import Any

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from simfbo.config.messages import plain
from simfbo.errors import UserError
from simfbo.flower.ops.control import OUT, flwr, running
from simfbo.flower.ops.folder import CONNECTION, Layout, environment
from simfbo.runs.history import FILE

_PATIENCE = 120.0  # seconds for a SuperLink to come back
_COUNTS = {"kind", "round", "communication_rounds", "floats_down", "floats_up", "bytes_down",
           "bytes_up", "refused", "seconds", "cpu_seconds", "projected"}  # fmt: skip


def run(options: argparse.Namespace) -> int:
    """Train with an app; say where the results are."""
    layout = Layout(options.folder.resolve())
    if not layout.read_setup().link:
        raise UserError("The SuperLink is on another machine: start runs there.")
    if running(layout) is None:
        raise UserError("The federation is down: start it with 'simfbo flower up'.")
    app, config = _checked_app(options.app)
    folder = _folder(options, app)
    settings = _settings(options, config, folder)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "run.toml").write_text(_toml({**settings, "folder": str(folder)}))
    except OSError as error:
        raise UserError(f"{folder} cannot be a run's folder: {error}.") from None
    if (_end(folder) or {}).get("status") == "finished":
        OUT.print(f"The run in {folder} has finished already.")
        return 0
    end = _follow(layout, app, folder)
    for _ in range(options.retries):
        if end is not None:
            break
        OUT.print("The server's process is gone; going on from the last checkpoint.")
        end = _follow(layout, app, folder)
    return _say_end(folder, end)


def _checked_app(app: Path) -> tuple[Path, dict[str, Any]]:
    """Return an app's folder and settings, after a look whether it is one that takes a `folder`."""
    file = app / "pyproject.toml"
    try:
        config = tomllib.loads(file.read_text())["tool"]["flwr"]["app"]["config"]
    except (OSError, KeyError, TypeError, ValueError):
        raise UserError(
            f"{app} is no Flower app: it needs a pyproject.toml with [tool.flwr.app.config], as "
            "examples/flower_app has."
        ) from None
    if "folder" not in config:
        raise UserError(f'{file} must have folder = "" under [tool.flwr.app.config].')
    return app.resolve(), config


def _settings(options: argparse.Namespace, config: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Return the settings that differ from the app's: those of the run resumed, and those given."""
    found: dict[str, Any] = {}
    if options.resume is not None:
        begun = _Book(folder / FILE).header or {}
        found = {key: value for key, value in begun.get("config", {}).items() if key in config}
    for text in options.set:
        key, equals, value = text.partition("=")
        if key not in config or key == "folder" or not equals:
            known = ", ".join(sorted(config.keys() - {"folder"}))
            raise UserError(f"'{plain(text)}' sets nothing: write KEY=VALUE, KEY one of {known}.")
        found[key] = _value(key, value, config[key])
    return found


def _value(key: str, text: str, usual: Any) -> Any:
    """Return a setting's value, of the kind that the app's own has."""
    try:
        value = tomllib.loads(f"value = {text}")["value"]
    except ValueError:
        value = text
    if isinstance(usual, float) and type(value) is int:
        value = float(value)
    if isinstance(usual, str) and type(value) is not str:
        value = text
    if type(value) is not type(usual):
        raise UserError(f"'{key}' must be like {usual!r}, got '{plain(text)}'.")
    return value


def _toml(settings: dict[str, Any]) -> str:
    """Return settings as TOML; text is written as in JSON, which TOML reads alike."""
    return "".join(f"{key} = {json.dumps(value)}\n" for key, value in settings.items())


def _folder(options: argparse.Namespace, app: Path) -> Path:
    """Return the folder of the run, a new one unless it is to be resumed."""
    if options.resume is not None:
        if not (options.resume / FILE).is_file():
            raise UserError(
                f"There is no run in {options.resume}: leave --resume out to begin one."
            )
        return options.resume.resolve()
    default = Path("runs") / f"{app.name}-{datetime.now():%Y%m%d-%H%M%S}"
    folder = (options.output or default).resolve()
    if (folder / FILE).exists():
        raise UserError(f"{folder} has a run already: go on with it (--resume) or name another.")
    return folder


def _follow(layout: Layout, app: Path, folder: Path) -> dict[str, Any] | None:
    """Return how a run ended, after showing how it went; None if its process is gone."""
    book, run = _Book(folder / FILE), _start(layout, app, folder)
    log = _Log(layout, run, folder / "server.log")
    try:
        with _progress() as bar:
            total = None if book.header is None else book.header.get("rounds")
            task = bar.add_task("waiting for the nodes", total=total)
            while not log.done or not _is_over(layout, run):
                if log.done:  # the SuperLink died, but not the run
                    log = _Log(layout, run, folder / "server.log")
                _show(bar, task, book.news())
                time.sleep(0.2)
            _show(bar, task, book.news())
    except KeyboardInterrupt:
        flwr(layout, "stop", run, CONNECTION)
        raise KeyboardInterrupt(
            f"interrupted; go on with: simfbo flower run {app} --resume {folder}"
        ) from None
    finally:
        log.stop()
    end = _end(folder)
    if end is None and log.reason is not None:
        raise UserError(f"The run stopped: {log.reason} (all of it in {folder / 'server.log'}).")
    return end


def _end(folder: Path) -> dict[str, Any] | None:
    """Return the last line of a history, if it says how the run ended."""
    file = folder / FILE
    lines = file.read_bytes().splitlines() if file.is_file() else []
    last = _parsed(lines[-1]) if lines else {}
    return last if last.get("kind") == "end" else None


def _parsed(line: bytes) -> dict[str, Any]:
    """Return a line of a history; nothing where it is cut."""
    try:
        return json.loads(line)
    except ValueError:
        return {}


def _start(layout: Layout, app: Path, folder: Path) -> str:
    """Return the number of a run, begun."""
    words = ["run", str(app), CONNECTION, "--format", "json"]
    answer = flwr(layout, *words, "--run-config", str(folder / "run.toml"))
    try:
        return str(json.loads(answer.stdout[answer.stdout.index("{") :])["run-id"])
    except (ValueError, KeyError):
        said = re.sub(r"[╭╮╰╯│─]|\s", " ", answer.stdout + answer.stderr)
        raise UserError(f"Flower did not take the run: {' '.join(said.split())[-400:]}") from None


def _is_over(layout: Layout, run: str) -> bool:
    """Return whether a run is over, as soon as the SuperLink can be asked."""
    deadline = time.monotonic() + _PATIENCE
    while time.monotonic() < deadline:
        answer = flwr(layout, "list", CONNECTION, "--run-id", run, "--format", "json")
        try:
            return str(json.loads(answer.stdout)["runs"][0]["status"]).startswith("finished")
        except (ValueError, KeyError, IndexError):
            time.sleep(1)
    raise UserError("The SuperLink does not answer any more: see 'simfbo flower status'.")


class _Log:
    """What a run's server says, written to a file as it comes."""

    def __init__(self, layout: Layout, run: str, file: Path) -> None:
        self.reason: str | None = None
        self.done = False
        self._file = file
        self._job = subprocess.Popen(
            ["flwr", "log", run, CONNECTION, "--stream"],
            env=environment(layout),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            start_new_session=True,
        )
        threading.Thread(target=self._read, daemon=True).start()

    def stop(self) -> None:
        """Listen no more."""
        self._job.kill()

    def _read(self) -> None:
        assert self._job.stdout is not None
        try:
            with open(self._file, "w", errors="replace") as out:  # it is told from its beginning
                for line in self._job.stdout:
                    out.write(line)
                    out.flush()
                    if found := re.match(r"(?:[\w.]+\.)?\w*(?:Error|Exception): (.*)", line):
                        self.reason = found[1].strip().rstrip(".")
        finally:
            self.stop()
            self._job.wait()
            self.done = True


class _Book:
    """A history as it grows."""

    def __init__(self, file: Path) -> None:
        self._file, self._read = file, file.stat().st_size if file.is_file() else 0
        self.header: dict[str, Any] | None = self._first()

    def _first(self) -> dict[str, Any] | None:
        """Return the header, where there is a history."""
        if not self._file.is_file():
            return None
        with open(self._file, "rb") as book:
            line = book.readline()
        return _parsed(line) or None

    def news(self) -> list[dict[str, Any]]:
        """Return the lines that were added since last time."""
        if not self._file.is_file():
            return []
        with open(self._file, "rb") as book:
            if book.seek(0, 2) < self._read:
                self._read = book.tell()  # a resumed run has cut off what it does again
            book.seek(self._read)
            text = book.read()
        whole = text[: text.rfind(b"\n") + 1]
        self._read += len(whole)
        return [line for line in map(_parsed, whole.splitlines()) if line]


def _progress() -> Progress:
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        console=OUT,
    )


def _show(bar: Progress, task: Any, lines: list[dict[str, Any]]) -> None:
    """Show news of a run: metrics beside the bar, and who did not count."""
    for line in lines:
        if line["kind"] == "header":
            bar.update(task, total=line["rounds"], description="round 0")
        elif line["kind"] == "record":
            shown = ", ".join(f"{k} {v:.4g}" for k, v in line.items() if _is_metric(k, v))
            bar.update(task, completed=line["round"], description=shown or "training")
        elif line["kind"] == "refusal":
            bar.console.print(f"round {line['round']}: client {line['client']} {line['reason']}")


def _is_metric(name: str, value: Any) -> bool:
    return name not in _COUNTS and isinstance(value, int | float)


def _say_end(folder: Path, end: dict[str, Any] | None) -> int:
    """Return the exit code, after saying how it ended."""
    if end is None:
        OUT.print(f"The run was cut off; go on with --resume {folder}.")
        return 1
    if end["status"] != "finished":
        OUT.print(f"The run ended as {end['status']}: {end.get('reason', 'it does not say why')}.")
        OUT.print(f"Its history is in {folder}; go on with --resume {folder}.")
        return 1
    OUT.print(f"Finished: history and checkpoints in {folder}; draw it: simfbo report {folder}")
    return 0
