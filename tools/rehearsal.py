"""A class rehearsed on this machine: `make rehearsal ARGS="--learners 1 8"`.

Starts the hub as TEACHING.md says, with learners who begin at the same moment: each has a server of their own, opens
lab 01 and runs it cell after cell without a pause, as no class does. Their browsers are left out, since those run on other
machines. What it took is written into data/recorded/classroom.csv, from which the guide's table is made.
"""

import argparse
import asyncio
import csv
import json
import os
import secrets
import statistics
import subprocess
import sys
import tempfile
import time
import uuid
from pathlib import Path

import nbformat
import psutil
from table import write_rows
from tornado.httpclient import AsyncHTTPClient, HTTPRequest
from tornado.websocket import websocket_connect

from labsupport.ground.budget import MIB, machine_memory
from labsupport.lesson.claims import VERDICT_MIME

ROOT = Path(__file__).resolve().parents[1]
LAB = ROOT / "labs" / "01_image_stacking.ipynb"
TABLE = ROOT / "data" / "recorded" / "classroom.csv"
COLUMNS = (
    "learners cores memory_gib seconds_median seconds_last mib_of_one mib_together kernels_lost verdicts_wrong".split()
)
ADDRESS = "http://127.0.0.1:8765"
PATIENCE = 1800  # seconds for a server to start, and for one cell; far beyond what a line of thirty takes
CONFIG = """
load_subconfig({hub!r})
c.JupyterHub.hub_port, c.ConfigurableHTTPProxy.api_url = 8766, "http://127.0.0.1:8767"
c.JupyterHub.services = [{{"name": "rehearsal", "api_token": {token!r}}}]
c.JupyterHub.load_roles = [{{"name": "all", "scopes": ["admin:users", "admin:servers", "access:servers"], "services": ["rehearsal"]}}]
"""


class Class:
    """The learners of one rehearsal, by their names, and the hub's answers to them."""

    def __init__(self, token):
        self._headers = {"Authorization": f"token {token}"}

    async def ask(self, method, *path, **body):
        """What the hub, or a learner's server, answers. Raises tornado.httpclient.HTTPError."""
        request = HTTPRequest(
            "/".join((ADDRESS, *path)),
            method,
            self._headers,
            json.dumps(body) if method == "POST" else None,
            request_timeout=PATIENCE,
        )
        answer = await AsyncHTTPClient().fetch(request)
        return json.loads(answer.body or "null")

    async def work(self, name):
        """(seconds, wrong verdicts or None where the kernel was lost) of a learner from login to the last cell."""
        begin = time.monotonic()
        await self.ask("POST", "hub/api/users", name, "server")
        while not (await self.ask("GET", "hub/api/users", name))["servers"].get("", {}).get("ready"):
            if time.monotonic() - begin > PATIENCE:
                raise TimeoutError(f"{name}'s server does not start")
            await asyncio.sleep(1)
        kernel = await self.ask("POST", "user", name, "api/kernels", name="python3", path="course/labs")
        place = f"{ADDRESS.replace('http', 'ws', 1)}/user/{name}/api/kernels/{kernel['id']}/channels"
        channel = await websocket_connect(HTTPRequest(place, headers=self._headers))
        wrong = 0
        for cell in nbformat.read(LAB, as_version=4).cells:
            if cell.cell_type == "code":
                outputs = await self._run(channel, cell.source)
                if outputs is None:
                    return time.monotonic() - begin, None
                wrong += _verdicts(outputs) != _verdicts(cell.outputs)
        channel.close()
        return time.monotonic() - begin, wrong

    async def _run(self, channel, source):
        """The outputs of a cell; None where the kernel is gone."""
        header = {"msg_id": uuid.uuid4().hex, "msg_type": "execute_request", "version": "5.3"}
        header |= dict.fromkeys(("username", "session", "date"), "")
        content = {"code": source, "silent": False, "store_history": True, "allow_stdin": False}
        message = {"header": header, "parent_header": {}, "metadata": {}, "content": content, "channel": "shell"}
        await channel.write_message(json.dumps(message))
        outputs = []
        while text := await asyncio.wait_for(channel.read_message(), PATIENCE):
            if isinstance(text, bytes):  # a widget's buffers
                continue
            said = json.loads(text)
            state = said["content"].get("execution_state")
            if state in ("restarting", "dead"):
                return None
            if said["parent_header"].get("msg_id") != header["msg_id"]:
                continue
            if said["msg_type"] in ("display_data", "execute_result"):
                outputs.append(said["content"])
            if state == "idle":
                return outputs
        return None


