"""Start to ready: a server is started again and again, with what earlier starts left on the disk.

    python bench/start.py [--device cuda] [--tune-seconds 20] [--compiled density+compiled] [--system si5]

In a folder that is empty at first: ``measuring``, the start at which the backends are measured; ``chosen``, one that
finds the choice; with ``--compiled``, one that finds a compiled way chosen (as if it had been measured to be the
fastest), ``compiling`` it and then ``compiled``, with inductor's code on the disk. Seconds from the start of the
process until ``/readyz`` says yes; one JSON line a figure.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path[0] = str(Path(__file__).resolve().parents[1])  # not this folder: its http.py would hide the library's

import argparse
import http.client
import json
import os
import re
import subprocess
import tempfile
import time
from typing import Any

from bench import systems


def start(options: argparse.Namespace, environment: dict[str, str]) -> dict[str, Any]:
    """Seconds until a server is ready, and what it evaluates with."""
    words = [
        *("-c", "from nepserve.cli import main; main()", "serve", f"m={systems.MODELS[options.system]}"),
        *("--port", "0", "--device", options.device, "--tune-seconds", f"{options.tune_seconds:g}"),
    ]
    begun = time.perf_counter()
    process = subprocess.Popen(
        [sys.executable, *words], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, env=environment
    )
    try:
        port = _port(process)
        while _get(port, "/readyz")[0] != 200:
            if time.perf_counter() - begun > options.patience or process.poll() is not None:
                sys.exit(f"the server was not ready within {options.patience:g} s")
            time.sleep(0.02)
        seconds = time.perf_counter() - begun
        (model,) = json.loads(_get(port, "/v1/models")[1])["models"]
        choice = model.get("choice", {})
        return {"seconds": round(seconds, 2), "backend": choice.get("backend"), "how": choice.get("how")}
    finally:
        process.terminate()
        process.wait(30)


def _port(process: subprocess.Popen[bytes]) -> int:
    assert process.stdout is not None
    for line in process.stdout:
        if found := re.search(rb"127\.0\.0\.1:(\d+)", line):
            os.set_blocking(process.stdout.fileno(), False)  # what is not read must not block the server
            return int(found[1])
    sys.exit(f"the server did not start (exit code {process.wait()})")


def _get(port: int, path: str) -> tuple[int, bytes]:
    link = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
    try:
        link.request("GET", path)
        answer = link.getresponse()
        return answer.status, answer.read()
    except OSError:
        return 0, b""
    finally:
        link.close()


def choose(folder: Path, name: str) -> None:
    """Write another choice into what the server keeps."""
    for path in folder.glob("backend-*.json"):
        kept = json.loads(path.read_text(encoding="utf-8"))
        kept["report"]["choice"] = dict.fromkeys(kept["report"]["choice"], name)
        path.write_text(json.dumps(kept), encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--system", default="si5", choices=tuple(systems.MODELS))
    parser.add_argument("--tune-seconds", type=float, default=20.0)
    parser.add_argument("--compiled", metavar="BACKEND")
    parser.add_argument("--patience", type=float, default=300.0, help="seconds until a start is given up")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "NEPSERVE_CACHE_DIR": folder}

        def say(what: str) -> None:
            print(json.dumps({"start": what, "system": options.system, **start(options, environment)}), flush=True)

        say("measuring")
        say("chosen")
        if options.compiled:
            choose(Path(folder), options.compiled)
            say("compiling")
            say("compiled")


if __name__ == "__main__":
    main()
