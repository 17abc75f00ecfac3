"""Launch files: Slurm's script and ray_node.sh start Ray on each node in order, let a warned run
save, and end it."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import time
import uuid
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest
import yaml

from core.checkpoint.store import CheckpointStore
from tests.faults.kill_and_resume import read_lines
from tests.faults.ray_runs import NICE
from tests.faults.tiny_run import command, prepare
from tests.pools import marked_processes, none_left

ROOT = Path(__file__).resolve().parents[2]
PYTHON = str(Path(sys.executable).parent)  # not a shim, which is a shell
LAUNCH = ROOT / "recipes" / "launch"
PATIENCE_S = 800  # for what takes seconds where nothing else runs
# Slurm of two nodes on one machine: srun starts a command once a node, at once, and returns the
# last failure. A signal that srun gets goes to every process of the tasks, as slurmstepd sends it:
# those are in TASKS, by their sessions.
SRUN = """#!/usr/bin/env bash
nodes=1
while [[ "$1" == --* ]]; do [[ "$1" == --nodes=* ]] && nodes="${1#--nodes=}"; shift; done
if [[ "$1" == hostname ]]; then echo "127.0.0.1 10.0.0.7"; exit; fi
for signal in USR1 TERM; do trap "kill -s $signal \\$(python3 '$TASKS') 2> /dev/null" "$signal"; done
status=0 pids=()
for ((id = 0; id < nodes; id++)); do TASK=1 SLURM_NODEID=$id "$@" & pids+=($!); done
for pid in "${pids[@]}"; do
    while kill -0 "$pid" 2> /dev/null; do wait "$pid"; done
    wait "$pid" || status=$?
done
exit $status
"""
TASKS = """import pathlib
for entry in pathlib.Path("/proc").iterdir():
    try:
        environment = (entry / "environ").read_bytes().split(b"\\0")
    except OSError:
        continue
    if b"MARK=1" in environment and b"TASK=1" in environment and str(entry.name) != "self":
        print(entry.name)
"""
SCONTROL = """#!/usr/bin/env bash
echo "scontrol $*" >> "$CALLS"
[[ "$1" != show ]] || printf 'node1\\nnode2\\n'
"""
# Ray that writes its calls down: a started node is a file that names a living process, until it
# hears SIGTERM. It is no shell, since bash unblocks SIGTERM as it starts.
RAY = (
    f"#!{sys.executable}\n"
    + """
import os, pathlib, signal, sys
state, foreign = pathlib.Path(os.environ["STATE"]), "FOREIGN" in os.environ
with open(os.environ["CALLS"], "a") as calls:
    print("ray", *sys.argv[1:], file=calls)
alive = [mark.name for mark in state.iterdir() if pathlib.Path("/proc", mark.name.partition("-")[2]).exists()]
if sys.argv[1] == "start":
    if foreign:
        sys.exit("the port is held")
    mark = state / f"{'head' if sys.argv[2] == '--head' else 'node'}-{os.getpid()}"
    signal.signal(signal.SIGTERM, lambda *_: (mark.unlink(), os._exit(0)))
    mark.touch()
    while True:
        signal.pause()
elif sys.argv[1] == "status":
    print("Active:", *(f" 1 node_{name}" for name in (["a", "b"] if foreign else alive)), sep="\\n")
    print("Pending:", " 1 node_that_is_not_there", sep="\\n")
elif sys.argv[1] == "health-check":
    sys.exit(not (foreign or any(name.startswith("head") for name in alive)))
