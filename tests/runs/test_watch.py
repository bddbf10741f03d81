"""Watching runs: what the server answers, to whom, and what becomes of changed files."""

import http.client
import json
import os
import threading
import time
import tracemalloc
from pathlib import Path

import pytest

from simfbo.errors import UserError
from simfbo.runs import news as module
from simfbo.runs.lines import as_line
from simfbo.runs.news import find_runs, news
from simfbo.runs.watch import Watcher

HOSTILE = "<img src=x onerror=alert(1)>"


def header(algorithm="SimFBO", seed=0, **task):
    config = {"task": {"name": "quadratic", **task}, "algorithm": {"name": algorithm.lower()}}
    return {"algorithm": algorithm, "rounds": 100, "seed": seed, "config": config}


def record(t, value=0.5):
    return {"round": t, "communication_rounds": t, "bytes_up": 8 * t, "bytes_down": 8 * t,
            "seconds": 0.1 * t, "loss": value}  # fmt: skip


def write(folder, *records, head=None):
    """Start a history with some records; return its file."""
    folder.mkdir(parents=True)
    file = folder / "history.jsonl"
    file.write_bytes(as_line("header", head or header()))
    append(file, *records)
    return file


def append(file, *records):
    with file.open("ab") as out:
        out.write(b"".join(as_line("record", one) for one in records))


class Reader:
    """A page: remembers where it was, and what it has seen."""

    def __init__(self, *roots):
        self.roots, self.seen, self.lines, self.resets = roots, {}, {}, 0

    def ask(self):
        answer = json.loads(json.dumps(news(self.roots, self.seen), allow_nan=False))
        self.seen = {}
        for run in answer["runs"]:
            if run["reset"]:
                self.resets += run["id"] in self.lines
                self.lines[run["id"]] = []
            self.lines[run["id"]] += run["lines"]
            self.seen[run["id"]] = {"at": run["at"], "mark": run["mark"],
                                    "log": run.get("log", {}).get("stamp")}  # fmt: skip
        return answer

    def rounds(self, run):
        return [line["round"] for line in self.lines[str(run)] if line["kind"] == "record"]


def test_each_line_is_sent_once(tmp_path):
    file = write(tmp_path / "a", record(0))
    reader = Reader(tmp_path)
    (run,) = reader.ask()["runs"]
    assert (run["id"], run["reset"], run["more"]) == (str(tmp_path / "a"), True, False)
    assert [line["kind"] for line in run["lines"]] == ["header", "record"]
    (run,) = reader.ask()["runs"]
    assert (run["lines"], run["reset"]) == ([], False)
    append(file, record(1), record(2))
    (run,) = reader.ask()["runs"]
    assert [line["round"] for line in run["lines"]] == [1, 2]
    assert reader.resets == 0


def test_an_incomplete_line_waits_for_its_end(tmp_path):
    file = write(tmp_path / "a", record(0))
    line = as_line("record", record(1))
    reader = Reader(tmp_path)
    for part in (line[:20], line[20:-1]):
        with file.open("ab") as out:
            out.write(part)
        reader.ask()
        assert reader.rounds(tmp_path / "a") == [0]
    with file.open("ab") as out:
        out.write(line[-1:])
    reader.ask()
    assert reader.rounds(tmp_path / "a") == [0, 1]


@pytest.mark.parametrize("again", [1, 2, 5], ids=["shorter", "as long", "longer"])
def test_a_history_that_was_cut_is_read_again(tmp_path, again):
    """A resumed run cuts its history, and writes other lines in the place of those cut off."""
    file = write(tmp_path / "a", *map(record, range(3)))
    reader = Reader(tmp_path)
    reader.ask()
    file.write_bytes(b"".join(file.read_bytes().splitlines(keepends=True)[:2]))
    append(file, *(record(t, 0.7) for t in range(1, 1 + again)))
    reader.ask()
    assert (reader.resets, reader.rounds(tmp_path / "a")) == (1, list(range(1 + again)))
    assert reader.lines[str(tmp_path / "a")][-1]["loss"] == 0.7


