"""For tests of packages that bring a part: a model family's equations, run step by step without an engine."""

from openinfer_engine.testing.family import FamilyHarness, check_family, check_steps

__all__ = ["FamilyHarness", "check_family", "check_steps"]
