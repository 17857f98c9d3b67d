"""`attngap serve` refuses what would surprise, in one line."""

import json
import os
import signal
import socket
import subprocess
import sys
import urllib.request

import pytest
from typer.testing import CliRunner

from attngap.cli.app import app
from attngap.cli.serve import listen
from attngap.errors import AttngapError

run = CliRunner().invoke


def test_a_port_in_use_is_one_line():
    with listen("127.0.0.1", 0) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(AttngapError, match=rf"^Port {port} is in use\. Choose another: attngap serve --port"):
            run(app, ["serve", "--port", str(port)], catch_exceptions=False)


def test_other_hosts_need_to_be_asked_for():
    with pytest.raises(AttngapError, match=r"--host 0\.0\.0\.0 would let other machines .* Add --allow-remote"):
        run(app, ["serve", "--host", "0.0.0.0"], catch_exceptions=False)


def test_a_folder_that_is_not_there(tmp_path):
    with pytest.raises(AttngapError, match=r"nothing' is not a folder\. Give folders that hold results"):
        run(app, ["serve", str(tmp_path / "nothing")], catch_exceptions=False)


def test_it_serves_this_machine_until_stopped(tmp_path):
    command = [
        sys.executable,
        "-c",
        "from attngap.cli import main; main()",
        "serve",
        str(tmp_path),
        "--port",
        "0",
        "--json",
    ]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as server:
        url = json.loads(server.stdout.readline())["url"]
        with urllib.request.urlopen(url, timeout=30) as page:
            assert b"<h1>Explorer</h1>" in page.read()
        assert socket.gethostbyname("localhost") == "127.0.0.1"
        os.kill(server.pid, signal.SIGINT)
        assert server.wait(timeout=20) in (0, 130)
        assert "Traceback" not in server.stderr.read()
