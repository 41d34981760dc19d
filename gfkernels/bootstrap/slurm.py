"""Owns Slurm's variables: ranks inside `srun`, node lists in brackets, and uneven numbers of tasks per node."""

from __future__ import annotations

import re
from collections.abc import Mapping

from gfkernels.bootstrap.launchers import Found, optional_integer, rank_and_size
from gfkernels.errors import ConfigError


def found_by_slurm(environ: Mapping[str, str]) -> Found | None:
    """What Slurm says of this task; None outside `srun`, where the batch script runs alone whatever its allocation."""
    if not environ.get("SLURM_STEP_ID") or "SLURM_PROCID" not in environ:
        return None
    size_name = "SLURM_STEP_NUM_TASKS" if environ.get("SLURM_STEP_NUM_TASKS") else "SLURM_NTASKS"
    pair = rank_and_size(environ, "SLURM_PROCID", size_name)
    if pair is None or pair[1] == 1:
        return None
    nodes = []
    for name in ("SLURM_STEP_NODELIST", "SLURM_NODELIST", "SLURM_JOB_NODELIST"):
        if environ.get(name):
            nodes = expand_nodes(environ[name], name)
            break
    local_size = None
    for name in ("SLURM_STEP_TASKS_PER_NODE", "SLURM_TASKS_PER_NODE"):
        if environ.get(name):
            counts = expand_counts(environ[name], name)
            node = optional_integer(environ, "SLURM_NODEID") or 0
            # The second name speaks of the allocation, which a step may use only in part.
            if sum(counts) == pair[1] and node < len(counts):
                local_size = counts[node]
                break
    job = f"slurm-{environ.get('SLURM_JOB_ID', '')}.{environ['SLURM_STEP_ID']}"
    local_rank = optional_integer(environ, "SLURM_LOCALID")
    return Found("Slurm", *pair, local_rank, local_size, job, nodes[0] if nodes else "")


def expand_counts(text: str, name: str = "SLURM_TASKS_PER_NODE") -> list[int]:
    """Reads tasks per node: "2(x3),1" is [2, 2, 2, 1].

    Raises:
        ConfigError: it is written differently.
    """
    counts: list[int] = []
    for item in text.split(","):
        match = re.fullmatch(r"\s*(\d+)(?:\(x(\d+)\))?\s*", item)
        if match is None:
            raise ConfigError(f'{name}={text!r}: expected numbers such as "2(x3),1"')
        counts += [int(match[1])] * int(match[2] or 1)
    return counts


def expand_nodes(text: str, name: str = "SLURM_NODELIST") -> list[str]:
    """Reads a node list: "gpu[01-03,7]-ib,login" is gpu01-ib, gpu02-ib, gpu03-ib, gpu7-ib, login.

    Raises:
        ConfigError: brackets do not match or a range is none.
    """
    try:
        return [node for item in _split(text) for node in _expand(item)]
    except ValueError as error:
        raise ConfigError(f"{name}={text!r} is not a node list: {error}") from None


def _split(text: str) -> list[str]:
    items, depth, start = [], 0, 0
    for place, letter in enumerate(text):
        depth += (letter == "[") - (letter == "]")
        if depth not in (0, 1):
            raise ValueError("brackets do not match")
        if letter == "," and depth == 0:
            items.append(text[start:place])
            start = place + 1
    if depth:
        raise ValueError("brackets do not match")
    items.append(text[start:])
    if not all(items):
        raise ValueError("a name is empty")
    return items


def _expand(item: str) -> list[str]:
    opening = item.find("[")
    if opening < 0:
        return [item]
    closing = item.index("]", opening)
    tails = _expand(item[closing + 1 :])
    numbers: list[str] = []
    for part in item[opening + 1 : closing].split(","):
        match = re.fullmatch(r"(\d+)(?:-(\d+))?", part)
        if match is None:
            raise ValueError(f"{part!r} is neither a number nor a range")
        first, last = int(match[1]), int(match[2] or match[1])
        if last < first or last - first > 1_000_000:
            raise ValueError(f"the range {part!r} is empty or too long")
        numbers += [str(number).zfill(len(match[1])) for number in range(first, last + 1)]
    return [item[:opening] + number + tail for number in numbers for tail in tails]
