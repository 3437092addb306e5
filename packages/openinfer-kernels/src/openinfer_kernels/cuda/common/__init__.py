"""What every kernel's host code needs: the device, launches, memory, copies, streams and graphs."""