"""
)


class Job:
    """A job of two nodes whose processes all carry MARK; those of srun's tasks carry TASK, too."""

    def __init__(self, folder: Path, mark: str):
        self.folder = folder
        self.checkout = folder / "checkout"  # without a .venv, whose ray would be taken
        self.mark = mark
        self.log = folder / "job.log"
        self.port = str(free_port())

    def start(
        self, script: str, *arguments: str, ray: str | None = RAY, **variables: str
    ) -> subprocess.Popen[bytes]:
        """Start slurm.sbatch with a script."""
        self.prepare(script, ray)
        slurm = {
            "SLURM_SUBMIT_DIR": str(self.checkout),
            "SLURM_JOB_NODELIST": "node[1-2]",
            "SLURM_JOB_NUM_NODES": "2",
            "SLURM_JOB_ID": "7",
        }
        file = str(self.checkout / "recipes/launch/slurm.sbatch")
        return self.launch("bash", file, "script.sh", *arguments, **{**slurm, **variables})

    def prepare(self, script: str, ray: str | None = RAY) -> None:
        stubs = {"srun": SRUN, "scontrol": SCONTROL, **({"ray": ray} if ray else {})}
        for name, text in stubs.items():
            (self.folder / "bin" / name).write_text(text)
            (self.folder / "bin" / name).chmod(0o755)
        (self.folder / "tasks.py").write_text(TASKS.replace("MARK", self.mark))
        (self.checkout / "script.sh").write_text(script)

    def launch(self, *command: str, cwd: Path | None = None, **variables: str) -> subprocess.Popen:
        environment = {
            **os.environ,
            "PATH": os.pathsep.join((str(self.folder / "bin"), PYTHON, os.environ["PATH"])),
            "WAIT_S": "600",
            "POLL_S": "0.2",
            "RAY_PORT": self.port,
            self.mark: "1",
            "TASKS": str(self.folder / "tasks.py"),
            "CALLS": str(self.folder / "calls"),
            "STATE": str(self.folder / "state"),
            **variables,
        }
        with open(self.log, "a") as log:
            return subprocess.Popen(
                command, cwd=cwd or self.folder, env=environment, stdout=log, stderr=log
            )

    def run(self, *arguments: str, **variables: str) -> int:
        return self.start(*arguments, **variables).wait(PATIENCE_S)

    def calls(self) -> list[str]:
        return read_lines(self.folder / "calls")

    def pids(self) -> list[int]:
        return marked_processes(self.mark)


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def until(condition: Callable[[], object], job: Job, seconds: float = PATIENCE_S) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, job.log.read_text()
        time.sleep(0.05)


@pytest.fixture
def job(tmp_path):
    """Yield a job with stubs in place of Slurm and, by default, of Ray; nothing of it outlives the
    test."""
    for name in ("bin", "state"):
        (tmp_path / name).mkdir()
    job = Job(tmp_path, f"JOB_{uuid.uuid4().hex}")
    shutil.copytree(LAUNCH, job.checkout / "recipes" / "launch")
    yield job
    for pid in job.pids():
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def test_slurm_starts_the_head_then_the_nodes_then_the_script_and_ends_them(job):
    script = (
        'echo "RAY_ADDRESS=$RAY_ADDRESS mode=$RAY_AUTH_MODE token=${#RAY_AUTH_TOKEN} $*"; ls '
        '"$STATE"'
    )
    assert job.run(script, "a=1 2") == 0
    log = job.log.read_text()
    ip, port = re.search(r"RAY_ADDRESS=([\d.]+):(\d+) mode=token token=64 a=1 2\n", log).groups()
    # Both were there when the script ran
    assert len(re.findall(r"^(head|node)-\d+$", log, re.M)) == 2
    assert [line for line in job.calls() if line.startswith("ray start")] == [
        f"ray start --head --node-ip-address={ip} --port={port} --block",
        f"ray start --address={ip}:{port} --block",
    ]
    assert not any("requeue" in line for line in job.calls())
    assert none_left(job.pids)


def test_the_scripts_exit_status_is_the_jobs(job):
    assert job.run("exit 7") == 7 and none_left(job.pids)


# Ends its step and saves, which takes longer than all that the signal reaches; the file is not run
# by exec
SAVES = """
cat > saves.sh << 'END'
save() { trap '' USR1 TERM; sleep 2; ray status >> "$CALLS"; echo saved >> "$CALLS"; exit 0; }
trap save USR1 TERM
echo training >> "$CALLS"
while :; do sleep 0.1; done
END
EXEC bash saves.sh
"""


def everything(job: Job, number: int) -> None:
    for pid in job.pids():
        with suppress(ProcessLookupError):
            os.kill(pid, number)


def the_batch_shell(job: Job, number: int) -> None:
    os.kill(job.process.pid, number)


