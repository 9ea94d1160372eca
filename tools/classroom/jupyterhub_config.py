"""JupyterHub for a class: a login, a copy of the course and a memory limit for every learner. TEACHING.md says how to start it.

Set in the environment:
    CLASSROOM_SPAWNER   systemd, docker or local: who enforces the limit, see below
    CLASSROOM_FOLDER    where learners.txt lies and the hub keeps its state (build/classroom)
    CLASSROOM_MEMORY    what one learner may use ("3 GiB")
    CLASSROOM_ADDRESS   where the hub listens (http://127.0.0.1:8000)
"""

import os
import shutil
import sys
from pathlib import Path

from labsupport.ground.budget import parse_size

c = get_config()  # noqa: F821  defined by JupyterHub

COURSE = Path(__file__).resolve().parents[2]
FOLDER = Path(os.environ.get("CLASSROOM_FOLDER", COURSE / "build" / "classroom")).resolve()
MEMORY = parse_size(os.environ.get("CLASSROOM_MEMORY", "3 GiB"))
SPAWNER = os.environ.get("CLASSROOM_SPAWNER", "")
if SPAWNER not in ("systemd", "docker", "local"):
    guide = "tools/classroom/TEACHING.md tells them apart"
    sys.exit(f"CLASSROOM_SPAWNER is {SPAWNER!r}: set it to systemd, docker or local ({guide})")

# Who may log in. Nobody else can, whatever the password.
LIST = FOLDER / "learners.txt"
names = LIST.read_text().split() if LIST.exists() else []
if not names:
    sys.exit(f"{LIST} is missing or empty: write one login name a line, the teacher's first")
c.Authenticator.allowed_users = set(names)
# Or whoever was taken off the list, and is in the hub's database, still could.
c.Authenticator.allow_existing_users = False
c.Authenticator.admin_users = {names[0]}  # may stop and start every learner's server

c.JupyterHub.bind_url = os.environ.get("CLASSROOM_ADDRESS", "http://127.0.0.1:8000")
c.JupyterHub.db_url = f"sqlite:///{FOLDER}/jupyterhub.sqlite"
c.JupyterHub.cookie_secret_file = str(FOLDER / "cookie_secret")
# The proxy from requirements.txt, in Python, in place of the Node program of the same name that JupyterHub looks for.
c.ConfigurableHTTPProxy.command = [str(Path(sys.executable).with_name("configurable-http-proxy"))]
c.ConfigurableHTTPProxy.pid_file = str(FOLDER / "proxy.pid")

c.Spawner.mem_limit = MEMORY  # also reaches the learner's server as MEM_LIMIT, which the budgets of the labs respect
# Arms of all learners wait for one another where cores or memory are taken. All may write here, each removes its own.
LINE = FOLDER / "line"
LINE.mkdir(exist_ok=True)
LINE.chmod(0o1777)
c.Spawner.environment = {"LABSUPPORT_LINE": str(LINE)}
c.Spawner.default_url = "/lab/tree/course/labs/start_here.ipynb"
# Thirty servers that start at once on a few cores take their time.
c.Spawner.start_timeout = c.Spawner.http_timeout = 120
server = [
    "/usr/bin/env",
    f"PYTHON={sys.executable}",
    "/bin/sh",
    str(COURSE / "tools" / "classroom" / "start.sh"),
    sys.executable,
    "-m",
    "jupyterhub.singleuser",
]

if SPAWNER == "systemd":
    # A control group for each learner, which limits the sum of all their processes. Needs root, and a Linux account
    # for each learner: its password is the login, its home keeps the copy of the course and the ledger.
    c.JupyterHub.authenticator_class = "pam"
    c.JupyterHub.spawner_class = "systemd"
    c.SystemdSpawner.isolate_tmp = True
    c.SystemdSpawner.disable_user_sudo = True
    c.Spawner.cmd = server
else:
    # Learners choose their password at their first login.
    c.JupyterHub.authenticator_class = "firstuse"
    c.FirstUseAuthenticator.dbm_path = str(FOLDER / "passwords.dbm")

if SPAWNER == "docker":
    # A container for each learner, from the Dockerfile beside this file; its home is a volume that outlives it.
    c.JupyterHub.spawner_class = "docker"
    c.DockerSpawner.image = "tensorflow-memory-labs"
    c.DockerSpawner.remove = True
    c.DockerSpawner.volumes = {"classroom-{username}": "/srv/learner", str(LINE): str(LINE)}
    # The host as containers on Docker's own bridge see it; no address of the outside.
    c.JupyterHub.hub_ip = "172.17.0.1"
    c.Spawner.cmd = ["python", "-m", "jupyterhub.singleuser"]  # the image's entry point is start.sh

if SPAWNER == "local":
    # For trying it out on one Linux machine without root. RLIMIT_DATA limits the private memory of each process, the
    # kernel and each arm, not their sum; and all servers run under the account that started the hub.
    if shutil.which("prlimit") is None:
        sys.exit("CLASSROOM_SPAWNER=local needs prlimit, from Linux's util-linux, which is not here: use docker")
    c.JupyterHub.spawner_class = "simple"
    c.SimpleLocalProcessSpawner.home_dir_template = str(FOLDER / "homes" / "{username}")
    c.Spawner.cmd = ["prlimit", f"--data={MEMORY}", *server]
    if os.geteuid() == 0:
        # Started as root, as in many containers, Jupyter wants to be told that this is meant.
        c.Spawner.args = ["--allow-root"]
