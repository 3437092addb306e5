"""Workers of openinfer-dynamo under Dynamo's own runtime. `python -m tools.dynamo` (`__main__.py`)."""