def _verdicts(outputs):
    data = [output.get("data", {}) for output in outputs]
    return [(facts[VERDICT_MIME]["id"], facts[VERDICT_MIME]["verdict"]) for facts in data if VERDICT_MIME in facts]


def _memory_of_each():
    """{learner: bytes}, shared pages divided among those that share them, of all processes of each learner's server."""
    found = {}
    for process in psutil.process_iter():
        try:
            name = process.environ().get("JUPYTERHUB_USER")
            if name:
                found[name] = found.get(name, 0) + process.memory_full_info().pss
        except psutil.Error:
            continue
    return found


async def _watch(peaks):
    """Note the most of one learner and of all together, until cancelled."""
    while True:
        of_each = await asyncio.to_thread(_memory_of_each)
        peaks["one"] = max([peaks["one"], *of_each.values()])
        peaks["together"] = max(peaks["together"], sum(of_each.values()))
        await asyncio.sleep(2)


async def _work_together(token, names):
    """([(seconds, wrong verdicts or None)], peaks in bytes) of learners who begin at the same moment."""
    peaks, room = {"one": 0, "together": 0}, Class(token)
    watching = asyncio.create_task(_watch(peaks))
    try:
        return await asyncio.gather(*(room.work(name) for name in names)), peaks
    finally:
        watching.cancel()


def rehearse(count):
    """A row of the table."""
    names, token = [f"learner{number}" for number in range(1, count + 1)], secrets.token_hex(16)
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "learners.txt").write_text("\n".join(names))
        config = Path(folder) / "config.py"
        config.write_text(CONFIG.format(hub=str(ROOT / "tools" / "classroom" / "jupyterhub_config.py"), token=token))
        wanted = {"CLASSROOM_SPAWNER": "local", "CLASSROOM_FOLDER": folder, "CLASSROOM_ADDRESS": ADDRESS}
        log = Path(folder) / "log"
        with log.open("w") as stream:
            command = [sys.executable, "-m", "jupyterhub", "-f", str(config)]
            hub = subprocess.Popen(command, cwd=folder, env={**os.environ, **wanted}, stdout=stream, stderr=stream)
        try:
            while "JupyterHub is now running" not in log.read_text():
                if hub.poll() is not None:
                    sys.exit(log.read_text())
                time.sleep(0.5)
            ends, peaks = asyncio.run(_work_together(token, names))
        finally:
            hub.terminate()
            hub.wait()
    seconds = [took for took, _ in ends]
    return {
        "learners": count,
        "cores": os.cpu_count(),
        "memory_gib": round(machine_memory() / 2**30),
        "seconds_median": round(statistics.median(seconds)),
        "seconds_last": round(max(seconds)),
        "mib_of_one": round(peaks["one"] / MIB),
        "mib_together": round(peaks["together"] / MIB),
        "kernels_lost": sum(wrong is None for _, wrong in ends),
        "verdicts_wrong": sum(wrong or 0 for _, wrong in ends),
    }


def table():
    """The recorded rows as Markdown, for the guide."""
    rows = [
        "| learners at once | one of them, median | the last | memory of one, at most | of all together |",
        "|---|---|---|---|---|",
    ]
    with TABLE.open() as file:
        for row in csv.DictReader(file):
            rows.append(
                f"| {row['learners']} | {int(row['seconds_median']):,} s | {int(row['seconds_last']):,} s | "
                f"{int(row['mib_of_one']):,} MiB | {int(row['mib_together']):,} MiB |"
            )
    count, lost, wrong = (int(row[name]) for name in ("learners", "kernels_lost", "verdicts_wrong"))
    return "\n".join(
        [
            *rows,
            "",
            f"{row['cores']} cores, {row['memory_gib']} GiB; kernels lost: {lost}, other verdicts than in the committed lab: {wrong}. "
            f"With {count} that is {int(row['mib_together']) / count:,.0f} MiB for each, and {int(row['seconds_last']) / count:.0f} s of waiting "
            "for whoever comes last: arms stand in line for the cores.",
        ]
    )


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--learners", nargs="+", type=int, default=[1, 2, 4, 8], metavar="N")
    options = parser.parse_args()
    rows = []
    for count in options.learners:
        rows.append(rehearse(count))
        print(rows[-1], flush=True)
    write_rows(TABLE, COLUMNS, rows)


if __name__ == "__main__":
    main()
