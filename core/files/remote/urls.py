"""Places that a configuration names by a URL (``s3://bucket/train.parquet``), and the drivers that reach them.

Drivers are fsspec's; they take logins and addresses from the environment (``AWS_ACCESS_KEY_ID``, ``AWS_ENDPOINT_URL``,
``FSSPEC_S3_ANON=true``), so that no configuration holds a secret. What is read is copied by ``cache.py``. transformers
and pyarrow never get a URL: the first writes a local folder named ``memory:`` for ``memory://``, the second does not
read that either.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from typing import TYPE_CHECKING, NamedTuple

from core.config.secret_keys import login_in, without_login
from core.errors import InputError, WriteFailed

if TYPE_CHECKING:
    from fsspec import AbstractFileSystem

# Protocol -> (module that has to be there, what to install): what fsspec itself brings needs nothing.
DRIVERS = {
    **dict.fromkeys(("s3", "s3a"), ("s3fs", "s3fs")),
    **dict.fromkeys(("gs", "gcs"), ("gcsfs", "gcsfs")),
    **dict.fromkeys(("abfs", "abfss", "az", "adl"), ("adlfs", "adlfs")),
    **dict.fromkeys(("oci", "ocilake"), ("ocifs", "ocifs")),
    **dict.fromkeys(("oss",), ("ossfs", "ossfs")),
    **dict.fromkeys(("http", "https"), ("aiohttp", "aiohttp")),
    **dict.fromkeys(("sftp", "ssh"), ("paramiko", "paramiko")),
    **dict.fromkeys(("hdfs", "arrow_hdfs"), ("pyarrow", "pyarrow")),
    "hf": ("huggingface_hub", "huggingface_hub"),
}
# File systems without folders: to make one would make a bucket, which a misspelt URL must not.
OBJECT_STORES = {"s3", "s3a", "gs", "gcs", "abfs", "abfss", "az", "adl", "oci", "oss", "memory"}


class Remote(NamedTuple):
    """A URL as its driver has it: the file system, and the path in it."""

    fs: AbstractFileSystem
    path: str


def makes_folders(url: str) -> bool:
    """Return whether a folder has to be made there before a file is written into it."""
    return url.partition("://")[0] not in OBJECT_STORES


def driver_problem(url: str) -> tuple[str, str] | None:
    """Return what is wrong with the driver of a URL and what to do; None where it is there. Opens no connection."""
    from fsspec.registry import known_implementations, registry

    protocol = url.partition("://")[0]
    module, package = DRIVERS.get(protocol, ("", ""))
    if module and find_spec(module) is None:
        return f"the driver of {protocol}:// is not installed", f"pip install {package}"
    if protocol not in known_implementations and protocol not in registry:
        return f"no driver for {protocol}:// is known", "use file://, s3://, gs://, hdfs:// or another of fsspec's"
    return None


def place(url: str, key: str) -> Remote:
    """Return the file system and the path of a URL that ``key`` names.

    Raises:
        InputError: it holds a login; or its driver is not installed or cannot start, which names the package.
    """
    import fsspec

    if login := login_in(url):
        fix = "leave it out, and export the login that the driver reads (s3: AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY)"
        raise InputError(f"{key}={without_login(url)}: holds a login ({login}), and is recorded; {fix}")
    if problems := driver_problem(url):
        raise InputError(f"{key}={url}: {'; '.join(problems)}")
    with explained(url, key):
        try:
            fs, path = fsspec.core.url_to_fs(url)
        except ImportError as error:  # of a driver that fsspec knows and the table does not
            raise InputError(f"{key}={url}: the driver is not installed ({error}); install that package") from error
    return Remote(fs, path.rstrip("/"))


@contextmanager
def explained(url: str, key: str, what: str = "read") -> Iterator[None]:
    """Turn what a driver raises into one line. Each driver has errors of its own, so all of them are caught.

    Raises:
        InputError: the place does not exist, gives no rights to ``what`` is done, or cannot be reached; WriteFailed
            where it was to be written, for another try may succeed.
    """
    failed = WriteFailed if what == "write" else InputError
    try:
        yield
    except InputError:
        raise
    except FileNotFoundError as error:
        raise failed(f"{key}={url}: does not exist; give another URL, or put it there first") from error
    except PermissionError as error:
        fix = "give its login rights to, in the environment that the driver reads, or another URL"
        raise failed(f"{key}={url}: no rights to {what} there ({brief(error)}); {fix}") from error
    except Exception as error:
        fix = "check the URL, the network and the login in the environment"
        raise failed(f"{key}={url}: cannot be {_DONE[what]} ({brief(error)}); {fix}") from error


_DONE = {"read": "read", "write": "written"}


def brief(error: BaseException) -> str:
    """Return an error in one line of bounded length."""
    return f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"


def url_problem(url: str, key: str, look: bool) -> tuple[str, str] | None:
    """Return which rule a URL breaks and what to do; None where none.

    Its driver has to be there. With ``look`` the place is looked up too, and nothing is read.
    """
    if (problem := driver_problem(url)) or not look:
        return problem
    try:
        fs, path = place(url, key)
        with explained(url, key):
            fs.invalidate_cache()
            fs.info(path)
    except InputError as error:
        rule, _, fix = str(error).removeprefix(f"{key}={url}: ").rpartition("; ")
        return rule, fix
    return None
