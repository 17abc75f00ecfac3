"""Serve a retriever over HTTP.

    python -m recipes.search_r1.retrieval_server --index DIR \\
        [--backend hnsw] [--corpus FILE] [--port 8000]

``POST /retrieve`` takes ``{"queries": [...], "topk": 3, "return_scores": true}`` and answers in the
published format, ``{"result": [[{"document": {"id", "contents"}, "score"}]]}``; without scores the
documents stand alone. ``GET /health`` reports corpus, index and load. Requests that wait are
searched together. It listens on the loopback unless ``--host`` names another address; it has no
passwords. Beyond CONNECTIONS connections the answer is 503.
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
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
from recipes.search_r1.index.encoder import add_encoder_arguments
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
MOST_QUERIES = 1024
MOST_PASSAGES = 100
DEFAULT_TOPK = 3
LOOPBACK = ("127.0.0.1", "::1", "localhost")
SearchRequest = tuple[list[str], int]  # queries, topk


class Search(BaseModel):
    """The body of ``POST /retrieve``; a misspelt field is refused, and not ignored."""

    model_config = ConfigDict(extra="forbid")
    queries: Annotated[
        list[Annotated[StrictStr, Field(max_length=4 * QUERY_CHARS)]],
        Field(min_length=1, max_length=MOST_QUERIES),
    ]
    topk: Annotated[StrictInt, Field(ge=1, le=MOST_PASSAGES)] | None = None
    return_scores: StrictBool = False


def make_app(retriever: Retriever, topk: int = DEFAULT_TOPK, max_batch: int = 256) -> FastAPI:
    """Return the application. ``topk`` is used where a request names none."""
    # The only thread that uses the retriever
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
            passages = await calls.submit((search.queries, search.topk or topk))
        except Exception as error:  # the client must hear of it, and the server must live on
            log.exception("a search failed")
            return _json({"error": f"the search failed: {type(error).__name__}: {error}"}, 500)
        return _json(to_wire(passages, search.return_scores), headers=identity)

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
        lines = []
        for fault in error.errors()[:5]:
            lines.append(f"{'.'.join(map(str, fault['loc']))}: {fault['msg']}")
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
    results: list[Any] = [None] * len(requests)
    for batch in _batches(requests, max_batch):
        queries = [query for index in batch for query in requests[index][0]]
        topk = requests[batch[0]][1]
        search = partial(retriever.retrieve, queries, topk)
        try:
            passages = await asyncio.get_running_loop().run_in_executor(thread, search)
            if len(passages) != len(queries):
                raise ValueError(f"{len(passages)} results for {len(queries)} items")
            rest = iter(passages)
            for index in batch:
                results[index] = list(islice(rest, len(requests[index][0])))
        except Exception as error:  # the requests of this batch get it; the others go on
            for index in batch:
                results[index] = error
        counts.update(batches=1, queries=len(queries))
    return results


def _batches(requests: Sequence[SearchRequest], max_batch: int) -> list[list[int]]:
    """Return the numbers of the requests of each call to the retriever.

    A call has requests of one topk, because an approximate index may find other passages for
    another one, and an answer must not depend on other requests. It has at most ``max_batch``
    queries, or one request.
    """
    batches: list[list[int]] = []
    size = 0
    for index in sorted(range(len(requests)), key=lambda index: requests[index][1]):
        queries, topk = requests[index]
        size += len(queries)
        if batches and requests[batches[-1][0]][1] == topk and size <= max_batch:
            batches[-1].append(index)
        else:
            batches.append([index])
            size = len(queries)
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
    """Return the options that are among the arguments; the others keep their defaults."""
    names = {field.name for field in dataclasses.fields(RetrieverOptions)}
    return RetrieverOptions(**{name: value for name, value in vars(args).items() if name in names})


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m recipes.search_r1.retrieval_server",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        argument_default=argparse.SUPPRESS,
    )
    add = parser.add_argument
    folder = "A folder that recipes.search_r1.index.cli wrote, or a faiss file."
    add("--index", required=True, help=folder)
    add("--corpus", help="The corpus, JSON lines of {id, contents} (default: that of the index).")
    backend = "The back end to search (default: the only one that the folder holds)."
    add("--backend", choices=BACKENDS, help=backend)
    add_encoder_arguments(parser, "the index's")
    add("--ef-search", type=int, help="The candidates of a query in HNSW (default 128).")
    add("--nprobe", type=int, help="The lists that a query searches in IVF (default 32).")
    no_gpu = "Search on the CPU where faiss finds GPUs."
    add("--no-gpu", dest="gpu", action="store_false", help=no_gpu)
    add("--no-mmap", dest="mmap", action="store_false", help="Read the index into memory.")
    no_check = "Leave out the comparison of encoder and index at start."
    add("--no-check", dest="check_encoder", action="store_false", help=no_check)
    host = "The address to listen on (default: the loopback alone)."
    add("--host", default=LOOPBACK[0], help=host)
    port = "The port, which is printed on stdout (default %(default)s); 0 takes any free one."
    add("--port", type=int, default=8000, help=port)
    topk = "The passages where a request names no number (default %(default)s)."
    add("--topk", type=int, default=DEFAULT_TOPK, help=topk)
    max_batch = "The most queries searched together (default %(default)s)."
    add("--max-batch", type=int, default=256, help=max_batch)
    return parser.parse_args(argv)


if __name__ == "__main__":
    sys.exit(main())
