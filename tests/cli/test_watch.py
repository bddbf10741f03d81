"""`simfbo watch`: what it says, and mistakes. The server is tested in tests/runs/test_watch.py."""

import signal
import socket

import pytest

from simfbo.runs.watch import Watcher


@pytest.fixture
def no_waiting(monkeypatch):
    monkeypatch.setattr(Watcher, "serve_forever", lambda server: None)


def test_where_the_page_is(simfbo, no_waiting):
    code, out, err = simfbo("watch", ".", "--port", "0")
    assert (code, err) == (0, "")
    assert out.startswith("Watching . at http://127.0.0.1:")


def test_a_server_that_others_can_reach_says_so(simfbo, no_waiting):
    code, out, err = simfbo("watch", ".", "--port", "0", "--host", "0.0.0.0")
    assert (code, out[:26]) == (0, "Watching . at http://0.0.0")
    assert err.startswith("simfbo: anyone who can reach port ")


def test_open(simfbo, no_waiting, monkeypatch):
    opened = []
    monkeypatch.setattr("webbrowser.open", opened.append)
    simfbo("watch", ".", "--port", "0", "--open")
    assert [url[:17] for url in opened] == ["http://127.0.0.1:"]


def test_mistakes(simfbo):
    code, _, err = simfbo("watch", "nothing")
    sentence = "nothing is not a folder: pass the folder of a run, or one above it."
    assert (code, err) == (2, f"simfbo: {sentence}\n")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        code, _, err = simfbo("watch", ".", "--port", str(port))
    assert (code, err.count("\n")) == (2, 1)
    assert err.startswith(f"simfbo: Cannot listen on port {port} of 127.0.0.1 (Address already in")


def test_the_command_needs_no_jax_and_ends_quietly(start):
    """It starts at once, and Ctrl-C is how it is meant to end."""
    process = start("""
import sys
sys.modules["jax"] = sys.modules["numpy"] = sys.modules["matplotlib"] = None
from simfbo.cli.main import main
sys.exit(main(["watch", ".", "--port", "0"]))
""")
    assert process.stdout.readline().startswith("Watching . at http://127.0.0.1:")
    process.send_signal(signal.SIGINT)
    assert (*process.outcome(), process.returncode) == ("", "", 0)
