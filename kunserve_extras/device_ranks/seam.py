"""What the seam ``ranks`` of an engine takes: rank 0's backend, and the other ranks."""

from kunserve_extras.device_ranks.backend import DeviceRanksBackend
from kunserve_extras.device_ranks.rank import DeviceRank

backend = DeviceRanksBackend
rank = DeviceRank
