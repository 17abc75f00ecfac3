"""Files behind URLs of fsspec (``s3://``, ``hdfs://``), copied once a node. It adds no key."""

from core.config.extensions import Extension

HERE = "core.files.remote"

EXTENSION = Extension(
    name="remote",
    functions={
        "local_copy": f"{HERE}.cache:local_copy",
        "url_problem": f"{HERE}.urls:url_problem",
        "check_writable": f"{HERE}.writing:check_writable",
        "write_text": f"{HERE}.writing:write_text",
        "remote_run": f"{HERE}.written_through:RemoteRun",
    },
)
