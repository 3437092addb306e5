"""Drafts of decode rows: which rows of a step have how many, and whether they are worth their time."""
