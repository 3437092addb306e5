"""`/v1/responses`: OpenAI's newer protocol, in which an answer is a list of items and conversations can be continued.

items.py      what a client sends            ─► turns, as every other route has them
objects.py    what a client gets
builder.py    deltas of the answer's text    ─► items and events
run.py        one response in the making     ─► its readers
store.py      what is kept, within bounds    ─► previous_response_id, retrieve, background
handlers.py   the routes
"""
