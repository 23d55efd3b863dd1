"""How a checkpoint advises to sample."""

from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, Self

from musespark.config.sampling import SamplingParams
from musespark.config.strict import read_json_object
from musespark.errors import ConfigError, RequestError


@dataclass(frozen=True, slots=True)
class SamplingDefaults:
    """What a request means that does not say how to sample: the checkpoint's own advice."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0

    @classmethod
    def from_folder(cls, folder: Path) -> Self:
        """From generation_config.json; OpenAI's defaults where it says nothing.

        Raises:
            ConfigError: a value that cannot be used.
        """
        path = folder / "generation_config.json"
        if not path.is_file():
            return cls()
        stored = read_json_object(path)
        known = [field.name for field in fields(cls)]
        given = {name: stored[name] for name in known if stored.get(name) is not None}
        if stored.get("do_sample") is False:
            given["temperature"] = 0.0
        try:
            SamplingParams(**given)
        except (RequestError, TypeError) as error:
            raise ConfigError(f"{path}: {error}") from None
        return cls(**given)

    def params(self, **given: Any) -> SamplingParams:
        """Settings for one request: what is given and not None, before what is advised.

        Raises:
            RequestError: a value outside its range.
        """
        settings = asdict(self)
        settings.update({name: value for name, value in given.items() if value is not None})
        return SamplingParams(**settings)
