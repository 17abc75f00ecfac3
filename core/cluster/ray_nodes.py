"""The nodes of a cluster: whether a head answers, and whether all nodes hold the same code."""

import difflib
import functools
import hashlib
import inspect
import json
import os
import subprocess
import sys
from collections import defaultdict
from collections.abc import Collection, Mapping
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayError, RuntimeEnvSetupError

from core.cluster import node_report
from core.cluster.ray_processes import FOLDER
from core.cluster.ray_watch import Place, on_node
from core.config import paths
from core.config.schema import Config
from core.config.section import Problem
from core.errors import InputError, WorkersLost, listed, one_line
from core.tracking.run_manifest import ROOT

INIT = "ray_kwargs.ray_init"
ARGUMENTS = inspect.signature(ray.init).parameters
HEALTH_S = 60  # for Ray's health check, most of it to load Ray on a busy machine
# Ray waits for a head for many minutes; the health check gives up after these seconds
IMPATIENT = {
    "RAY_gcs_rpc_server_reconnect_timeout_s": "5",
    "RAY_gcs_rpc_server_connect_timeout_s": "3",
}
REPORT_S = 120  # for a process to start on each node and read its files
LOSS = "actor_rollout_ref.actor.policy_loss.loss_mode"

# -- before a connection --------------------------------------------------------------------------


def start_problems(config: Config) -> list[str]:
    """Return unknown arguments of ray.init, or an address where no head answers, a line each."""
    lines = []
    for name, value in config.ray_kwargs.ray_init.items():
        if name not in ARGUMENTS and not name.startswith("_"):
            near = difflib.get_close_matches(name, ARGUMENTS, n=1)
            fix = f"the nearest is {near[0]}" if near else "help(ray.init) lists them"
            lines.append(str(Problem(f"{INIT}.{name}", value, "is no argument of ray.init", fix)))
    address = paths.cluster_address(config)
    if address is not None and not lines and (reason := unhealthy(address)):
        key = f"{INIT}.address" if config.ray_kwargs.ray_init.get("address") else "RAY_ADDRESS"
        fix = "give the address and port of `ray start --head` (6379), or see whether it still runs"
        lines.append(str(Problem(key, address, f"no Ray head answers there ({reason})", fix)))
    return lines


def unhealthy(address: str) -> str:
    """Return why no head of a cluster answers at the address, or nothing where one does.

    A process of its own makes Ray's check, because Ray ends the process that it fails in.
    """
    command = [sys.executable, "-m", "ray.scripts.scripts", "health-check", "--skip-version-check"]
    try:
        done = subprocess.run(
            [*command, "--address", address],
            env={**os.environ, **IMPATIENT},
            capture_output=True,
            text=True,
            timeout=HEALTH_S,
        )
    except subprocess.TimeoutExpired:
        return f"no answer within {HEALTH_S} s"
    if done.returncode == 0:
        return ""
    last = (done.stderr.strip().splitlines() or [""])[-1]
    kind, _, text = last.partition(": ")
    return one_line(text[:200]) if kind.endswith("Error") else "nothing listens, or no Ray"


def free_nodes(gpus: bool) -> str:
    """Return which nodes of the cluster have gone, and what is free on the others."""
    unit = "GPU" if gpus else "CPU"
    available = ray._private.state.available_resources_per_node()  # has no public counterpart
    nodes = ray.nodes()
    alive = [node for node in nodes if node["Alive"]]
    gone = {node["NodeManagerAddress"] for node in nodes}
    gone -= {node["NodeManagerAddress"] for node in alive}
    lines = []
    for node in alive:
        free = available.get(node["NodeID"], {}).get(unit, 0)
        total = node["Resources"].get(unit, 0)
        lines.append(f"{node['NodeManagerAddress']} {free:g} of {total:g}")
    text = f"free {unit}s by node: {listed(lines)}"
    return f"nodes that have gone: {listed(sorted(gone))}; {text}" if gone else text


# -- the same code everywhere ---------------------------------------------------------------------


def named_files(config: Config) -> dict[str, str]:
    """Return path -> key of models and files of code that a rank or engine reads on its node."""
    models = paths.models(config).items()
    files = {path: key for key, path in models if path and paths.is_local(path)}
    loss = config.actor_rollout_ref.actor.policy_loss.loss_mode
    if ".py:" in loss:
        files[loss.rpartition(":")[0]] = LOSS
    return files


