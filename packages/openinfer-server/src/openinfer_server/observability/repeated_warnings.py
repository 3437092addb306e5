"""`RepeatedWarnings`: a filter of logs, so that who sends what is no HTTP, again and again, does not fill the disk."""

import logging
import time

_PERIOD_S = 60.0
_MOST_MESSAGES = 64  # that are told apart; uvicorn has a handful


class RepeatedWarnings(logging.Filter):
    """Lets each warning through once a minute, then with how often it came; what is worse than a warning passes."""

    def __init__(self) -> None:
        super().__init__()
        self._until_s: dict[str, float] = {}
        self._unsaid: dict[str, int] = {}

    def filter(self, record: logging.LogRecord) -> bool:
        if record.levelno > logging.WARNING:
            return True
        message, now_s = str(record.msg), time.monotonic()
        if now_s < self._until_s.get(message, now_s):
            self._unsaid[message] = self._unsaid.get(message, 0) + 1
            return False
        if len(self._until_s) >= _MOST_MESSAGES:
            self._until_s.clear()
            self._unsaid.clear()
        self._until_s[message] = now_s + _PERIOD_S
        if unsaid := self._unsaid.pop(message, 0):
            record.msg = f"{message} ({unsaid} more since the last line)"
        return True
