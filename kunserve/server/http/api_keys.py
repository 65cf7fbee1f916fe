"""The keys that let clients in: one from the command line, more from a file."""

import hmac
import logging
from pathlib import Path

from kunserve.core.config import ServerConfig
from kunserve.core.errors import ConfigError

logger = logging.getLogger("kunserve.server")


class ApiKeys:
    """Every key that is good now. A file's keys are read again when somebody says so."""

    def __init__(self, key: str | None, file: Path | None) -> None:
        """Raises ConfigError for a file that cannot be read, or that holds no key."""
        self._given = () if key is None else (key.encode(),)
        self._file = file
        self._keys = self._read()

    @staticmethod
    def of(server: ServerConfig) -> "ApiKeys | None":
        """The keys of these settings; None if they ask for no key. Raises ConfigError."""
        if not server.wants_key:
            return None
        file = server.api_key_file
        return ApiKeys(server.api_key, None if file is None else Path(file))

    @property
    def has_file(self) -> bool:
        """Whether ``reload`` may find others."""
        return self._file is not None

    def has(self, key: bytes) -> bool:
        """Whether a client with this key may enter. How long it takes tells nothing of the keys."""
        is_known = False
        for one in self._keys:
            is_known |= hmac.compare_digest(key, one)
        return is_known

    def reload(self) -> None:
        """Read the file anew (SIGHUP). One with a mistake changes nothing."""
        try:
            self._keys = self._read()
        except ConfigError as error:
            logger.error("keys are not read anew: %s", error)
        else:
            logger.info("keys read anew file=%s keys=%d", self._file, len(self._keys))

    def _read(self) -> tuple[bytes, ...]:
        if self._file is None:
            return self._given
        try:
            lines = self._file.read_text("ascii").splitlines()
        except OSError as error:
            raise ConfigError(f"--api-key-file {self._file}: {error.strerror}") from None
        except UnicodeDecodeError:
            raise ConfigError(f"--api-key-file {self._file}: keys are plain ASCII") from None
        keys = []
        for number, line in enumerate(lines, 1):
            key = line.strip()
            if not key or key.startswith("#"):
                continue
            if not key.isprintable() or " " in key:
                raise ConfigError(f"--api-key-file {self._file}, line {number}: no key has spaces")
            keys.append(key.encode())
        if not keys:
            raise ConfigError(f"--api-key-file {self._file} holds no key: nobody could enter")
        return (*self._given, *keys)
