"""A server that stages of a reproduction need, as Search-R1's need its retriever: found, or started, awaited and ended.

What answers already is used and left alone. What was started here is ended with the reproduction, on Ctrl-C too; a
reproduction that is killed outright (SIGKILL) leaves its server, which the next one finds and uses.
"""

from __future__ import annotations

import signal
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from http.client import HTTPException
from pathlib import Path
from typing import Any
from urllib.error import HTTPError, URLError
from urllib.parse import urljoin
from urllib.request import ProxyHandler, build_opener

from core.errors import InputError
from results.reporting.numbers import duration
from results.reproduction.commands import signal_group, start

PROBE_S = 5.0  # of one attempt to reach it
PAUSE_S = 0.5  # between two attempts
END_S = 30.0  # from SIGTERM to SIGKILL
QUOTED = 12  # lines of the log


class Service:
    """A server with its address. ``own`` tells whether it may be started here: not at an address that was typed."""

    def __init__(self, name: str, command: str, url: str, log: Path, wait_s: float, key: str = "", own: bool = True):
        self.name, self.command, self.url, self.log, self.wait_s = name, command, url, log, wait_s
        self.key, self.own = key, own
        self._process: subprocess.Popen | None = None

    def __str__(self) -> str:
        if self.answers():
            return f"  {self.name}: answers at {self.url}; it is used and left alone"
        state = f"to do, nothing answers at {self.url}"
        if not self.own:
            return f"  {self.name}: {state}; start it there"
        return f"  {self.name}: {state}; started for the stages that need it, ended after them\n    {self.command}"

    def answers(self) -> bool:
        """Return whether the service is ready.

        Raises:
            InputError: another program answers at the address.
        """
        try:
            # No proxy: one of the environment must not come between this and the loopback.
            with build_opener(ProxyHandler({})).open(self.url, timeout=PROBE_S):
                return True
        except HTTPError as error:
            if error.code >= 500:  # the server itself, busy or not ready
                return False
            raise self._another(f"answered with status {error.code}") from error
        except (URLError, OSError):
            return False
        except HTTPException as error:
            raise self._another("did not answer in HTTP") from error
        except ValueError as error:
            raise InputError(f"{self.key}: {error}; give an address such as http://127.0.0.1:8000/retrieve") from error

    def _another(self, what: str) -> InputError:
        rule = f"{what}, so it is not the {self.name} that listens there"
        return InputError(f"{self.url}: {rule}; end what does, or name the {self.name}'s address: -- {self.key}=URL")

    def start(self) -> None:
        """Return once the service answers; start it where nothing does.

        Raises:
            InputError: nothing answers at an address that was typed, its command ended, or it took too long.
        """
        if self.answers():
            if self._process is None:
                print(f"{self.name}: answers at {self.url}; it is used and left alone", flush=True)
            return
        if not self.own:
            rule = f"nothing answers at {self.url}"
            fix = f"start the {self.name} there, or leave the key out, and one is started here"
            raise InputError(f"{self.key}: {rule}; {fix}")
        self.log.parent.mkdir(parents=True, exist_ok=True)
        print(f"{self.name}: waiting for {self.url}, at most {duration(self.wait_s)}; log: {self.log}", flush=True)
        self.stop()  # one that was started and does not answer any more
        with open(self.log, "wb") as log:
            self._process = start(self.command, stdout=log, stderr=subprocess.STDOUT)
        began = time.monotonic()
        while not self.answers():
            status = self._process.poll()
            if status is not None:
                self.stop()
                raise self._failed(f"ended with status {status} before it answered; mend what its log names")
            if time.monotonic() - began > self.wait_s:
                self.stop()
                late = f"did not answer at {self.url} within {duration(self.wait_s)}"
                raise self._failed(f"{late}; raise service.wait_minutes in reproduce.yaml, or start it by hand")
            time.sleep(PAUSE_S)
        print(f"{self.name}: answers after {duration(time.monotonic() - began)}", flush=True)

    def _failed(self, what: str) -> InputError:
        last = self.log.read_text(encoding="utf-8", errors="replace").splitlines()[-QUOTED:]
        first = f"{self.name} ({self.command}): {what}; the end of {self.log}:"
        return InputError([first, *(f"    {line}" for line in last)])

    def stop(self) -> None:
        """End what was started here, with all its processes. Nothing else is touched."""
        process, self._process = self._process, None
        if process is None:
            return
        signal_group(process, signal.SIGTERM)
        try:
            process.wait(END_S)
        except subprocess.TimeoutExpired:
            pass
        finally:  # also where a second Ctrl-C ends the waiting
            signal_group(process, signal.SIGKILL)
            process.wait()
        print(f"{self.name}: ended", flush=True)


@contextmanager
def ended(service: Service | None) -> Iterator[None]:
    """End the service when this is left, however it is left."""
    try:
        yield
    finally:
        if service is not None:
            service.stop()


def service_of(recipe: str, tables: Mapping[str, Any], typed: Sequence[str]) -> Service | None:
    """Return the service that ``reproduce.yaml`` names; None without one, and where its key is typed as null."""
    entry = tables.get("service")
    if entry is None:
        return None
    key, url = entry["key"], entry["url"]
    given = [word.partition("=")[2].strip("'\"") for word in typed if word.partition("=")[0] == key]
    if given and given[-1] in ("null", "None"):
        return None
    if given:
        url = urljoin(given[-1], url.rpartition("/")[2])
    log = Path("outputs") / recipe / f"{entry['name']}.log"
    return Service(entry["name"], entry["start"], url, log, 60.0 * entry["wait_minutes"], key, own=not given)
