"""Replaying a real server's load in virtual time: with step times fitted from `openinfer bench offline`.

fitted.py         `simulate fit --offline`: the file of all times, from results of benchmarks
host_times.py     what prompts take on the host
command.py        `simulate replay`
served.py         a phase of `bench serve` in a world, with its own client; comparison.py: beside measured rows
stack.py          the served stack with fitted times; runner.py: the GPU
arrivals.py       arrival traces: when requests came, and how long they were
steps.py          a step trace, call by call on its scheduler; step_times.py: what its steps took and should have
"""
