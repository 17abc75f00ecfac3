"""Plays the episodes of an agent that takes seconds to import: imported once, forked for each.

It needs the standard library alone, and runs in the agent's own environment. The agent's module has
a coroutine function ``main``, which reads the example and returns the reward.

    python resident.py serve SOCKET agent.py      imports the agent, and waits for episodes
    python resident.py play SOCKET                plays one with the streams of this process
"""

import asyncio
import importlib
import json
import os
import signal
import socket
import sys
import threading
import traceback
from pathlib import Path

STREAMS = (0, 1, 2)
VARIABLES = ("OPENAI_BASE_URL", "OPENAI_API_KEY", "NO_PROXY", "no_proxy")
PLAYED = b"1"


def serve(address: str, agent: str) -> None:
    """Fork for each connection. The parent never waits for a fork."""
    sys.path.insert(0, str(Path(agent).parent))
    main = importlib.import_module(Path(agent).stem).main
    Path(address).unlink(missing_ok=True)
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(address)
    listener.listen(1024)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    while True:
        connection, _ = listener.accept()
        if os.fork() == 0:
            answer(connection, main)
        connection.close()


def answer(connection: socket.socket, main) -> None:
    """Play the episode of a connection in this fork, which ends with it."""
    os.setsid()
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    variables, streams, _, _ = socket.recv_fds(connection, 65536, len(STREAMS))
    for stream, received in zip(STREAMS, streams, strict=True):
        os.dup2(received, stream)
        os.close(received)
    os.environ.update(json.loads(variables))

    def end_with_the_player() -> None:
        connection.recv(1)  # it sends nothing: its end ends the wait
        os.killpg(0, signal.SIGKILL)

    threading.Thread(target=end_with_the_player, daemon=True).start()
    try:
        print(asyncio.run(main()), flush=True)
        connection.send(PLAYED)
    except BaseException:
        traceback.print_exc()
    sys.stderr.flush()
    os.killpg(0, signal.SIGKILL)  # with what the agent started


def play(address: str) -> int:
    """Have an episode played with the streams of this process. Return the exit status."""
    variables = {name: os.environ[name] for name in VARIABLES if name in os.environ}
    connection = socket.socket(socket.AF_UNIX)
    connection.connect(address)
    socket.send_fds(connection, [json.dumps(variables).encode()], STREAMS)
    return 0 if connection.recv(1) == PLAYED else 1


if __name__ == "__main__":
    if sys.argv[1] == "serve":
        serve(*sys.argv[2:])
    sys.exit(play(sys.argv[2]))
