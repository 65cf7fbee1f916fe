"""Filling the one copy of the weights that instances of a node share, each a part of it."""

from kunserve.core.layout import LayerRange
from kunserve.engine.memory.weights_file import WeightsFile
from kunserve.engine.weights.loader import WeightLoader
from kunserve.transport.bulk.movable_memory import WriteGate


class SharedLoader:
    """Implements ``Loader``. Who comes when everything is there opens no file of the model."""

    def __init__(self, loader: WeightLoader, file: WeightsFile, address: int) -> None:
        """``loader`` fills the file's window; the weights are read at ``address``."""
        self._loader = loader
        self._file = file
        self._address = address

    def check(self) -> None:
        """See ``Loader``."""
        if self._file.missing:
            self._loader.check()

    def load_ends(self) -> None:
        """They come with the layers, because another instance may be at them."""

    def load_layers(self, layers: LayerRange, gate: WriteGate | None = None) -> None:
        """Return once everything is there, whoever has loaded it."""
        assert gate is None, f"shared weights are loaded once, and not {layers} again"
        self._file.load(self._load_section)
        self._file.show(self._address)

    def _load_section(self, section: int) -> None:
        if section == 0:
            self._loader.load_ends()
        else:
            self._loader.load_layers(LayerRange(section - 1, section))