def own_packages(config: Config) -> tuple[str, ...]:
    """Return the packages whose code runs in ranks and engines: these, and a user's own loss."""
    module, colon, _ = config.actor_rollout_ref.actor.policy_loss.loss_mode.rpartition(":")
    if not colon or module.endswith(".py"):
        return node_report.CODE
    return (*node_report.CODE, module.partition(".")[0])


@functools.cache
def driver_report(packages: tuple[str, ...], files: tuple[str, ...]) -> Mapping[str, Any]:
    """Return this process's report at the first start: a restart must not mix two versions."""
    return node_report.report(packages, files, FOLDER)


def check_nodes(config: Config, nodes: Collection[str]) -> dict[str, Mapping[str, Any]]:
    """Compare code, packages and models of nodes with the driver's. Return address -> report.

    Raises InputError where they differ, and WorkersLost for a node that does not report.
    """
    named = named_files(config)
    compared = own_packages(config), tuple(named)
    driver = driver_report(*compared)
    if paths.cluster_address(config) is None and len(nodes) == 1:  # this machine alone
        reports = {ray.util.get_node_ip_address(): node_report.report(*compared, FOLDER)}
    else:
        addresses = {node["NodeID"]: node["NodeManagerAddress"] for node in ray.nodes()}
        calls = {}
        for node in nodes:
            calls[addresses[node]] = on_node(node_report.report, node).remote(*compared, FOLDER)
        reports = {address: _reported(address, call) for address, call in calls.items()}
    if lines := differences(driver, reports, named):
        raise InputError(lines)
    return reports


def _reported(address: str, call: ray.ObjectRef) -> Mapping[str, Any]:
    try:
        return ray.get(call, timeout=REPORT_S)
    except GetTimeoutError as error:
        text = f"node {address} did not start a process within {REPORT_S} s; see its raylet's log"
        raise WorkersLost(text) from error
    except RayError as error:
        reason = one_line(" ".join(str(error).split())[:300])
        if isinstance(error, RuntimeEnvSetupError):
            text = f"{INIT}.runtime_env: node {address} cannot set it up: {reason}"
            raise InputError(text) from error
        text = f"node {address} was lost before a process started there: {reason}"
        raise WorkersLost(text) from error


def differences(
    driver: Mapping[str, Any], reports: Mapping[str, Mapping[str, Any]], named: Mapping[str, str]
) -> list[str]:
    """Return a line for each way in which nodes differ from the driver.

    A package may be another build than the driver's, for other devices, but not than another
    node's. ``named`` maps paths of models to their keys. A node may have more files of a model than
    the driver, but no more files of code.
    """
    nodes_of: dict[tuple[str, str], list[str]] = defaultdict(list)  # fault and fix -> nodes
    versions: dict[str, str] = {}  # package -> version of the first node that has it
    for address, report in reports.items():
        node = f"{address} ({report['host']})"
        for subject, expected in driver["files"].items():
            files = report["files"][subject]
            names = expected if subject in named else {*expected, *files}
            other = sorted(name for name in names if files.get(name) != expected.get(name))
            if not other:
                continue
            if subject in named:
                fault = f"{os.path.basename(other[0])} differs" if files else "is not there"
                fault = f"{named[subject]}={subject}: {fault}"
                fix = "; copy the driver's to that path there"
            else:
                fault = f"{other[0]}: differs from the driver's"
                more = f", and so do {len(other) - 1} more files" if other[1:] else ""
                fix = f"{more}; check out the driver's commit there, in {ROOT}"
            nodes_of[fault, fix].append(node)
        for name, version in report["packages"].items():
            expected = driver["packages"].get(name, version)
            if version.partition("+")[0] == expected.partition("+")[0]:
                expected = versions.setdefault(name, version)
            if version != expected:
                fix = f", and {expected} elsewhere; install the same there"
                nodes_of[f"{name}=={version}: is installed", fix].append(node)
    return [f"{fault} on node {listed(nodes)}{fix}" for (fault, fix), nodes in nodes_of.items()]


def recorded(
    reports: Mapping[str, Mapping[str, Any]], places: Mapping[str, Place]
) -> list[dict[str, Any]]:
    """Return what a manifest holds of each node: versions, a hash of its code, processes."""
    entries = []
    for address, report in reports.items():
        code = json.dumps(report["files"]["code"], sort_keys=True).encode()
        entries.append(
            {
                "address": address,
                "packages": report["packages"],
                "code_sha256": hashlib.sha256(code).hexdigest(),
                "processes": [name for name, place in places.items() if place.address == address],
            }
        )
    return entries
