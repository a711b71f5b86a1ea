"""Where files lie: on disks and behind addresses, whole or in parts that several machines read."""
