"""A whole process in virtual time: its threads, locks, clocks, event loops, connections and entropy follow one seed.

world.py             `World`: tasks in place of threads, one of which runs at a time, and the virtual clock
standard_library.py  `install`: `threading`, `queue`, `time`, `random` and `os.urandom` as the world has them
event_loop.py        `VirtualEventLoop`: asyncio in a task of the world
network.py           connections: with delays, cuts, stalls and slow readers
sockets.py           ends of connections and pipes, by descriptor; who listens where
descriptors.py       `install_sockets`: sockets, selectors, reading and writing by descriptor
processes.py         `install_processes`: programs in processes of the world, which are started, signalled and killed
child.py             the program that a simulation runs in; `run_in_child` starts it

The seam between product code and the world is the standard library itself: code reads clocks, starts threads and takes
entropy through the modules above and in no other way, so that what is simulated is what is served. The world must be
there before any such name is bound, hence the process of its own.
"""
