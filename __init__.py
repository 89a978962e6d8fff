"""moebius: expert-parallel pretraining of Mixture-of-Experts Universal Transformers.

For notebooks and scripts. With torch (api.py): `recipe` makes a configuration, `build` its untrained
model; `prepare` makes its data, `fit` trains it, `evaluate` and `score_tasks` measure it, and `load`
brings the trained model back. Without torch (run_records.py): `find_runs` finds runs, `history` reads
what one has recorded. A module is imported when one of its names is first
used, so `import moebius` costs nothing.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .api import (
        Config,
        ConfigError,
        JobError,
        LayerRoutes,
        LoadedModel,
        Rows,
        Size,
        Trace,
        TrainingFailed,
        build,
        evaluate,
        fit,
        load,
        prepare,
        recipe,
        score_tasks,
        size_of,
    )
    from .run_records import RunHistory, find_runs, history

__version__ = "0.2.0"
__all__ = [
    "Config",
    "ConfigError",
    "JobError",
    "LayerRoutes",
    "LoadedModel",
    "Rows",
    "RunHistory",
    "Size",
    "Trace",
    "TrainingFailed",
    "__version__",
    "build",
    "evaluate",
    "find_runs",
    "fit",
    "history",
    "load",
    "prepare",
    "recipe",
    "score_tasks",
    "size_of",
]
_READ_RUN_FOLDERS = ("RunHistory", "find_runs", "history")


def __getattr__(name: str) -> Any:
    """Imports a name of `__all__` when it is first used."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    if name in _READ_RUN_FOLDERS:
        from . import run_records as module
    else:
        from . import api as module
    return getattr(module, name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
