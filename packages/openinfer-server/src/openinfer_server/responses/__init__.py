"""`/v1/responses`: OpenAI's newer protocol, in which an answer is a list of items and conversations can be continued.

types.py      what a client sends; checks.py: what of it cannot be honoured
items.py      the items among it; turns.py: the turns they stand for
plan.py       all of that                    ─► what the engine is asked
objects.py    what a client gets, events.py: piece by piece
builder.py    deltas of the answer's text    ─► items and events
run.py        one response in the making     ─► its readers
store.py      what is kept, within bounds    ─► previous_response_id, retrieve, background
handlers.py   the handlers; routes.py: their routes
"""
