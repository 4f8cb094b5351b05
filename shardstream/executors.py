"""Workers of other people's engines, Ray's and Dask's, as a ``concurrent.futures.Executor``."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, Future
from contextlib import contextmanager
from multiprocessing import resource_tracker
from typing import Any, TypeVar

from shardstream.errors import PlanError, shown_url
from shardstream.processes import interrupts_held, num_cores

ENGINES = ("local", "ray", "dask")

_T = TypeVar("_T")
_START_S = 60.0  # until a cluster answers and has a worker
_NUM_RETRIES = 3  # of a task whose worker died; Dask's own default
_FEW_WORKERS = 16


class Workers(Executor):
    """Workers that somebody else runs, and how many they are.

    An error that a call raises is handed back as a value, and raised here: engines log and dress up what is raised.

    Args:
        submit: As ``Executor.submit``.
        num_workers: Tasks that run at the same time.
    """

    def __init__(self, submit: Callable[..., Future[Any]], num_workers: int) -> None:
        self._submit, self.num_workers = submit, num_workers

    def submit(self, fn: Callable[..., _T], /, *args: Any, **kwargs: Any) -> Future[_T]:
        """Hands a call to a worker; if that dies, to another one, a few times."""
        handed_out = self._submit(_outcome, fn, args, kwargs)
        future: Future[_T] = Future()
        future.add_done_callback(lambda done: _pass_on(done, handed_out))
        handed_out.add_done_callback(lambda done: _settle(future, done))
        return future


def most_under_way(executor: Executor) -> int:
    """Returns how many tasks are handed out at a time, so that no worker waits and few results are held.

    Example:
        >>> most_under_way(Workers(lambda *_: Future(), 500)), most_under_way(Executor())
        (1000, 64)
    """
    num_workers = int(getattr(executor, "num_workers", 0))
    return max(4 * _FEW_WORKERS, 2 * num_workers)


def parse_engine(text: str) -> tuple[str, str | None]:
    """Returns the name of an engine and the address of its cluster, if one is given.

    Raises:
        PlanError: If there is no engine of that name, or ``local`` has an address.

    Example:
        >>> parse_engine("dask"), parse_engine("dask:tcp://host:8786"), parse_engine("ray://host:10001")
        (('dask', None), ('dask', 'tcp://host:8786'), ('ray', 'ray://host:10001'))
    """
    name, _, address = text.partition(":")
    if name not in ENGINES or (name == "local" and address):
        expected = "local, ray, ray:ADDRESS, dask or dask:ADDRESS"
        raise PlanError("unknown engine", expected=expected, found=repr(text))
    return name, (text if text.startswith("ray://") else address or None)


@contextmanager
def executor_of(engine: str, num_workers: int | None = None) -> Iterator[Executor | None]:
    """Gives the workers of an engine; None for ``local``, where callees start processes of their own.

    ``ray`` and ``dask`` start workers on this machine and end them; with an address (``dask:tcp://host:8786``,
    ``dask:scheduler.json``, ``ray:auto``, ``ray:host:6379``, ``ray://host:10001``) those of a cluster are used and left
    running. They need shardstream installed and must see the same paths. A task whose worker dies is given to another.

    Args:
        engine: ``local``, ``ray[:ADDRESS]`` or ``dask[:ADDRESS]``.
        num_workers: Workers to start, without an address; default: one a core.

    Raises:
        PlanError: If it is unknown, not installed, cannot be reached, or has no workers in time; or if a number of
            workers is given for a cluster.

    Example:
        >>> with executor_of("local") as executor:
        ...     print(executor)
        None
    """
    name, address = parse_engine(engine)
    if name == "local":
        yield None
        return
    if address is not None and num_workers is not None:
        hint = "leave the number of workers out"
        raise PlanError("a cluster has the workers that it has", found=f"{num_workers} workers", hint=hint)
    if num_workers is not None and num_workers < 1:
        raise PlanError(f"{name} needs a worker at least", found=num_workers)
    with (_ray if name == "ray" else _dask)(address, num_workers or num_cores()) as executor:
        yield executor


@contextmanager
def _dask(address: str | None, num_workers: int) -> Iterator[Executor]:
    try:
        from distributed import Client, LocalCluster
    except ImportError as error:
        raise _not_installed("dask", error) from error
    where: dict[str, Any] = {"address": address}
    if address is None:
        resource_tracker.ensure_running()  # later it would let interrupts through
        with interrupts_held():
            where["address"] = LocalCluster(
                n_workers=num_workers,
                threads_per_worker=1,
                processes=True,
                memory_limit=None,  # as processes of our own
                dashboard_address=None,
                silence_logs=logging.ERROR,
            )
    elif address.endswith(".json"):
        where = {"scheduler_file": address}
    try:
        try:
            client = Client(**where, set_as_default=False, timeout=_START_S)
        except (OSError, ValueError) as error:
            raise _unreachable(address, error) from error
        with client:
            try:
                client.wait_for_workers(1, timeout=_START_S)
            except TimeoutError as error:
                raise _unreachable(address, error) from error
            # Not pure: a shard that is looked at again may have changed.
            yield Workers(client.get_executor(pure=False).submit, sum(client.nthreads().values()))
    finally:
        if address is None:
            where["address"].close()


@contextmanager
def _ray(address: str | None, num_workers: int) -> Iterator[Executor]:
    try:
        import ray
    except ImportError as error:
        raise _not_installed("ray", error) from error
    is_ours = not ray.is_initialized()
    if is_ours:
        more = {"num_cpus": num_workers, "include_dashboard": False} if address is None else {}
        try:
            with interrupts_held():
                ray.init(address or "local", log_to_driver=False, logging_level=logging.WARNING, **more)
        except Exception as error:  # of many kinds, some of them plain
            ray.shutdown()
            raise _unreachable(address, error) from error
    try:
        call = ray.remote(num_cpus=1, max_retries=_NUM_RETRIES)(_outcome)

        def submit(_: Callable[..., Any], *args: Any) -> Future[Any]:
            ref = call.remote(*args)
            future: Future[Any] = ref.future()
            future.add_done_callback(lambda done: ray.cancel(ref) if done.cancelled() else None)
            return future

        yield Workers(submit, max(1, int(ray.cluster_resources().get("CPU", 1))))
    finally:
        if is_ours:
            ray.shutdown()


def _outcome(fn: Callable[..., _T], args: tuple[Any, ...], kwargs: dict[str, Any]) -> _T | _Raised:
    """In a worker."""
    try:
        return fn(*args, **kwargs)
    except Exception as error:  # noqa: BLE001 - it is raised where the result is asked for
        return _Raised(error)


class _Raised:
    def __init__(self, error: Exception) -> None:
        self.error = error


def _settle(future: Future[Any], done: Future[Any]) -> None:
    if not future.set_running_or_notify_cancel():
        return
    try:
        found = done.result()
    except Exception as error:  # noqa: BLE001 - what Ray says of a worker that was lost
        future.set_exception(error)
        return
    if isinstance(found, _Raised):
        future.set_exception(found.error)
    else:
        future.set_result(found)


def _pass_on(done: Future[Any], handed_out: Future[Any]) -> None:
    if done.cancelled():
        handed_out.cancel()


def _not_installed(name: str, error: ImportError) -> PlanError:
    return PlanError(f"the engine {name} is not installed", found=error, hint=f"pip install 'shardstream[{name}]'")


def _unreachable(address: str | None, error: Exception) -> PlanError:
    where = "on this machine" if address is None else shown_url(address)
    hint = "is its address right, and has it workers?"
    return PlanError(f"the engine {where} cannot be used", found=f"{type(error).__name__}: {error}", hint=hint)
