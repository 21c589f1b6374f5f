"""The progress of a long call, passed to a function of the caller's or drawn by tqdm."""

import logging
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager

log = logging.getLogger("tinsmith")

Report = Callable[[int, int], None]  # (done, total), from the thread that made the call
Progress = bool | Report


@contextmanager
def reporting(progress: Progress, title: str, *, unit: str) -> Iterator[Report]:
    """Yields a function to call with (done, total). progress True draws a bar, in notebooks and in
    terminals."""
    if callable(progress):
        yield progress
    elif not progress:
        yield lambda done, total: None
    else:
        try:
            with warnings.catch_warnings():  # a notebook without ipywidgets gets a bar of text
                warnings.simplefilter("ignore")
                from tqdm.auto import tqdm
        except ImportError:
            raise ImportError("progress=True needs tqdm: pip install tqdm", name="tqdm") from None
        with tqdm(desc=title, unit=unit, unit_scale=unit == "B") as bar:

            def draw(done: int, total: int) -> None:
                bar.total = total
                bar.update(done - bar.n)

            yield draw


def last_report(report: Report, total: int, title: str) -> None:
    """Reports that all is done. An error of the function is only logged here: if the call raised
    it, the caller would repeat finished work."""
    try:
        report(total, total)
    except Exception as error:
        log.warning("the function for progress failed at the end of %s: %r", title, error)
