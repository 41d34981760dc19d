"""Owns the tests of the doctor: each probe's good and bad cases, its exit codes, and that it tells no secrets."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
from collections.abc import Callable
from typing import Any

import pytest

from gfkernels import doctor
from gfkernels.doctor import FAIL, NOTE, OK, WARN, Finding

Run = Callable[..., Any]


def _named(findings: list[Finding], name: str) -> Finding:
    (found,) = [finding for finding in findings if finding.name == name]
    return found


def test_a_healthy_machine(gfkernels: Run) -> None:
    done = gfkernels("doctor", "--no-run")
    assert done.code == 0, done.out + done.err
    assert "gfkernels works here" in done.out
    for word in ("numba", "compiles for", "compile cache", "usable", "memfd", "loopback", "RDMA", "CUDA"):
        assert word in done.out, word


@pytest.mark.slow
def test_the_self_test(gfkernels: Run) -> None:
    done = gfkernels("doctor", "--json")
    assert done.code == 0, done.out + done.err
    found = {row["name"]: row for row in json.loads(done.out)["findings"] if row["topic"] == "self-test"}
    assert {"two ranks", "registered memory", "ordinary memory", "TCP"} <= set(found)
    assert "direct.registered" in found["registered memory"]["found"]


@pytest.mark.slow
def test_json(gfkernels: Run) -> None:
    done = gfkernels("doctor", "--json", "--no-run")
    assert done.code == 0, done.out
    told = json.loads(done.out)
    assert told["works"] is True
    assert {finding["state"] for finding in told["findings"]} <= {OK, NOTE, WARN}
    assert not [finding for finding in told["findings"] if finding["topic"] == "self-test"]


@pytest.mark.slow
def test_what_must_be_mended_gives_exit_code_1(gfkernels: Run) -> None:
    done = gfkernels("doctor", "--no-run", GFKERNELS_TRANSPROT="tcp", GFKERNELS_TIMEOUT_S="-1")
    assert done.code == 1
    assert "did you mean GFKERNELS_TRANSPORT" in done.out
    assert "expected seconds, above 0" in done.out
    assert "does not work here yet" in done.out


@pytest.mark.slow
def test_secrets_are_not_shown(gfkernels: Run) -> None:
    done = gfkernels("doctor", "--no-run", GFKERNELS_SECRET="swordfish-swordfish")
    assert done.code == 0
    assert "swordfish" not in done.out


@pytest.mark.slow
def test_wrong_settings_do_not_disturb_the_self_test(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GFKERNELS_TRANSPROT", "tcp")
    monkeypatch.setenv("RANK", "3")
    assert all(finding.state in (OK, WARN) for finding in doctor.self_test())


def test_one_core_is_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda _: {0})
    assert _named(doctor.processor(), "usable").state == WARN


def test_a_cache_that_cannot_be_written_is_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.access", lambda *_: False)
    found = _named(doctor.cache(), "folder")
    assert found.state == WARN and "GFKERNELS_CACHE_DIR" in found.advice


def test_no_pidfd_is_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(_: int) -> int:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(os, "pidfd_open", refused, raising=False)
    assert _named(doctor.processes(), "pidfd").state == WARN


@pytest.mark.parametrize(("scope", "state"), [("", OK), ("0", OK), ("1", OK), ("2", WARN), ("3", WARN)])
def test_yama(scope: str, state: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.geteuid", lambda: 1000)
    monkeypatch.setattr(doctor, "_read", lambda path: scope if "yama" in path else "Seccomp:\t2")
    found = doctor.processes()
    assert _named(found, "Yama").state == state
    assert "a filter" in _named(found, "seccomp").found


def test_no_loopback_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*_: Any) -> Any:
        raise OSError(99, "Cannot assign requested address")

    monkeypatch.setattr("socket.create_server", refused)
    found = _named(doctor.network(), "loopback")
    assert found.state == FAIL and "ip link set lo up" in found.advice


def test_frameworks_that_are_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda *_: None)
    monkeypatch.setattr(doctor, "_program", lambda _: None)
    found = doctor.others()
    assert all(finding.state == NOTE for finding in found)
    assert "gfkernels[mpi]" in _named(found, "mpi4py").advice


def test_a_self_test_that_fails_says_what_its_ranks_said(monkeypatch: pytest.MonkeyPatch) -> None:
    ended = subprocess.CompletedProcess([], 1, "", "ConnectError: no route\ngfkernels run: rank 0 failed\n")
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: ended)
    (found,) = doctor.self_test()
    assert found.state == FAIL and "ConnectError: no route" in found.found


def test_a_probe_that_breaks_is_a_finding(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken() -> list[Finding]:
        raise OSError(5, "Input/output error")

    broken.__name__ = "memory"
    monkeypatch.setattr(doctor, "memory", broken)
    found = doctor.examine(run=False)
    assert "Input/output error" in _named(found, "memory").found
    assert not doctor.works(found)
