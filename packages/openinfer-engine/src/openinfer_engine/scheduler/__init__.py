"""The default scheduler: a token budget per step, continuous batching, chunked prompts, no phases.

token_budget.py   TokenBudgetScheduler: add, abort, plan, apply
sequence.py       one request inside the scheduler, its states and the function that enforces them
run_queue.py      who runs, who was preempted, who waits; slots and KV blocks; preemption
admission.py      what an admitted sequence begins with: blocks, a sequence slot, states
loads.py          who waits for a prefix from KV tiers
saves.py          sealed blocks on their way to KV tiers
snapshots.py      copies of recurrent states; state_prefixes.py, state_load.py, state_saves.py: prefixes that need them
itl_limit.py      what steps take, and how many prompt tokens fit into one next to decode rows
step_builder.py   a step's columns while it is planned; what is remembered of a step in flight
outputs.py        what a step's result means for its sequences, as events
integrity.py      whether all that agrees, for tests
"""

from openinfer_engine.scheduler.token_budget import TokenBudgetScheduler

OPENINFER_CONTRACT = 1

__all__ = ["TokenBudgetScheduler"]