def test_every_cut_of_a_history_leads_to_the_same_lines(tmp_path):
    """Whatever a reader has seen before, it ends with what is in the file."""
    file = write(tmp_path / "a", *map(record, range(6)))
    whole = file.read_bytes()
    ends = [i + 1 for i, byte in enumerate(whole) if byte == ord("\n")]
    for first in ends:
        for kept in ends:
            file.write_bytes(whole[:first])
            reader = Reader(tmp_path)
            reader.ask()
            file.write_bytes(
                whole[:kept] + b"".join(as_line("record", record(t, 9)) for t in (7, 8))
            )
            reader.ask()
            lines = [line for line in module.read_lines(file.read_bytes()).whole]
            assert reader.lines[str(tmp_path / "a")] == lines


def test_damaged_lines_are_left_out_and_counted(tmp_path):
    file = write(tmp_path / "a", record(0))
    reader = Reader(tmp_path)
    reader.ask()
    lines = [as_line("record", record(t)) for t in (1, 2, 3)]
    bare = json.dumps({"kind": "record", **record(4)}).encode() + b"\n"
    with file.open("ab") as out:
        out.write(lines[0] + lines[1].replace(b"0.5", b"0.6") + b"\0\xff\n" + lines[2] + bare)
    (run,) = reader.ask()["runs"]
    assert run["damaged"] == 3  # a line without a checksum too, where others have one
    assert reader.rounds(tmp_path / "a") == [0, 1, 3]


def test_numbers_that_json_does_not_have_and_deep_nesting(tmp_path):
    file = write(tmp_path / "a")
    file.write_bytes(b'{"kind": "header", "algorithm": "a"}\n'
                     b'{"kind": "record", "round": 1, "loss": NaN}\n'
                     b'{"kind": "record", "x": ' + b"[" * 900 + b"]" * 900 + b"}\n")  # fmt: skip
    (run,) = Reader(tmp_path).ask()["runs"]
    assert run["lines"][1] == {"kind": "record", "round": 1, "loss": None}


def test_answers_are_bounded(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "_CHUNK", 2000)
    monkeypatch.setattr(module, "_RESPONSE", 3000)
    for name in "abc":
        write(tmp_path / name, *map(record, range(50)))
    reader, answers = Reader(tmp_path), [None]
    while answers[-1] is None or any(run["more"] for run in answers[-1]["runs"]):
        answers.append(reader.ask())
        assert sum(len(json.dumps(run["lines"])) for run in answers[-1]["runs"]) < 4000
    assert len(answers) > 5
    for name in "abc":
        assert reader.rounds(tmp_path / name) == list(range(50))


def test_a_line_longer_than_an_answer_is_skipped(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "_CHUNK", 2000)
    file = write(tmp_path / "a", record(0))
    with file.open("ab") as out:
        out.write(b"x" * 9000 + b"\n")
    append(file, record(1))
    reader = Reader(tmp_path)
    for _ in range(9):
        reader.ask()
    assert reader.rounds(tmp_path / "a") == [0, 1]


def test_new_runs_appear_and_removed_ones_go(tmp_path):
    reader = Reader(tmp_path)
    assert reader.ask()["runs"] == []
    for name in ("b-seed10", "b-seed2", "a-seed10"):
        write(tmp_path / "study" / name, head=header(name[0], int(name[6:])))
    names = [run["name"] for run in reader.ask()["runs"]]
    assert names == ["a, seed 10", "b, seed 2", "b, seed 10"]
    (tmp_path / "study" / "b-seed10" / "history.jsonl").unlink()
    (tmp_path / "study" / "a-seed10" / "history.jsonl").unlink()
    assert [run["name"] for run in reader.ask()["runs"]] == ["b"]


def test_which_folders_are_looked_at(tmp_path):
    write(tmp_path / "runs" / "a")
    write(tmp_path / "runs" / "a" / "inside")
    write(tmp_path / "runs" / ".hidden")
    write(tmp_path / "runs" / Path(*"bcdefg"))
    found = find_runs([tmp_path / "runs", tmp_path / "runs" / "a"])
    assert [run.folder for run in found] == [tmp_path / "runs" / "a"]
    with pytest.raises(UserError, match="is not a folder: pass the folder of a run"):
        find_runs([tmp_path / "nothing"])


