"""Show how far pip is: one line that changes on a terminal, a few lines elsewhere. Nothing but the standard library.

    pip install ... 2>&1 | python environment/progress.py STAGE LOG

Everything is appended to LOG. The exit status is 0 where pip succeeded; otherwise pip's last lines are shown.
"""

from __future__ import annotations

import os
import re
import select
import sys
import time

QUIET = 15.0  # seconds between two lines where there is no terminal
SHOWN_OF_A_FAILURE = 15  # lines


class Progress:
    """What pip has said so far, in one line."""

    def __init__(self, stage: str) -> None:
        self.stage, self.started, self.shown_at = stage, time.monotonic(), 0.0
        self.collected, self.doing, self.failed, self.succeeded = 0, "starting", False, False

    def read(self, line: str) -> None:
        """Take in a line of pip's output."""
        words = line.split()
        if line.startswith(("Collecting ", "Requirement already satisfied: ")):
            self.collected += 1
            self.doing = f"resolving {re.split('[ =<>~!;(]', line.split(': ')[-1].removeprefix('Collecting '))[0]}"
        elif words[:1] == ["Downloading"] and "(" in line:
            name = words[1].rsplit("/", 1)[-1].split("-")[0]
            self.doing = f"downloading {name} {line[line.rindex('(') :].strip()}"
        elif line.startswith("Installing collected packages:"):
            self.doing = f"installing {line.count(',') + 1} packages"
        elif line.startswith("ERROR"):
            self.failed = True
        elif line.startswith("Successfully installed"):
            self.succeeded = True

    def show(self, *, last: bool = False) -> None:
        """Print where things stand: over the line before on a terminal, now and then elsewhere."""
        now, doing = time.monotonic(), "done" if last else self.doing
        seconds = f"{now - self.started:.0f} s"
        text = f"{self.stage}: {self.collected} packages looked at, {doing}, {seconds}"
        if sys.stdout.isatty():
            width = os.get_terminal_size(sys.stdout.fileno()).columns - 1
            print(f"\r{text[:width]:<{width}}", end="\n" if last else "", flush=True)
        elif last or now - self.shown_at >= QUIET:
            print(text, flush=True)
            self.shown_at = now


def main(stage: str, log_path: str) -> int:
    """Read pip's output to its end and return 1 where it reported an error."""
    progress, tail, pending = Progress(stage), [], b""
    with open(log_path, "ab") as log:
        while True:
            ready, _, _ = select.select([0], [], [], 1.0)
            data = os.read(0, 1 << 16) if ready else None
            if data == b"":
                break
            if data:
                log.write(data)
                *lines, pending = (pending + data).split(b"\n")
                for line in lines:
                    progress.read(line.decode(errors="replace"))
                tail = [*tail, *lines][-SHOWN_OF_A_FAILURE:]
            progress.show()
    if progress.failed:
        print(f"\n{stage}: failed; the whole output is in {log_path}, and this is its end:")
        print(b"\n".join(tail).decode(errors="replace"))
        return 1
    progress.show(last=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
