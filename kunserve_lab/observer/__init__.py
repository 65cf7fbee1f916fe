"""``kunserve observe``: what drops would do for a fleet of other servers, by their metrics."""
