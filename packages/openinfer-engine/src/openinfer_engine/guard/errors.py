"""What the guard raises inside."""

from openinfer_core.errors import ContractViolation


class BadPlan(ContractViolation):
    """A plan breaks the contract; the message says how, and is safe to show."""
