"""Transports: tables of C function pointers that move bytes between ranks."""

if not __name__.startswith("gfkernels."):
    raise ImportError("import gfkernels.transport, not transport: that folder at the repository's root is its source")
