"""One island on several hosts: host 0 has the daemon, the others only trainer ranks."""
