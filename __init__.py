"""moebius: expert-parallel pretraining of Mixture-of-Experts Universal Transformers.

For notebooks and scripts. With torch (api.py): `recipe` makes a configuration, `build` its untrained
model; `prepare` makes its data, `fit` trains it here and `submit` on a cluster, `resume` continues it,
`evaluate` and `score_tasks` measure it, `load` brings the trained model back, `save` keeps
it if it was changed, and `export` writes it for others. Without torch (cluster/report/run_records.py):
`find_runs` finds runs, `status` tells how one is, `stop` ends it, and `history` reads what it has recorded.
A module is imported when one of its names is first used, so `import moebius` costs nothing.
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
        Start,
        Trace,
        TrainingFailed,
        build,
        evaluate,
        export,
        fit,
        load,
        load_config,
        prepare,
        recipe,
        resume,
        save,
        score_tasks,
        size_of,
        start_from,
        submit,
    )
    from .cluster.report.run_records import RunHistory, find_runs, history, status, stop

__version__ = "0.3.0"
__all__ = [
    "Config",
    "ConfigError",
    "JobError",
    "LayerRoutes",
    "LoadedModel",
    "Rows",
    "RunHistory",
    "Size",
    "Start",
    "Trace",
    "TrainingFailed",
    "__version__",
    "build",
    "evaluate",
    "export",
    "find_runs",
    "fit",
    "history",
    "load",
    "load_config",
    "prepare",
    "recipe",
    "resume",
    "save",
    "score_tasks",
    "size_of",
    "start_from",
    "status",
    "stop",
    "submit",
]
_READ_RUN_FOLDERS = ("RunHistory", "find_runs", "history", "status", "stop")


def __getattr__(name: str) -> Any:
    """Imports a name of `__all__` when it is first used."""
    if name not in __all__:
        from .plugins import nearest

        meant = nearest(name, [*__all__, "train"]).replace(" train?", " fit?")
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}{meant}")
    if name in _READ_RUN_FOLDERS:
        from .cluster.report import run_records as module
    else:
        from . import api as module
    return getattr(module, name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
