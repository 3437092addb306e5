"""The errors of this package.

```
KernelsError
├── ArrayMismatchError      an array of another dtype, layout or shape than an operator takes
├── CudaCallError           a call of the CUDA driver or of cuBLASLt failed
├── DeferredAdaptersError   an operator runs where a product still lacks what adapters add to it
├── DeviceMemoryStateError  device memory is used in a way that its state does not allow
├── DeviceUnavailableError  this machine cannot run the CUDA operators: packages, driver or GPU are missing or too old
├── KernelBuildError        a CUDA source could not be compiled
├── KernelProviderError     a provider of operators does not do what it says
├── OperatorMissingError    an operator that this device has no kernel for
├── OutOfDeviceMemoryError  a device has not as much free memory as was asked for
├── RopeConfigError         a rotary embedding that a config asks for and this package refuses
├── WeightDtypeError        a weight in a dtype that no operator reads
└── WeightValueError        a quantised weight with a code that is no number
```
"""

CUDA_IS_BROUGHT_BY = "`./run install --cuda13` in a checkout of openinfer brings it (--cuda12 for a driver before 580)"
NCCL_IS_BROUGHT_BY = "`./run install --cuda13 --nccl` in a checkout of openinfer brings it (or --cuda12 --nccl)"


class KernelsError(Exception):
    """Root of every error that this package raises on purpose."""


class ArrayMismatchError(KernelsError):
    """An operator got an array whose dtype, layout or shape it does not take."""


class CudaCallError(KernelsError):
    """A call of the CUDA driver or of cuBLASLt failed; the library's name of the error."""


class DeferredAdaptersError(KernelsError):
    """An operator other than the one that was to add adapters to a product; which two."""


class DeviceMemoryStateError(KernelsError):
    """Device memory that is given back is used, or another array is made than in its place before; which."""


class DeviceUnavailableError(KernelsError):
    """The CUDA operators cannot run on this machine; what is missing or too old, and what to install."""


class KernelBuildError(KernelsError):
    """A CUDA source could not be compiled; the compiler's message."""


class KernelProviderError(KernelsError):
    """A provider of operators does not do what it says; which, and what was missing."""


class OperatorMissingError(KernelsError):
    """A device has no kernel for an operator of the contract; which one, and where it runs."""


class OutOfDeviceMemoryError(KernelsError):
    """A device has less free memory than was asked for; other processes may hold it."""


class RopeConfigError(KernelsError):
    """A config asks for a rotary embedding that is unknown, incomplete or contradicts itself."""


class WeightDtypeError(KernelsError):
    """A weight was handed over in a dtype that `Ops.upload_weight` does not read."""


class WeightValueError(KernelsError):
    """A quantised weight has a code that is no number; which."""
