"""The default scheduler: a token budget per step, continuous batching, chunked prompts, no phases.

token_budget.py   TokenBudgetScheduler: the three verbs add, plan, apply (and abort)
sequence.py       one request inside the scheduler, its states and the function that enforces them
waiting.py        the queue in policy order, with the fence around the policy
draft.py          the columns of a step while it is planned; what the scheduler remembers of a step in flight
"""

from openinfer_engine.scheduler.token_budget import TokenBudgetScheduler

__all__ = ["TokenBudgetScheduler"]
