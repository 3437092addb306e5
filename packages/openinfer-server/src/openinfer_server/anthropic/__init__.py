"""`/v1/messages`: Anthropic's protocol, in which an answer is a list of blocks.

types.py     what a client sends
blocks.py    its blocks                  ─► turns, as every other route has them
objects.py   what a client gets, whole and as events
builder.py   deltas of the answer's text ─► blocks and events
handlers.py  the routes
"""
