"""What a server asks of the GPUs before it starts instances: the seam ``cards``. Without torch."""

from kunserve_extras.torch_body.cuda.cards import auto_device, find_kept, find_share
from kunserve_extras.torch_body.cuda.copy_rate import measure_copy_rate

__all__ = ["auto_device", "find_kept", "find_share", "measure_copy_rate"]
