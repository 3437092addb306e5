"""The default scheduler: a token budget per step, continuous batching, chunked prompts, no phases.

token_budget.py   TokenBudgetScheduler: add, abort, plan, apply
sequence.py       one request inside the scheduler, its states and the function that enforces them
line.py           who runs, who was preempted, who waits; slots and KV blocks; admission and preemption
waiting.py        the queue in policy order, with the fence around the policy
loads.py          who waits for a prefix from KV tiers
saves.py          sealed blocks on their way to KV tiers
pace.py           what steps take, and how many prompt tokens fit into one beside decode rows
draft.py          a step's columns while it is planned; what is remembered of a step in flight
harvest.py        what a step's result means for its sequences, as events
books.py          integrity of all that, for tests
"""

from openinfer_engine.scheduler.token_budget import TokenBudgetScheduler

__all__ = ["TokenBudgetScheduler"]
