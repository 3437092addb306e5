"""Metrics, traces, and the routes of operators."""
