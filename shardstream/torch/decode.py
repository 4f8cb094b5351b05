"""Decoding of WebDataset samples (bytes by suffix) with the decoders of the ``webdataset`` package."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, TypeAlias

from shardstream.errors import DecodeError, PlanError

FieldHandler: TypeAlias = Callable[[str, bytes], Any]

_UNPICKLING = (".pkl", ".pickle", ".pyd", ".pth")
_NUMPY = (".npy", ".npz")


@dataclass(frozen=True, eq=False)
class Decode:
    """A transform that decodes the fields of a sample; made by ``decode``, which explains the fields."""

    handlers: tuple[str | FieldHandler, ...]
    only: frozenset[str] | None
    unpickle: bool

    def __call__(self, sample: Mapping[str, Any]) -> dict[str, Any]:
        """Returns the sample with its ``bytes`` decoded; other values and ``__key__`` and the like are kept.

        Raises:
            DecodeError: A field cannot be decoded; names sample, field and cause.
        """
        decoded = dict(sample)
        for field, value in sample.items():
            is_ours = not field.startswith("__") and (self.only is None or field in self.only)
            if not is_ours or not isinstance(value, bytes):
                continue
            try:
                decoded[field] = self.decoder.decode1(field, value)
            except Exception as cause:
                raise DecodeError(
                    f"field {field!r} of sample {sample.get('__key__')!r} cannot be decoded",
                    url=sample.get("__url__"),
                    found=f"{len(value)} bytes and {type(cause).__name__}: {cause}",
                    hint="repair it, keep it as bytes with decode(only=...), or see on_error= and unpickle=True",
                ) from cause
        return decoded

    @cached_property
    def decoder(self) -> Any:
        """The ``webdataset`` decoder; raises ``PlanError`` where the fields make none."""
        try:
            from webdataset import autodecode
        except ImportError as error:
            raise PlanError("decode() needs the webdataset package", hint="pip install webdataset") from error
        handlers: list[FieldHandler] = []
        for handler in self.handlers:
            if isinstance(handler, str):
                if handler not in autodecode.imagespecs:
                    names = sorted(autodecode.imagespecs)
                    raise PlanError("unknown image decoder", expected=f"one of {names}", found=repr(handler))
                handlers.append(autodecode.ImageHandler(handler))
            elif callable(handler):
                handlers.append(handler)
            else:
                raise PlanError("a decode handler is a name or a callable", found=repr(handler))
        post = [_numpy_with_objects, autodecode.basichandlers] if self.unpickle else [_common_safe]
        return autodecode.Decoder(handlers, post=post)


def decode(*handlers: str | FieldHandler, only: str | None = None, unpickle: bool = False) -> Decode:
    """Returns a transform that decodes WebDataset samples, as ``webdataset.WebDataset(...).decode(...)`` does.

    Handlers are asked in turn, then those for common suffixes (txt, cls, json, npy, mp, cbor, …; ``.gz`` is unpacked
    first); a field that none of them knows remains ``bytes``.

    Args:
        handlers: Names of image decoders ("torchrgb", "torchrgb8", "rgb", "rgb8", "pil", "l8", …), or callables
            ``(suffix with a leading dot, bytes) -> value``, None meaning "not mine".
        only: The suffixes to decode, separated by spaces; default all.
        unpickle: Lets pkl, pickle, pyd, pth, and npy and npz with objects, be unpickled. Off, since unpickling runs
            what a shard's author wrote; these fields remain ``bytes`` (npy and npz with objects are an error).

    Returns:
        A picklable callable for ``transform=``.

    Raises:
        PlanError: An image decoder is unknown, a handler is neither name nor callable, or ``webdataset`` is missing.

    Example:
        >>> decode()({"__key__": "0001", "cls": b"7", "txt": b"a cat", "bin": b"raw"})
        {'__key__': '0001', 'cls': 7, 'txt': 'a cat', 'bin': b'raw'}
    """
    transform = Decode(handlers, None if only is None else frozenset(only.split()), unpickle)
    _ = transform.decoder  # a wrong name is told here, not by the first sample
    return transform


def _common_safe(suffix: str, data: bytes) -> Any:
    """The handlers of webdataset for common suffixes, without those that unpickle."""
    from webdataset import autodecode

    return data if suffix.endswith(_UNPICKLING) else autodecode.basichandlers(suffix, data)


def _numpy_with_objects(suffix: str, data: bytes) -> Any:
    """Arrays of Python objects, which numpy refuses unless told to unpickle."""
    import io

    import numpy as np

    if not suffix.endswith(_NUMPY):
        return None
    loaded = np.load(io.BytesIO(data), allow_pickle=True)
    return dict(loaded) if suffix.endswith(".npz") else loaded
