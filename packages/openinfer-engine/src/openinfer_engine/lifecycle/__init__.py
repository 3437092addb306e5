"""Engines that stop to serve for a while: paused, asleep, or between the old weights and the new ones.

lifecycle.py  `Lifecycle`: which of these an engine is in, and what every command does
folders.py    folders that weights may come from, and whether one still holds what was read from it
orders.py     what rank 0 tells all ranks, and `WeightsSource`: where weights come from
rank.py       `ReloadableWorker`: a rank that obeys
device_tensors.py  weights in another process's memory of a GPU
memory.py     giving memory of this machine back
"""