@pytest.mark.parametrize(
    ("reach", "number", "wrapped", "requeued"),
    [
        pytest.param(the_batch_shell, signal.SIGUSR1, "exec", True, id="warned"),
        pytest.param(everything, signal.SIGUSR1, "", True, id="warned_wrapped"),
        pytest.param(everything, signal.SIGTERM, "exec", False, id="cancelled"),
    ],
)
def test_a_signal_reaches_the_script_and_the_cluster_stays_until_it_has_saved(
    job, reach, number, wrapped, requeued
):
    job.process = job.start(SAVES.replace("EXEC", wrapped))
    until(lambda: "training" in job.calls(), job)
    reach(job, number)
    job.process.wait(PATIENCE_S)
    calls = job.calls()
    assert "saved" in calls, job.log.read_text()
    saved = calls.index("saved")
    assert (
        len([line for line in calls[:saved] if re.search(r"1 node_(head|node)-\d+", line)]) == 2
    ), job.log.read_text()
    assert ("scontrol requeue 7" in calls) == requeued
    assert (job.process.returncode == 0) == (wrapped == "exec")
    assert none_left(job.pids)


def test_a_script_does_not_run_on_a_cluster_that_holds_the_port(job):
    assert (
        job.run(
            'echo ran >> "$CALLS"', FOREIGN="1", SLURM_JOB_NUM_NODES="1", RAY_AUTH_MODE="disabled"
        )
        == 1
    )
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        assert (
            job.run(
                'echo ran >> "$CALLS"',
                SLURM_JOB_NUM_NODES="1",
                RAY_PORT=str(listener.getsockname()[1]),
            )
            == 2
        )
    assert "another program's" in job.log.read_text()
    assert "ran" not in job.calls()


@pytest.mark.cluster
@pytest.mark.timeout(2 * PATIENCE_S)
@pytest.mark.parametrize(
    ("reach", "number"),
    [(the_batch_shell, signal.SIGUSR1), (everything, signal.SIGTERM)],
    ids=["warned", "cancelled"],
)
def test_a_run_on_two_raylets_saves_when_its_job_ends(job, tmp_path, reach, number):
    """The real scripts and the real Ray: a process of Ray that died would take the step along."""
    prepare(tmp_path)
    run = tmp_path / "run"
    nodes = ("trainer.backend=ray", "trainer.nnodes=2", "trainer.save_freq=100")
    arguments = shlex.join(
        command(tmp_path, "grpo", 400, *nodes, "custom_reward_function.name=slowly")(run)
    )
    options = "--num-cpus=2 --object-store-memory=80000000"
    job.process = job.start(
        f"export PYTHONPATH={ROOT}; exec {arguments}",
        ray=None,
        RAY_START_OPTIONS=options,
        SPT_NOENV="1",
        **NICE,
    )
    until(lambda: len(read_lines(run / "metrics.jsonl")) >= 3, job)
    reach(job, number)
    assert job.process.wait(PATIENCE_S) == 0, job.log.read_text()
    assert CheckpointStore(run).latest().step >= 2
    assert json.loads((run / "manifest.json").read_text())["status"] == "stopped"
    assert ("scontrol requeue 7" in job.calls()) == (number == signal.SIGUSR1)
    assert none_left(job.pids, 120)


def test_the_image_and_its_constraints_are_of_one_cuda_and_choose_vllms_cuda_build():
    image = (ROOT / "Dockerfile").read_text()
    base = re.search(r"^FROM nvidia/cuda:(\d+)\.", image, re.M)[1]
    pins = (ROOT / "environment" / "constraints-cuda.txt").read_text()
    assert re.findall(r"^nvidia-nccl-cu(\d+)==", pins, re.M) == [base]
    assert "VLLM=vllm make setup" in image
    # VLLM's bound on setuptools depends on Python
    assert not re.search(r"^(setuptools|pip|wheel)==", pins, re.M)
    assert "FROM" not in (LAUNCH / "README.md").read_text()


# -- files for KubeRay and SkyPilot: only fields that their documents have, of the type there ------

