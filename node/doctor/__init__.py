"""``node doctor``: what on this machine, or between it and its peers, would keep it from training.

A check returns a :class:`~node.doctor.finding.Finding`: ok, warn or fail, what was found, why that
matters and what to do. :mod:`node.doctor.command` runs them in order.
"""
