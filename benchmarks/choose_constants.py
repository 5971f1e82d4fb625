"""Which constants were chosen by looking at published runs? Choose them again, without each source.

    python benchmarks/choose_constants.py [--write]

Every number that was chosen because readings speak for it stands in `KNOBS`, with its candidates
and with the value of the nearest kin (the prior), which is taken where no reading is left. A value
is chosen alone, the others as they ship: the candidate with the smallest mean over sources of the
median |log(estimated / measured)| over the runs that it changes, each source counting equally; the
prior where nothing is better by a thousandth. With `--write` the values without each source go to
`describe/data/chosen.json`, which `drystone check` judges each source by.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from math import log

import numpy as np

from drystone.describe import chosen, generations
from drystone.describe.chosen import CHOSEN_FILE, Choice
from drystone.describe.generations import find_generation
from drystone.errors import DrystoneError
from drystone.estimate import launchers
from drystone.estimate.launchers import LAUNCHERS
from drystone.estimate.memory import activations, terms
from drystone.estimate.time import speed
from drystone.observe.check.accuracy import MEMORY_TABLE, SPEED_TABLE, estimate_run
from drystone.observe.check.runs import PublishedRun, load_runs
from drystone.units import MiB
from figures import print_figures

_NEAR = 0.001  # of the mean error: what is no better than this is no reason to leave the prior
_TRIAL = "a trial"


@dataclass(frozen=True, kw_only=True)
class Knob:
    """A constant that was chosen, and what else it could be."""

    measure: str
    kind: str
    owners: tuple[str, ...]
    field: str
    prior: float
    candidates: tuple[float, ...]

    @property
    def shipped(self) -> float:
        """The value in the code."""
        if self.kind == "generation":
            return float(getattr(find_generation(self.owners[0]), self.field))
        launcher = LAUNCHERS[self.owners[0]]
        value = getattr(launcher.speed if self.kind == "speed" else launcher, self.field)
        return value if isinstance(value, bool) else float(value)


def _habit(owners: str, field: str, prior: float, *others: float) -> Knob:
    return Knob(
        measure="memory",
        kind="launcher",
        owners=tuple(owners.split()) or tuple(LAUNCHERS),
        field=field,
        prior=prior,
        candidates=(prior, *others),
    )


def _scaled(kind: str, owners: str, field: str, prior: float) -> Knob:
    """A number that lies on a scale: the shipped one and its multiples."""
    knob = Knob(
        measure="speed",
        kind=kind,
        owners=tuple(owners.split(";")),
        field=field,
        prior=prior,
        candidates=(),
    )
    most = 1.0 if field.endswith("_share") and knob.shipped <= 1 else np.inf
    steps = [knob.shipped * 2 ** (step / 4) for step in (-4, -2, -1, 0, 1, 2, 4)]
    candidates = dict.fromkeys([prior, *(round(min(most, step), 12) for step in steps)])
    return replace(knob, candidates=tuple(candidates))


_MEGATRON = "megatron-te;megatron-local"
_TORCH = "pytorch;drystone;torch-fsdp;torchtitan;litgpt;composer;maxtext"
_HUGGING_FACE = "accelerate;hf-trainer;fsdp-qlora"
_MIB = float(MiB)
KNOBS = (
    _habit("accelerate fsdp-qlora", "frozen_inputs_linger", False, True),
    _habit("litgpt", "loads_whole", False, True),
    _habit("megatron-deepspeed", "logits_bytes", 6.0, 10.0, 12.0),
    _habit("galvatron", "gradients_persist", False, True),
    _habit("galvatron", "root_stays_gathered", True, False),
    _habit("galvatron", "gathered_layers", 2.0, 1.0),
    _habit("", "cache_share_alone", 0.5, 0.0, 0.3, 0.8, 1.0),
    _habit("", "cache_share_sharded", 0.5, 0.0, 0.3, 0.8, 1.0),
    _habit("", "cache_share_of_peak", 0.05, 0.0, 0.1, 0.15, 0.2),
    _habit("", "communicator_bytes", 128 * _MIB, 0.0, 64 * _MIB, 256 * _MIB, 512 * _MIB),
    _scaled("speed", _TORCH, "step_host_seconds", 30e-3),
    _scaled("speed", _HUGGING_FACE, "layer_host_seconds", 500e-6),
    _scaled("speed", _MEGATRON, "layer_host_seconds", 500e-6),
    _scaled("speed", _MEGATRON, "step_host_seconds", 20e-3),
    _scaled("speed", _MEGATRON, "shard_host_share", 0.1),
    _scaled("speed", "megatron-deepspeed", "hidden_passes", 14.0),
    _scaled("speed", "megatron-deepspeed;deepspeed", "gather_share", 1.0),
    _scaled("speed", "megatron-deepspeed;deepspeed", "network_gather_share", 1.0),
    _scaled("speed", "deepspeed", "layer_host_seconds", 900e-6),
    _scaled("speed", "composer", "attention_share", 1.0),
    _scaled("speed", "nemo", "layer_host_seconds", 1.68e-3),
    _scaled("speed", "nemo", "tensor_hidden_share", 0.0),
    _scaled("speed", "nemo", "send_hidden_share", 0.7),
    _scaled("speed", "nemo", "dispatch_host_seconds", 1.68e-3),
    _scaled("speed", "nemo", "fused_host_seconds", 2e-3),
    _scaled("speed", "nemo;automodel", "won_back_share", 0.3),
    _scaled("generation", "Volta", "sustained_share", 0.96),
    _scaled("generation", "Ampere", "sustained_share", 0.835),
    _scaled("generation", "Hopper", "sustained_share", 0.96),
    _scaled("generation", "Blackwell", "sustained_share", 0.835),
    _scaled("generation", "Blackwell Ultra", "sustained_share", 0.66),
    _scaled("generation", "CDNA 3.0", "sustained_share", 0.835),
    _scaled("generation", "Ampere", "host_slowness", 1.0),
    _scaled("generation", "Blackwell", "host_slowness", 1.0),
)


def choose(knob: Knob, runs: Sequence[PublishedRun]) -> Choice:
    """The value with every source, and without each of those that speak."""
    errors = {value: _errors(knob, value, runs) for value in knob.candidates}
    stacked = np.array(list(errors.values()))
    moves = np.flatnonzero(np.ptp(stacked, axis=0) > 1e-9)
    by_source: dict[str, list[int]] = {}
    for index in moves:
        by_source.setdefault(runs[index].dataset, []).append(int(index))
    # What one source says: the median error of its runs under every candidate.
    said = {name: np.median(stacked[:, rows], axis=1) for name, rows in by_source.items()}
    return Choice(
        measure=knob.measure,
        kind=knob.kind,
        owners=knob.owners,
        field=knob.field,
        value=_best(knob, said.values()),
        prior=knob.prior,
        candidates=knob.candidates,
        num_runs={name: len(rows) for name, rows in sorted(by_source.items())},
        without={
            left_out: _best(knob, (one for name, one in said.items() if name != left_out))
            for left_out in sorted(said)
        },
    )


def _best(knob: Knob, said: Iterable[np.ndarray]) -> float:
    stacked = np.array(list(said))
    if not len(stacked):
        return knob.prior
    mean = stacked.mean(axis=0)
    if mean[0] - mean.min() < _NEAR:  # the prior is the first candidate
        return knob.prior
    return knob.candidates[int(mean.argmin())]


def _errors(knob: Knob, value: float, runs: Sequence[PublishedRun]) -> list[float]:
    """|log(estimated / measured)| of every run with the knob at one value."""
    trial = Choice(
        **{name: getattr(knob, name) for name in ("measure", "kind", "owners", "field")},
        value=value, prior=value, candidates=(value,), num_runs={}, without={_TRIAL: value},
    )  # fmt: skip
    _use((trial,))
    found = [estimate_run(run, measure=knob.measure, without=_TRIAL) for run in runs]
    return [abs(log(estimated / measured)) for estimated, measured in found]


def _use(choices: tuple[Choice, ...]) -> None:
    """Let the trial be all that is known to have been chosen."""
    for cached in (
        launchers.find_launcher, generations.generation_of, terms.memory_terms, speed.prepare,
        activations.block_activations,
    ):  # fmt: skip
        cached.cache_clear()
    chosen.load_choices = lambda: choices


def _runs(measure: str) -> list[PublishedRun]:
    table = MEMORY_TABLE if measure == "memory" else SPEED_TABLE
    found = []
    for run in load_runs(table, measure=measure):
        if not isinstance(run, PublishedRun) or run.ran_out_of_memory:
            continue
        try:
            estimate_run(run, measure=measure)
        except DrystoneError:
            continue
        found.append(run)
    return found


def main() -> None:
    """Choose, print, and compare or write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", action="store_true", help="write the file that ships")
    arguments = parser.parse_args()
    runs = {measure: _runs(measure) for measure in ("memory", "speed")}
    shipped = {(one.kind, one.owners, one.field): one for one in chosen.load_choices()}
    found = []
    for knob in KNOBS:
        choice = choose(knob, _concerned(knob, runs[knob.measure]))
        found.append(replace(choice, value=knob.shipped))
        print(f"{' '.join(knob.owners)[:40]:<40} {knob.field:<22} ships {knob.shipped:<10.4g} "
              f"chosen {choice.value:<10.4g} without {_differing(choice)}", flush=True)  # fmt: skip
    stale = sum(shipped.get((one.kind, one.owners, one.field)) != one for one in found)
    print_figures({"choices": len(found), "choices_that_differ": stale})
    if arguments.write:
        content = {"choices": [asdict(choice) for choice in found]}
        CHOSEN_FILE.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


def _concerned(knob: Knob, runs: Sequence[PublishedRun]) -> list[PublishedRun]:
    if knob.kind == "generation":
        return [run for run in runs if _generation(run) in knob.owners]
    return [run for run in runs if run.recipe.launcher in knob.owners]


def _generation(run: PublishedRun) -> str:
    from drystone.describe.catalogue import find_gpu

    return find_gpu(run.gpu_name).architecture


def _differing(choice: Choice) -> Mapping[str, float]:
    return {name: value for name, value in choice.without.items() if value != choice.value}


if __name__ == "__main__":
    main()
