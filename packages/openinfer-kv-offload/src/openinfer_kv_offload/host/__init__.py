"""The tier in this process's memory."""
