"""Several models that take turns in the memory of one machine: `openinfer serve --models FILE`.

models_file.py  the file: models, and how they share
turns.py        `Turns`: which models are awake, who waits, who gives way
child.py        `ChildServer`: a server of one model, a process of its own that sleeps and wakes
model_server.py the process of such a server, which ends when the router has
upstream.py     requests to such a server
front.py        `Front`: the HTTP server that clients ask, which hands each request to the server of its model
running.py      all of it together, until a signal
"""
