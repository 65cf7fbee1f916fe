"""A profile on disk: what steps of one model cost on one device, and how well that is known."""

import os
from dataclasses import dataclass
from pathlib import Path

import msgspec

from kunserve.core.cost import CostCoefficients, CostSample
from kunserve.core.errors import ConfigError
from kunserve.model.spec import ModelSpec

FORMAT = 3


@dataclass(frozen=True, slots=True)
class ProfileSubject:
    """What was measured. A profile holds for nothing else."""

    model: str
    architecture: str
    num_layers: int
    hidden_size: int
    dtype: str
    num_threads: int
    block_size: int
    quantization: str | None = None
    """How weights are quantised in memory, if they are."""
    tensor_parallel_size: int = 1
    """Ranks of the instance; the threads are those of all of them."""

    @classmethod
    def of(
        cls,
        spec: ModelSpec,
        num_threads: int,
        block_size: int,
        quantization: str | None = None,
        tensor_parallel_size: int = 1,
    ) -> "ProfileSubject":
        """The subject of a profile for this model and these settings."""
        return cls(
            spec.name,
            spec.architecture,
            spec.num_layers,
            spec.hidden_size,
            spec.dtype,
            num_threads,
            block_size,
            quantization,
            tensor_parallel_size,
        )


@dataclass(frozen=True, slots=True)
class RegionError:
    """Held-out relative error of one region."""

    num_samples: int
    mean: float
    largest: float


@dataclass(frozen=True, slots=True)
class Profile:
    """One file of ``kunserve profile``."""

    format: int
    subject: ProfileSubject
    device: str
    clock: str
    """What ``seconds`` are: CPU time of the computing thread, or wall time."""
    versions: dict[str, str]
    created: str
    """ISO 8601, UTC."""
    coefficients: CostCoefficients
    num_instances: int
    """That computed on the machine meanwhile, the measured one included."""
    serving: CostCoefficients
    """Fitted to wall times while those instances compute: how long steps take in a burst."""
    alone: CostCoefficients
    """The same while the others rest: they leave it all of the machine's memory bandwidth."""
    errors: dict[str, dict[str, RegionError]]
    """Cost model -> region -> error."""
    samples: tuple[CostSample, ...]


def default_path(subject: ProfileSubject) -> Path:
    """Where ``kunserve profile`` writes and ``kunserve serve`` looks.

    Raises ConfigError for a user without a home, as in some containers.
    """
    name = "".join(c if c.isalnum() or c in "-._" else "-" for c in subject.model)
    threads = f"{subject.num_threads}t"
    if subject.tensor_parallel_size > 1:
        threads += f"-tp{subject.tensor_parallel_size}"
    try:
        folder = Path.home() / ".cache" / "kunserve" / "profiles"
    except RuntimeError:
        raise ConfigError("this user has no home folder: name the profile's file") from None
    kind = "-".join(filter(None, (subject.dtype, subject.quantization)))
    return folder / f"{name}-{kind}-{threads}-b{subject.block_size}.json"


def write_profile(path: Path, profile: Profile) -> None:
    """Write, whole or not at all."""
    text = msgspec.json.format(msgspec.json.encode(profile), indent=1)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        part = path.with_name(path.name + ".part")
        part.write_bytes(text)
        part.replace(path)
    except OSError as error:
        raise ConfigError(f"cannot write the profile {path}: {error.strerror}") from None


def read_profile(path: Path) -> Profile:
    """The profile in a file. Raises ConfigError when there is none or it makes no sense."""
    try:
        profile = msgspec.json.decode(path.read_bytes(), type=Profile)
    except OSError as error:
        raise ConfigError(f"cannot read the profile {path}: {error.strerror}") from None
    except (msgspec.MsgspecError, AssertionError) as error:
        raise ConfigError(f"{path} is no profile of `kunserve profile`: {error}") from None
    if profile.format != FORMAT:
        raise ConfigError(
            f"{path} has format {profile.format}, not {FORMAT}: measure it again with "
            f"`kunserve profile`"
        )
    return profile


def find_cost(subject: ProfileSubject, path: Path | None) -> tuple[CostCoefficients | None, str]:
    """Coefficients for a subject and where they are from, for the log.

    A profile that is named must exist and fit; the default place may be empty (None).
    """
    if path is None:
        try:
            path = default_path(subject)
        except ConfigError as error:
            return None, str(error)
        if not os.access(path, os.R_OK):
            return None, f"no profile at {path} (`kunserve profile` makes one)"
    profile = read_profile(path)
    if profile.subject != subject:
        raise ConfigError(f"{path} is of {profile.subject}, not of {subject}")
    return profile.coefficients, str(path)
