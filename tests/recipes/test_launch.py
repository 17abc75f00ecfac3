"""Launch files: Slurm's script and ray_node.sh start Ray on each node in order and end it."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
LAUNCH = ROOT / "recipes" / "launch"
# Slurm of two nodes on one machine: srun starts a command once a node, at once, and returns the last failure.
SRUN = """#!/usr/bin/env bash
nodes=1
while [[ "$1" == --* ]]; do [[ "$1" == --nodes=* ]] && nodes="${1#--nodes=}"; shift; done
if [[ "$1" == hostname ]]; then "$@"; exit; fi
status=0 pids=()
for ((id = 0; id < nodes; id++)); do SLURM_NODEID=$id "$@" & pids+=($!); done
for pid in "${pids[@]}"; do wait "$pid" || status=$?; done
exit $status
"""
SCONTROL = "#!/usr/bin/env bash\nprintf 'node1\\nnode2\\n'\n"
# Ray that writes its calls down: a started node is a file that is there as long as its process.
RAY = """#!/usr/bin/env bash
echo "ray $*" >> "$CALLS"
case "$1" in
start)
    [[ "$2" == --head ]] && mark="$STATE/head" || mark="$STATE/node-$$"
    touch "$mark"
    trap 'rm -f "$mark"; exit 0' TERM
    while :; do sleep 0.1; done ;;
status)
    echo "Active:"; for one in "$STATE"/*; do [[ -e "$one" ]] && echo " 1 node_${one##*/}"; done
    echo "Pending:"; echo " 1 node_that_is_not_there" ;;
health-check) [[ -e "$STATE/head" ]] ;;
esac
"""


@pytest.fixture
def slurm(tmp_path):
    """Run slurm.sbatch with stubs in place of Slurm and, unless ``ray`` is given, of Ray."""
    folder = tmp_path / "bin"
    folder.mkdir()
    (tmp_path / "state").mkdir()
    checkout = tmp_path / "checkout"  # without a .venv, whose ray would be taken
    shutil.copytree(LAUNCH, checkout / "recipes" / "launch")

    def run(script: str, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
        for name, text in {"srun": SRUN, "scontrol": SCONTROL, "ray": RAY}.items():
            (folder / name).write_text(text)
            (folder / name).chmod(0o755)
        (checkout / "script.sh").write_text(script)
        environment = {
            **{"PATH": f"{folder}{os.pathsep}{os.environ['PATH']}", "SLURM_SUBMIT_DIR": str(checkout)},
            **{"SLURM_JOB_NODELIST": "node[1-2]", "SLURM_JOB_NUM_NODES": "2", "WAIT_S": "30", "POLL_S": "0.2"},
            **{"CALLS": str(tmp_path / "calls"), "STATE": str(tmp_path / "state"), **variables},
        }
        command = ["bash", str(checkout / "recipes/launch/slurm.sbatch"), "script.sh", *arguments]
        return subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=120)

    return run


def test_slurm_starts_the_head_then_the_nodes_then_the_script_and_ends_them(slurm, tmp_path):
    done = slurm(
        'echo "RAY_ADDRESS=$RAY_ADDRESS mode=$RAY_AUTH_MODE token=${#RAY_AUTH_TOKEN} $*"; ls "$STATE"', "a=1 2"
    )
    assert done.returncode == 0, done.stderr
    address = re.search(r"RAY_ADDRESS=([\d.]+:6379) mode=token token=64 a=1 2\n", done.stdout)[1]
    assert len(re.findall(r"^(head|node-\d+)$", done.stdout, re.M)) == 2  # both were there when the script ran
    starts = [line for line in (tmp_path / "calls").read_text().splitlines() if line.startswith("ray start")]
    ip, port = address.split(":")
    assert starts == [
        f"ray start --head --node-ip-address={ip} --port={port} --block",
        f"ray start --address={address} --block",
    ]
    assert not list((tmp_path / "state").iterdir())  # and none is left


def test_the_scripts_exit_status_is_the_jobs(slurm, tmp_path):
    assert slurm("exit 7").returncode == 7 and not list((tmp_path / "state").iterdir())
