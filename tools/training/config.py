"""The settings of a training run: a YAML file, checked key by key before any process waits for another."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    ValidationError,
    model_validator,
)

from shardstream.batching import plan_batch


class ConfigError(ValueError):
    """A config file that cannot be used; the message has one line for each thing that is wrong."""


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Data(_Section):
    """What is read, and how it is cut into micro-batches.

    Attributes:
        manifest: Where the manifest lies, as ``shardstream index`` wrote it; or
        mixture: Several of them, as ``shardstream.mixture_file.mixture_of`` takes them. One of both must be given.
        tokens: Column of token lists, or of text or bytes, of which every byte is a token.
        global_batch: Documents of one optimizer step over all ranks; it stays the same at every world size.
        max_micro_batch: Most documents of one forward; the micro-batch is the largest that fits the world size.
        num_workers: DataLoader worker processes of each rank; 0 reads with threads.
        tail: What happens to an epoch's last, partial window; a mixture has none.
        packing: Whether documents are packed into sequences of the model's context length, which are then what is
            counted: ``"tokens"``, ``"whole"`` without cutting them, or ``"unpacked"``, one a sequence; None for a
            document a sample. The manifest needs token counts. A mixture's source may say it for itself.
        eos_id: Token after each packed document.
    """

    manifest: str | None = None
    mixture: dict[str, Any] | None = None
    tokens: str = "tokens"
    packing: Literal["tokens", "whole", "unpacked"] | None = None
    eos_id: NonNegativeInt | None = None
    global_batch: PositiveInt
    max_micro_batch: PositiveInt
    num_workers: NonNegativeInt = 0
    tail: Literal["pad", "drop"] | None = None

    @model_validator(mode="after")
    def _check_data(self) -> Data:
        if (self.manifest is None) == (self.mixture is None):
            raise ValueError("give either manifest or mixture")
        return self

    def micro_batch(self, world_size: int) -> int:
        """Returns the largest micro-batch with which the global batch stays what it is.

        Raises:
            PlanError: If the global batch cannot be dealt to so many ranks; it names the nearest numbers that fit.

        Example:
            >>> data = Data(manifest="m.parquet", global_batch=48, max_micro_batch=12)
            >>> data.micro_batch(2), data.micro_batch(3)
            (12, 8)
        """
        plan = plan_batch(global_batch=self.global_batch, world_size=world_size, max_micro_batch=self.max_micro_batch)
        return plan.micro_batch


class Model(_Section):
    """A byte-level transformer; see ``tools/training/model.py``."""

    context_length: PositiveInt = 1024
    width: PositiveInt = 64
    num_layers: PositiveInt = 4
    num_heads: PositiveInt = 4
    dropout: Annotated[float, Field(ge=0, lt=1)] = 0.0


class Optimizer(_Section):
    """AdamW with a linear warm-up and a cosine down to a tenth."""

    learning_rate: PositiveFloat = 1e-3
    weight_decay: NonNegativeFloat = 0.1
    num_warmup_steps: NonNegativeInt = 20
    max_gradient_norm: PositiveFloat = 1.0


class Checkpoint(_Section):
    """How often the run is saved, and how many of the newest are kept."""

    every_num_steps: PositiveInt = 100
    num_kept: PositiveInt = 3


class Config(_Section):
    """A training run.

    Attributes:
        run: Folder of checkpoints, metrics and logs; a run that is found there is continued.
        seed: Decides order, initial weights and dropout.
        num_epochs: When the run ends.
        precision: Of weights and arithmetic; ``bfloat16`` is autocast over float32 weights.
        timeout_s: Until all ranks must have come, and for every collective.
    """

    run: Path
    seed: int = 0
    num_epochs: PositiveInt = 1
    precision: Literal["float32", "float64", "bfloat16"] = "float32"
    timeout_s: PositiveFloat = 120.0
    data: Data
    model: Model = Model()
    optimizer: Optimizer = Optimizer()
    checkpoint: Checkpoint = Checkpoint()


def load_config(path: Path, overrides: Iterable[str] = ()) -> Config:
    """Reads a config file.

    Args:
        path: A YAML file.
        overrides: ``key=value`` texts that replace entries of the file: a dotted key and a YAML value.

    Raises:
        ConfigError: If the file cannot be read, or a key or a value is wrong; all that are wrong are listed.
    """
    try:
        loaded = yaml.safe_load(path.read_text("utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} cannot be read: {error}") from None
    except yaml.YAMLError as error:
        raise ConfigError(f"{path} is not YAML: {error}") from None
    if not isinstance(loaded, dict):
        raise ConfigError(f"{path} must hold keys and values, found {type(loaded).__name__}")
    for override in overrides:
        _override(loaded, override)
    try:
        return Config.model_validate(loaded)
    except ValidationError as error:
        problems = [_explained([str(key) for key in each["loc"]], each["msg"], each["type"]) for each in error.errors()]
        raise ConfigError("\n".join(f"{path}: {problem}" for problem in problems)) from None


def _override(config: dict[str, Any], override: str) -> None:
    key, equals, text = override.partition("=")
    *sections, name = key.strip().split(".")
    if not equals or not name:
        raise ConfigError(f"--set {override}: expected key=value, such as model.width=96")
    for section in sections:
        config = config.setdefault(section, {})
        if not isinstance(config, dict):
            raise ConfigError(f"--set {override}: {section!r} is a value, not a section")
    try:
        config[name] = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ConfigError(f"--set {override}: the value is not YAML: {error}") from None


def _explained(keys: list[str], message: str, kind: str) -> str:
    """One line on one fault; an unknown key is answered with the nearest name there is."""
    dotted = ".".join(keys)
    if kind != "extra_forbidden":
        return f"{dotted}: {message[0].lower()}{message[1:]}"
    known = sorted(_fields(keys[:-1]))
    near = difflib.get_close_matches(keys[-1], known, 1)
    return f"{dotted}: unknown key" + (f"; did you mean {near[0]!r}?" if near else f"; known: {', '.join(known)}")


def _fields(sections: list[str]) -> Mapping[str, Any]:
    section: type[BaseModel] = Config
    for name in sections:
        annotation = section.model_fields[name].annotation
        assert isinstance(annotation, type)  # noqa: S101 - only sections have keys below them
        section = annotation
    return section.model_fields
