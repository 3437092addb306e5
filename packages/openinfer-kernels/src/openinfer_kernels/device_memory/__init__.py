"""Device memory whose addresses stay while what backs them is given back; pure Python over a few calls of a driver.

physical.py      `PhysicalMemory`: the calls
mapped_range.py  `MappedRange`: addresses that are reserved once, backed, given back and backed again
arena.py         `Arena`: arrays inside of a range; `RepeatedArena`: the same arrays at the same addresses again

`openinfer_kernels.cuda.common.mapped_memory` has the driver's calls and CuPy's arrays.
"""