def test_links_and_pipes_are_not_followed(tmp_path):
    outside = write(tmp_path / "outside", record(0))
    runs = tmp_path / "runs"
    (runs / "b").mkdir(parents=True)
    (runs / "a").symlink_to(outside.parent)
    (runs / "b" / "history.jsonl").symlink_to(outside)
    own = write(runs / "c", record(0)).parent
    (tmp_path / "secret").write_text("secret")
    (own / "server.log").symlink_to(tmp_path / "secret")
    (runs / "d").mkdir()
    os.mkfifo(runs / "d" / "history.jsonl")  # opening it would wait for ever
    answer = Reader(runs).ask()
    assert [run["id"] for run in answer["runs"] if run["lines"]] == [str(own)]
    assert "secret" not in json.dumps(answer["runs"])


def test_what_is_no_history_has_no_lines(tmp_path):
    folder = tmp_path / "a"
    folder.mkdir()
    (folder / "history.jsonl").write_text("not\na\nhistory\n")
    (run,) = Reader(tmp_path).ask()["runs"]
    assert (run["lines"], run["damaged"]) == ([], 3)


def test_progress_between_evaluations_is_that_of_checkpoints(tmp_path):
    folder = write(tmp_path / "a", record(0)).parent
    (run,) = Reader(tmp_path).ask()["runs"]
    assert run["checkpoint"] == -1
    old = time.time() - 1000
    os.utime(folder / "history.jsonl", (old, old))
    assert Reader(tmp_path).ask()["runs"][0]["idle"] > 900
    for t in (40, 70):
        (folder / f"checkpoint-{t:010}.npz").touch()
    (run,) = Reader(tmp_path).ask()["runs"]
    assert run["checkpoint"] == 70
    assert run["idle"] < 900


def test_the_log_of_a_server_is_sent_when_it_changes(tmp_path):
    log = write(tmp_path / "a", record(0)).parent / "server.log"
    log.write_bytes(b"x" * 20_000 + b"\xff end")
    reader = Reader(tmp_path)
    text = reader.ask()["runs"][0]["log"]["text"]
    assert (len(text), text[-5:]) == (16_000, "� end")
    assert "log" not in reader.ask()["runs"][0]
    log.write_text("\x1b[92mINFO \x1b[0m: again")
    reader.seen[str(tmp_path / "a")]["log"] = "another"
    assert reader.ask()["runs"][0]["log"]["text"] == "INFO : again"


def test_many_runs(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "_RUNS", 2)
    for i, name in enumerate("abc"):
        file = write(tmp_path / name)
        os.utime(file, (i, i))
    answer = Reader(tmp_path).ask()
    assert [run["id"] for run in answer["runs"]] == [str(tmp_path / "b"), str(tmp_path / "c")]
    assert answer["hidden"] == 1


def test_runs_alike_are_told_apart_by_their_folders(tmp_path):
    for name in "ab":
        write(tmp_path / name, head=header(HOSTILE))
    names = [run["name"] for run in Reader(tmp_path).ask()["runs"]]
    assert names == [f"{HOSTILE} ({tmp_path / name})" for name in "ab"]


# The server


@pytest.fixture
def server(tmp_path):
    write(tmp_path / "a", record(0))
    with Watcher([tmp_path], port=0) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        yield server
        server.shutdown()
        thread.join()


JSON = {"Content-Type": "application/json"}


def send(server, method, path, body=None, headers=()):
    connection = http.client.HTTPConnection("127.0.0.1", server.server_port, timeout=30)
    try:
        connection.request(method, path, body, dict(headers))
        answer = connection.getresponse()
        return answer.status, answer.read().decode(), answer.headers
    finally:
        connection.close()


