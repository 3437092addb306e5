"""Conversations that will go on: what is done for their next turn before it arrives."""
