"""`node demo`: a whole swarm on this machine, with everything that can happen to one."""
