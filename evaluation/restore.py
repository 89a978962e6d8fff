"""A trained model back from a run folder, on any number of ranks."""

from dataclasses import dataclass
from pathlib import Path

from ..distributed.checkpoint.files import latest
from ..distributed.checkpoint.loading import load
from ..distributed.layout import MeshConfig, plan_layout
from ..distributed.mesh import build_mesh
from ..distributed.parallelize import build_model
from ..distributed.process.process import Process
from ..model.precision import stored_dtype
from ..model.transformer import Transformer
from ..train.config import Config, ConfigError
from ..train.state import model_tensors


@dataclass(frozen=True)
class Restored:
    """A model with the weights of one checkpoint."""

    model: Transformer
    config: Config
    step: int


def restore(run_dir: Path, process: Process, *, step: int | None = None) -> Restored:
    """Builds a run's model with all experts on this rank, and loads a checkpoint into it.

    Args:
        run_dir: the run folder.
        process: this rank.
        step: of the checkpoint; None: the newest.

    Raises:
        ConfigError: the run or the checkpoint does not exist.
    """
    config_file = run_dir / "config.json"
    if not config_file.exists():
        raise ConfigError(
            f"{run_dir}: is not a run folder (no config.json); `moebius status` lists the runs here"
        )
    config = Config.load(config_file)
    mesh = build_mesh(plan_layout(MeshConfig(), process.world_size), process)
    model = build_model(
        config.model,
        mesh,
        dispatcher="auto",
        backend=config.kernels.name,
        seed=config.train.seed,
        device=process.device,
        stored=stored_dtype(config.train.precision),
    )
    path = (
        latest(run_dir / "checkpoints")
        if step is None
        else run_dir / "checkpoints" / f"step_{step:08d}"
    )
    if path is None or not path.is_dir():
        raise ConfigError(
            f"{run_dir}: has no checkpoint{'' if step is None else f' at step {step}'}; `moebius "
            "ckpt ls` lists them"
        )
    meta = load(path, *model_tensors(model), mesh=mesh, allow_unexpected=True)
    model.before_step(meta["progress"]["step"])
    return Restored(model.eval(), config, meta["progress"]["step"])