NAMES = {"*": str}  # any names
POD = {  # Kubernetes' PodTemplateSpec
    "metadata": {"labels": NAMES, "annotations": NAMES},
    "spec": {
        "containers": [
            {
                "name": str,
                "image": str,
                "imagePullPolicy": str,
                "env": [{"name": str, "value": str}],
                "resources": {"requests": NAMES, "limits": NAMES},
                "volumeMounts": [{"name": str, "mountPath": str, "subPath": str, "readOnly": bool}],
            }
        ],
        "volumes": [
            {
                "name": str,
                "persistentVolumeClaim": {"claimName": str, "readOnly": bool},
                "emptyDir": {"medium": str, "sizeLimit": str},
            }
        ],
        "nodeSelector": NAMES,
        "serviceAccountName": str,
    },
}
RAY_JOB = {  # ray.io/v1 of KubeRay 1.5.1
    "apiVersion": str,
    "kind": str,
    "metadata": {"name": str, "namespace": str, "labels": NAMES, "annotations": NAMES},
    "spec": {
        "entrypoint": str,
        "runtimeEnvYAML": str,
        "submissionMode": str,
        "shutdownAfterJobFinishes": bool,
        "ttlSecondsAfterFinished": int,
        "activeDeadlineSeconds": int,
        "backoffLimit": int,
        "suspend": bool,
        "rayClusterSpec": {
            "rayVersion": str,
            "enableInTreeAutoscaling": bool,
            "authOptions": {"mode": str, "secretName": str},
            "headGroupSpec": {"rayStartParams": NAMES, "serviceType": str, "template": POD},
            "workerGroupSpecs": [
                {
                    "groupName": str,
                    "replicas": int,
                    "minReplicas": int,
                    "maxReplicas": int,
                    "numOfHosts": int,
                    "rayStartParams": NAMES,
                    "template": POD,
                }
            ],
        },
    },
}
SKYPILOT_TASK = {  # of SkyPilot 0.14
    "name": str,
    "workdir": str,
    "num_nodes": int,
    "resources": {"accelerators": str, "cpus": str, "memory": str, "disk_size": int, "infra": str},
    "envs": NAMES,
    "secrets": {"*": type(None)},
    "file_mounts": {"*": {"name": str, "source": str, "store": str, "mode": str}},
    "setup": str,
    "run": str,
}


def misfits(value: object, schema: object, where: str = "") -> list[str]:
    """Return the fields that a schema does not have, or that have another type."""
    if isinstance(schema, dict) and isinstance(value, dict):
        found = []
        for name, item in value.items():
            known = schema.get(name, schema.get("*"))
            inside = f"{where}.{name}"
            found += [inside] if known is None else misfits(item, known, inside)
        return found
    if isinstance(schema, list) and isinstance(value, list):
        return [field for item in value for field in misfits(item, schema[0], f"{where}[]")]
    return [] if type(value) is schema else [where]


def test_the_yaml_files_have_only_documented_fields():
    ray_job = yaml.safe_load((LAUNCH / "rayjob.yaml").read_text())
    assert misfits(ray_job, RAY_JOB) == []
    assert misfits(yaml.safe_load((LAUNCH / "skypilot.yaml").read_text()), SKYPILOT_TASK) == []
    ray_job["spec"]["backoffLimit"] = "3"
    ray_job["spec"]["rayClusterSpec"]["workerGroupSpecs"][0]["minReplica"] = 16
    where = ".spec.rayClusterSpec.workerGroupSpecs[]"
    assert misfits(ray_job, RAY_JOB) == [".spec.backoffLimit", f"{where}.minReplica"]


def test_the_pods_mount_volumes_that_they_have_and_install_rays_version():
    spec = yaml.safe_load((LAUNCH / "rayjob.yaml").read_text())["spec"]["rayClusterSpec"]
    for group in (spec["headGroupSpec"], *spec["workerGroupSpecs"]):
        pod = group["template"]["spec"]
        volumes = {volume["name"] for volume in pod["volumes"]}
        (container,) = pod["containers"]
        assert {mount["name"] for mount in container["volumeMounts"]} == volumes
        assert container["resources"]["requests"] == container["resources"]["limits"]
    pins = (ROOT / "environment" / "constraints-cuda.txt").read_text()
    assert f"ray=={spec['rayVersion']}\n" in pins


def test_skypilots_commands_start_ray_on_each_node_and_run_the_script(job, tmp_path):
    """As SkyPilot runs them: on each node at once, in the folder of the checkout."""
    task = yaml.safe_load((LAUNCH / "skypilot.yaml").read_text())
    job.prepare('echo "$RAY_ADDRESS $DAPO_DIR $PWD $*" > "$CALLS.script"; ls "$STATE"')
    shared = tmp_path / "shared"
    commands = task["run"].replace("/shared", str(shared))
    variables = {
        "SKYPILOT_NUM_NODES": "2",
        "SKYPILOT_NODE_IPS": "127.0.0.1\n10.0.0.7",
        "RAY_AUTH_TOKEN": "0" * 64,
        **task["envs"],
        "SCRIPT": "script.sh",
        "ARGUMENTS": "a=1 b=2",
    }
    assert subprocess.run(["bash", "-n", "-c", task["setup"] + commands]).returncode == 0
    nodes = []
    for rank in ("0", "1"):
        words = "bash", "-c", commands
        options = {"cwd": job.checkout, "SKYPILOT_NODE_RANK": rank, **variables}
        nodes.append(job.launch(*words, **options))
    assert [node.wait(PATIENCE_S) for node in nodes] == [0, 0], job.log.read_text()
    address = f"127.0.0.1:{job.port}"
    written = (job.folder / "calls.script").read_text().split()
    assert written == [address, str(shared / "data/dapo"), str(shared / "runs"), "a=1", "b=2"]
    assert len(re.findall(r"^(head|node)-\d+$", job.log.read_text(), re.M)) == 2
    assert none_left(job.pids)


