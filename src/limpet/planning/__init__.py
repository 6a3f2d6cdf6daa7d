"""What a memory of a model will cost, before it is made."""

from limpet.planning.plan import Plan, plan

__all__ = ["Plan", "plan"]
