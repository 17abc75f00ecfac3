"""Serve a retriever over HTTP.

    python -m recipes.search_r1.retrieval_server --index DIR [--backend hnsw] [--corpus FILE]
    [--port 8000]

``POST /retrieve`` takes ``{"queries": [...], "topk": 3, "return_scores": true}`` and answers in the
published format, ``{"result": [[{"document": {"id", "contents"}, "score"}]]}``; without scores the
documents stand alone. ``GET /health`` reports corpus, index and load. Requests that wait are
searched together. It listens on the loopback unless ``--host`` names another address; it has no
passwords. Beyond CONNECTIONS connections the answer is 503.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import socket
import sys
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from contextlib import asynccontextmanager
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Annotated, Any

from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from pydantic import BaseModel, ConfigDict, Field, StrictBool, StrictInt, StrictStr

from core.dry_run import is_dry_run
from core.rewards.batch_calls import BatchCalls
from recipes.search_r1.index.opening import make_retriever
from recipes.search_r1.index.passages import (
    BACKENDS,
    QUERY_CHARS,
    RetrievalError,
    Retriever,
    RetrieverOptions,
)
from recipes.search_r1.wire import IDENTITY, to_wire

log = logging.getLogger(__name__)
CONNECTIONS = 1024
MOST_QUERIES, MOST_PASSAGES, DEFAULT_TOPK = 1024, 100, 3
LOOPBACK = ("127.0.0.1", "::1", "localhost")


SearchRequest = tuple[list[str], int]  # queries, topk


class Search(BaseModel):
    """The body of ``POST /retrieve``; further fields are refused, since a misspelt one would be
    ignored."""

    model_config = ConfigDict(extra="forbid")
    queries: Annotated[
        list[Annotated[StrictStr, Field(max_length=4 * QUERY_CHARS)]],
        Field(min_length=1, max_length=MOST_QUERIES),
    ]
    topk: Annotated[StrictInt, Field(ge=1, le=MOST_PASSAGES)] | None = None
    return_scores: StrictBool = False


def make_app(retriever: Retriever, topk: int = DEFAULT_TOPK, max_batch: int = 256) -> FastAPI:
    """Return the application. ``topk`` is used where a request names none."""
    # The one that owns the retriever
    thread = ThreadPoolExecutor(1, thread_name_prefix="retriever")
    counts: Counter[str] = Counter()
    calls = BatchCalls(partial(_search_all, retriever, thread, max_batch, counts))

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        yield
        thread.shutdown()

    app = FastAPI(title="retrieval", lifespan=lifespan, docs_url=None, redoc_url=None)
    identity = {IDENTITY: f"{retriever.corpus_hash}-{retriever.fingerprint}"}

    @app.post("/retrieve")
    async def retrieve(search: Search) -> Response:
        try:
            found = await calls.submit((search.queries, search.topk or topk))
        except Exception as error:  # the client must hear of it, and the server must live on
            log.exception("a search failed")
            return _json({"error": f"the search failed: {type(error).__name__}: {error}"}, 500)
        return _json(to_wire(found, search.return_scores), headers=identity)

    @app.get("/health")
    async def health() -> Response:
        return _json(
            {
                "status": "ok",
                "backend": retriever.backend,
                "rows": len(retriever),
                "corpus_hash": retriever.corpus_hash,
                "fingerprint": retriever.fingerprint,
                "batches": counts["batches"],
                "queries": counts["queries"],
            },
            headers=identity,
        )

    @app.exception_handler(RequestValidationError)
    async def refused(_: Request, error: RequestValidationError) -> Response:
        lines = [
            f"{'.'.join(str(part) for part in found['loc'])}: {found['msg']}"
            for found in error.errors()[:5]
        ]
        wanted = '{"queries": [text, ...], "topk": number, "return_scores": bool}'
        return _json({"error": f"{'; '.join(lines)}; wanted is {wanted}"}, 422)

    return app


async def _search_all(
    retriever: Retriever,
    thread: Executor,
    max_batch: int,
    counts: Counter[str],
    requests: list[SearchRequest],
) -> list[Any]:
    """Return the passages of each request, or what its batch raised."""
    found: dict[int, Any] = {}
    for batch in _batches(requests, max_batch):
        queries, topk = [query for at in batch for query in requests[at][0]], requests[batch[0]][1]
        try:
            passages = await asyncio.get_running_loop().run_in_executor(
                thread, retriever.retrieve, queries, topk
            )
            if len(passages) != len(queries):
                raise ValueError(f"{len(passages)} results for {len(queries)} items")
            rest = iter(passages)
            found |= {at: list(islice(rest, len(requests[at][0]))) for at in batch}
        except Exception as error:  # the requests of this batch get it; the others go on
            found |= dict.fromkeys(batch, error)
        counts.update(batches=1, queries=len(queries))
    return [found[at] for at in range(len(requests))]


def _batches(requests: Sequence[SearchRequest], max_batch: int) -> list[list[int]]:
    """Return the numbers of the requests of each call: of one topk, at most ``max_batch`` queries
    or one request.

    An approximate index may find other passages for another topk, and an answer must not depend on
    the others.
    """
    batches: list[list[int]] = []
    for at in sorted(range(len(requests)), key=lambda at: requests[at][1]):
        last = batches[-1] if batches else [at]
        size = sum(len(requests[one][0]) for one in {*last, at})
        if batches and requests[last[0]][1] == requests[at][1] and size <= max_batch:
            last.append(at)
        else:
            batches.append([at])
    return batches


def _json(value: Any, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    # ASCII, so that a corpus with half a surrogate pair can be sent as well
    return Response(json.dumps(value).encode(), status, headers, "application/json")


def main(argv: Sequence[str] | None = None) -> int:
    """Serve until stopped. Returns 2, with a line on stderr, where the index cannot be opened."""
    import uvicorn

    args = _parse(argv)
    if is_dry_run():
        there = "is there" if Path(args.index).expanduser().exists() else "is not there yet"
        print(
            f"retrieval_server: the arguments are good; not checked here: {args.index} "
            f"({there}), corpus, encoder"
        )
        return 0
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s", stream=sys.stderr)
    try:
        listening = _listen(args.host, args.port)
        retriever = make_retriever(_options(args))
    except (RetrievalError, OSError) as error:
        print(f"retrieval_server: {error}", file=sys.stderr)
        return 2
    if args.host not in LOOPBACK:
        log.warning(
            "listening on %s: anyone who reaches this port can search; there are no passwords",
            args.host,
        )
    app = make_app(retriever, args.topk, args.max_batch)
    port = listening.getsockname()[1]
    log.info(
        "%s over %d passages, http://%s:%d/retrieve",
        retriever.backend,
        len(retriever),
        args.host,
        port,
    )
    print(port, flush=True)
    limits = {"limit_concurrency": CONNECTIONS, "timeout_keep_alive": 60, "backlog": 2048}
    config = uvicorn.Config(app, **limits, log_level="warning", access_log=False)
    uvicorn.Server(config).run(sockets=[listening])
    return 0


def _listen(host: str, port: int) -> socket.socket:
    """Bind the port before the index is read, so that a port in use is known in a second and not in
    ten minutes.

    Nobody listens on it before the index is there: until then a connection is refused.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # The protocol is named because asyncio sends without delay (TCP_NODELAY) only where it is; the
    # head and the body of an answer would otherwise wait 40 ms for each other.
    listening = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listening.bind((host, port))
    except OSError as error:
        listening.close()
        raise OSError(
            f"--host {host} --port {port}: {error.strerror}; choose another port (0: any)"
        ) from error
    return listening


