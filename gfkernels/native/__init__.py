"""The floor of the data plane: how we compile, atomics, and the libc calls that compiled code may make."""
