"""The data sets that a trace or lengths setting may name, and where each one's file is.

A name stands wherever a path may stand: ``--trace azure-2023-merged-640s``, or
``lengths = "longbench"`` in an experiment. README.md beside the shipped files has their sources,
licences and cuts.
"""

from dataclasses import dataclass
from pathlib import Path

from kunserve.core.errors import ConfigError

SHIPPED_FOLDER = Path(__file__).parent
_AZURE = ("Azure/AzurePublicDataset", "b469a113cedca53ddc3bdea71a143dc4b7d8700c")
_BURSTGPT = ("HPMLL/BurstGPT", "e92f533b6c85ea7f4164fb3d97d1aa2c3edacbc8")


@dataclass(frozen=True, slots=True)
class Download:
    """A file of a public repository at one commit."""

    repository: str
    commit: str
    path: str
    blob: str
    """git's name of the content, which doubles as its checksum."""
    size: str
    """For people; the checksum decides."""

    @property
    def url(self) -> str:
        """Where GitHub serves the file."""
        return f"https://raw.githubusercontent.com/{self.repository}/{self.commit}/{self.path}"


@dataclass(frozen=True, slots=True)
class DataSet:
    """One name of the catalogue."""

    name: str
    kind: str
    """``trace`` (arrivals and lengths) or ``lengths``."""
    licence: str
    summary: str
    file: str | None
    """Its file's name, shipped or downloaded. None: it is generated, and has no file."""
    download: Download | None = None
    """None: it is shipped with the package, or generated."""


BURSTGPT_LIKE = "burstgpt-like"
"""Lengths that are drawn from a fit (`workload.lengths.burstgpt_lengths`)."""

DATA_SETS = {
    data.name: data
    for data in (
        DataSet(
            "azure-2023-merged-640s",
            "trace",
            "CC-BY 4.0",
            "640 s of two Azure services on one clock: 5,119 requests with two bursts",
            "azure-2023-merged-640s.csv.gz",
        ),
        DataSet(
            "longbench",
            "lengths",
            "MIT, Apache-2.0",
            "400 documents and summaries of LongBench: mean 5.9 K tokens in, 513 out",
            "longbench.csv",
        ),
        DataSet(
            "sharegpt",
            "lengths",
            "Apache-2.0",
            "30,731 turns of ShareGPT chats, up to 8 K tokens together",
            "sharegpt.csv.gz",
        ),
        DataSet(
            BURSTGPT_LIKE,
            "lengths",
            "-",
            "a lognormal fit to BurstGPT's mean lengths, 642 in and 262 out",
            None,
        ),
        DataSet(
            "azure-2023-conv",
            "trace",
            "CC-BY 4.0",
            "one hour of Azure's conversation service: 19,366 requests",
            "azure-2023-conv.csv",
            Download(
                *_AZURE,
                "data/AzureLLMInferenceTrace_conv.csv",
                "5b9219f2caf93bbbf95ec29894e206115658e235",
                "0.7 MB",
            ),
        ),
        DataSet(
            "azure-2023-code",
            "trace",
            "CC-BY 4.0",
            "one hour of Azure's code service: 8,819 requests",
            "azure-2023-code.csv",
            Download(
                *_AZURE,
                "data/AzureLLMInferenceTrace_code.csv",
                "62bd8109d0f2b1bc48206d397ecca48d8de03aab",
                "0.3 MB",
            ),
        ),
        DataSet(
            "burstgpt",
            "trace",
            "CC-BY 4.0",
            "BurstGPT, 61 days: 1,429,737 requests. The paper replays 775 of them",
            "burstgpt.csv",
            Download(
                *_BURSTGPT,
                "data/BurstGPT_1.csv",
                "f95dd2c84454b067fdd0973858c55ecfe31bdad7",
                "about 50 MB",
            ),
        ),
    )
}


def cache_folder() -> Path:
    """Where downloaded files are kept."""
    return Path.home() / ".cache" / "kunserve" / "data"


def file_of(data: DataSet, cache: Path | None = None) -> Path | None:
    """Where the data set's file is, or would be. None for one that is generated."""
    if data.file is None:
        return None
    if data.download is None:
        return SHIPPED_FOLDER / data.file
    return (cache_folder() if cache is None else cache) / data.file


def locate(value: str | Path, cache: Path | None = None) -> Path:
    """The file that a setting means: a data set's by its name, else the path itself.

    Raises ConfigError for a data set that is not on this machine yet, and for what looks like a
    name but is none.
    """
    data = DATA_SETS.get(str(value))
    if data is None:
        if not Path(value).suffix and not Path(value).exists():
            names = ", ".join(DATA_SETS)
            raise ConfigError(f"{value} is neither a file nor a data set; there are: {names}")
        return Path(value)
    path = file_of(data, cache)
    if path is None:
        raise ConfigError(f"{data.name} is generated and has no file: it can only be lengths")
    if not path.exists():
        assert data.download is not None, f"{path} is missing from the package"
        raise ConfigError(
            f"the data set {data.name} is not on this machine: `kunserve data {data.name}` "
            f"downloads it ({data.download.size}, {data.licence})"
        )
    return path
