"""Owns plans: what every rank does in a collective, as integers; built by pure functions, checked, drawn, simulated."""

from __future__ import annotations

from gfkernels.plan.model import Plan, PlanBuilder, PlanError

__all__ = ["Plan", "PlanBuilder", "PlanError"]
