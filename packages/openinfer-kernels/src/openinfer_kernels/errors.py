"""The errors of this package.

```
KernelsError
├── RopeConfigError     a rotary embedding that a config asks for and this package refuses
└── WeightDtypeError    a weight in a dtype that no operator reads
```
"""


class KernelsError(Exception):
    """Root of every error that this package raises on purpose."""


class RopeConfigError(KernelsError):
    """A config asks for a rotary embedding that is unknown, incomplete or contradicts itself."""


class WeightDtypeError(KernelsError):
    """A weight was handed over in a dtype that `Ops.upload_weight` does not read."""
