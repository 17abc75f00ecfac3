"""A run that does what its argument names; module state would show in the next run."""

import os
import signal
import sys
import time

kind = sys.argv[1] if len(sys.argv) > 1 else ""


def main() -> None:
    if kind == "pid":
        print(os.getpid())
    elif kind == "raise":
        print(1 / 0)
    elif kind == "exit":
        raise SystemExit(3)
    elif kind == "message":
        sys.exit("this is why")
    elif kind == "crash":
        os._exit(7)
    elif kind == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    elif kind in ("hold", "leak"):
        circle = [bytearray(64 << 20)]
        circle.append(circle)
        circle[0][::4096] = b"x" * len(circle[0][::4096])
        if kind == "leak":
            sys.leaked = [*getattr(sys, "leaked", ()), circle]
    elif kind == "spin":
        while time.process_time() < 0.4:
            pass


if __name__ == "__main__":
    main()