def _options(args: argparse.Namespace) -> RetrieverOptions:
    own = ("host", "port", "topk", "max_batch", "no_mmap", "no_check", "no_gpu")
    given = {
        name: value for name, value in vars(args).items() if name not in own and value is not None
    }
    return RetrieverOptions(
        **given, mmap=not args.no_mmap, check_encoder=not args.no_check, gpu=not args.no_gpu
    )


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m recipes.search_r1.retrieval_server", description=__doc__
    )
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    add = parser.add_argument
    add(
        "--index",
        required=True,
        help="A folder that recipes.search_r1.index.cli wrote, or a faiss file.",
    )
    add("--no-gpu", action="store_true", help="Search on the CPU where faiss finds GPUs.")
    add("--corpus", help="The corpus, JSON lines of {id, contents} (default: that of the index).")
    add(
        "--backend",
        choices=BACKENDS,
        help="The back end to search (default: the only one that the folder holds).",
    )
    add(
        "--host",
        default="127.0.0.1",
        help="The address to listen on (default: the loopback alone).",
    )
    add(
        "--port",
        type=int,
        default=8000,
        help="The port, which is printed on stdout; 0 takes any free one.",
    )
    add(
        "--topk",
        type=int,
        default=DEFAULT_TOPK,
        help="The passages where a request names no number (%(default)s).",
    )
    add("--encoder", help="A folder or hub id (default: what the index was built with).")
    add(
        "--query-prefix",
        help='The text before a query (default: the index\'s; "query: " for a faiss file).',
    )
    add(
        "--passage-prefix",
        help='The text before a passage (default: the index\'s; "passage: " for a faiss file).',
    )
    add(
        "--pooling",
        choices=("mean", "cls"),
        help="How token vectors become one (default: the index's, else mean).",
    )
    add(
        "--max-length",
        type=int,
        help="The tokens that the encoder reads (default: the index's; 256).",
    )
    add("--device", help="The device of the encoder: cpu (default), cuda, cuda:1.")
    add("--threads", type=int, help="The threads of faiss and of the encoder on the CPU.")
    add("--ef-search", type=int, help="The candidates of a query in HNSW (default 128).")
    add("--nprobe", type=int, help="The lists that a query searches in IVF (default 32).")
    add(
        "--max-batch",
        type=int,
        default=256,
        help="The most queries searched together (default %(default)s).",
    )
    add("--no-mmap", action="store_true", help="Read the index into memory.")
    add(
        "--no-check",
        action="store_true",
        help="Leave out the comparison of encoder and index at start.",
    )
    return parser.parse_args(argv)


if __name__ == "__main__":
    sys.exit(main())
