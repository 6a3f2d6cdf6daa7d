"""Estimates of what a memory of a model will cost, before it is computed."""

from limpet.planning.plan import Plan, plan

__all__ = ["Plan", "plan"]
