"""Tiers on servers: blocks as objects of Valkey, Redis or S3."""