def test_the_job_server_is_installed_and_rayjob_finds_the_images_folder():
    assert importlib.util.find_spec("aiohttp_cors") and importlib.util.find_spec("opencensus")
    spec = yaml.safe_load((LAUNCH / "rayjob.yaml").read_text())["spec"]
    folder = re.search(r"^WORKDIR (\S+)", (ROOT / "Dockerfile").read_text(), re.M)[1]
    assert f"bash {folder}/recipes/" in spec["entrypoint"]
    variables = yaml.safe_load(spec["runtimeEnvYAML"])["env_vars"]
    assert int(variables["RAY_JOB_STOP_WAIT_TIME_S"]) >= 600


@pytest.mark.cluster
@pytest.mark.timeout(2 * PATIENCE_S)
def test_ray_job_stop_waits_for_a_step_of_20_seconds_and_its_checkpoint(tmp_path, monkeypatch):
    """The lines of README.md, with another port and a tiny run."""
    prepare(tmp_path)
    # Scored one after another: 12 answers make a step of 20 seconds
    reward = "import time\ndef compute_score(*_, **__):\n    time.sleep(1.7)\n    return 1.0\n"
    (tmp_path / "slow.py").write_text(reward)
    run, mark = tmp_path / "run", f"JOB_{uuid.uuid4().hex}"
    slow = (f"custom_reward_function.path={tmp_path / 'slow.py'}",)
    entry = command(
        tmp_path,
        "grpo",
        50,
        "trainer.backend=ray",
        "trainer.save_freq=100",
        "trainer.test_freq=-1",
        *slow,
    )
    entry = [*entry(run), "trainer.val_before_train=False"]
    port, dashboard = free_port(), free_port()
    settings = {
        "RAY_AUTH_MODE": "disabled",
        "SPT_NOENV": "1",
        mark: "1",
        "PYTHONPATH": str(ROOT),
        **NICE,
    }
    environment = {**os.environ, **settings}
    ray = f"{PYTHON}/ray"
    start = [ray, "start", "--head", "--block", "--num-cpus=3", "--object-store-memory=80000000"]
    start += ["--node-ip-address=127.0.0.1", f"--port={port}", f"--dashboard-port={dashboard}"]
    readme = (LAUNCH / "README.md").read_text()
    variables = re.search(r"--runtime-env-json='(.*)' --", readme)[1]

    def job(*words: str) -> str:
        line = [ray, "job", words[0], f"--address=http://127.0.0.1:{dashboard}", *words[1:]]
        return subprocess.run(
            line, env=environment, capture_output=True, text=True, timeout=PATIENCE_S
        ).stdout

    def start_head() -> subprocess.Popen:
        quiet = subprocess.DEVNULL
        return subprocess.Popen(start, env=environment, stdout=quiet, stderr=quiet)

    submit = ("submit", "--submission-id=tiny", "--no-wait", f"--runtime-env-json={variables}")
    head = start_head()
    try:
        deadline = time.monotonic() + PATIENCE_S
        while "tiny" not in job(*submit, "--", *entry):
            assert time.monotonic() < deadline
            if head.poll() is not None:  # on a busy machine Ray's own patience may end before
                head = start_head()
        while len(read_lines(run / "metrics.jsonl")) < 1:
            assert time.monotonic() < deadline + PATIENCE_S, job("logs", "tiny")
            time.sleep(0.2)
        job("stop", "tiny")
        assert CheckpointStore(run).latest() is not None, job("logs", "tiny")
        assert json.loads((run / "manifest.json").read_text())["status"] == "stopped"
    finally:
        head.kill()
    assert none_left(lambda: marked_processes(mark), 120)
