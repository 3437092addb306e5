"""Conformance kits and fakes for implementers of a part of the contract. No test framework is needed.

engine        `check_engine` and its parts, for an `EngineHandle`
scheduler     `check_scheduler` and its parts, for a `Scheduler`
queue_policy  `check_queue_policy`, for a `QueuePolicy`
fake_device   `FakeDevice`: runs step plans on a model that is a hash, with a KV cache that notices every mistake
fake_drafter  `FakeDrafter`: drafts that are right, wrong, mixed or hostile

A violation raises `ConformanceError`, an `AssertionError` that says what the contract demands.
"""

from openinfer_core.testing.errors import ConformanceError

__all__ = ["ConformanceError"]
