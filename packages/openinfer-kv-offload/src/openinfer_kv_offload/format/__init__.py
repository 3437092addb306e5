"""What disks and servers hold of a block: its record, the checksum in it, and the manifest of a store."""
