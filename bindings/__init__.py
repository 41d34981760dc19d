"""Bindings to the frameworks whose arrays and hooks gfkernels serves; each module imports its framework itself."""

if not __name__.startswith("gfkernels."):
    raise ImportError("import gfkernels.bindings, not bindings: the folder at the repository's root is only its source")
