"""Files behind URLs of fsspec (``s3://``, ``hdfs://``), copied once a node. It adds no key."""

from core.config.extensions import Extension

EXTENSION = Extension(name="remote")