def test_two_requests_and_no_others(server):
    status, page, headers = send(server, "GET", "/")
    assert (status, page[:15]) == (200, "<!doctype html>")
    assert headers["Content-Security-Policy"] == "frame-ancestors 'none'"
    status, text, _ = send(server, "POST", "/lines", "{}", JSON)
    assert status == 200
    assert [line["kind"] for line in json.loads(text)["runs"][0]["lines"]] == ["header", "record"]
    for request in ("GET /lines", "GET /../etc/passwd", "GET /history.jsonl", "POST /",
                    "PUT /lines", "DELETE /"):  # fmt: skip
        assert send(server, *request.split())[0] in (404, 501)


@pytest.mark.parametrize(
    ("body", "headers"),
    [
        ("{", JSON),
        ("[]", JSON),
        ("[" * 100_000, JSON),
        ("{}", {"Content-Type": "text/plain"}),
        ("{}", {**JSON, "Content-Length": "99999999"}),
        ("{}", {**JSON, "Content-Length": "-5"}),
        ("{}", {**JSON, "Content-Length": "many"}),
    ],
)
def test_bad_requests(server, body, headers):
    assert send(server, "POST", "/lines", body, headers)[0] == 400


NONSENSE = (1, None, [], {"at": -1}, {"at": "x"}, {"at": 1e9, "mark": {}},
            {"at": 10**30, "mark": "0"}, {"at": True, "log": []})  # fmt: skip


@pytest.mark.parametrize("seen", NONSENSE)
def test_a_reader_that_claims_nonsense_starts_anew(server, tmp_path, seen):
    body = json.dumps({str(tmp_path / "a"): seen})
    status, text, _ = send(server, "POST", "/lines", body, JSON)
    assert (status, len(json.loads(text)["runs"][0]["lines"])) == (200, 2)


@pytest.mark.parametrize(
    ("host", "origin", "status"),
    [
        ("127.0.0.1:{port}", None, 200),
        ("127.0.0.1:{port}", "http://127.0.0.1:{port}", 200),
        ("localhost", "http://localhost", 200),
        ("localhost:9", "http://localhost:9", 200),  # through a tunnel
        ("[::1]:{port}", None, 200),
        ("evil.example", None, 403),
        ("evil.example:{port}", "http://evil.example:{port}", 403),
        ("127.0.0.1.evil.example", None, 403),
        ("192.168.0.7:{port}", None, 403),
        ("", None, 403),
        ("127.0.0.1:{port}", "http://evil.example", 403),
        ("127.0.0.1:{port}", "null", 403),
        ("127.0.0.1:{port}", "https://127.0.0.1:{port}", 403),
    ],
)
def test_strangers_pages_are_refused(server, host, origin, status):
    headers = {**JSON, "Host": host.format(port=server.server_port)}
    if origin is not None:
        headers["Origin"] = origin.format(port=server.server_port)
    assert send(server, "POST", "/lines", "{}", headers)[0] == status
    assert send(server, "GET", "/", None, headers)[0] == status


def test_a_server_on_all_addresses_goes_by_each_but_by_no_name(tmp_path):
    with Watcher([tmp_path], "0.0.0.0", 0) as server:
        assert server.accepts("192.168.0.7:8420", "http://192.168.0.7:8420")
        assert not server.accepts("evil.example", None)


def test_where_it_listens(tmp_path):
    with Watcher([tmp_path], port=0) as server:
        assert server.socket.getsockname()[0] == "127.0.0.1"
        assert server.url == f"http://127.0.0.1:{server.server_port}/"
        with pytest.raises(
            UserError, match=r"^Cannot listen on port \d+ of 127\.0\.0\.1 \(Address"
        ):
            Watcher([tmp_path], port=server.server_port)
    for host, port in (("no.such.host.invalid", 0), ("127.0.0.1", 99_999)):
        with pytest.raises(UserError, match=f"^Cannot listen on port {port} of {host} "):
            Watcher([tmp_path], host, port)


def test_answering_keeps_nothing(tmp_path):
    """The memory of the server is flat: what it allocates for an answer is gone after it."""
    write(tmp_path / "a", *map(record, range(2000)))
    news([tmp_path], {})
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        for _ in range(5):
            news([tmp_path], {})
        assert tracemalloc.get_traced_memory()[0] - before < 50_000
    finally:
        tracemalloc.stop()
