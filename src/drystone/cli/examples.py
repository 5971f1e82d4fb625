"""Which command lines show best what a verb does? The examples at the end of each `--help`.

A test parses every line with the command that it belongs to, and runs those that need no service.
"""

from __future__ import annotations

from types import MappingProxyType
from typing import Any, Final

_WIDTH: Final = 76  # with two blanks before, of 80 columns
# By verb, or verb and sub-verb: (what it is for, the command after `drystone`).
EXAMPLES: Final = MappingProxyType(
    {
        "": (
            ("which ways are there to train this, on these GPUs?",
             "plan llama-3-8b --gpus 8xA100-80G,8xV100-32G"),
            ("run jobs on this machine; then, in another terminal, submit one", "serve"),
            ("", "submit --model mini-gpt --steps 100 --batch 8 --sequence 32"),
            ("complete commands and options in this shell from now on", "--install-completion"),
        ),
        "demo": (
            ("all of it, in a few minutes", "demo"),
            ("the second act alone", "demo --only 2"),
        ),
        "plan": (
            ("the ranked ways to use all of them at once",
             "plan llama-3-8b --gpus 8xA100-80G,8xV100-32G"),
            ("the winner item by item, as a picture, and as a file for the runtime",
             "plan llama-3-8b --gpus 8xA100-80G --explain --plot plans.png --save plan.json"),
            ("no GPUs yet: which would do, at what price?", "plan mistral-7b-v0.1"),
            ("on the nodes of a file, which may describe GPU types of your own",
             "plan llama-3-8b --cluster cluster.yaml"),
            ("LoRA on small GPUs, for a program",
             "plan llama-3-8b --gpus 4xL4 --tuning lora --json"),
        ),
        "export": (
            ("for the JobSet controller", "export plan.json --image registry.example/train:1"),
            ("for Kueue, into a file", "export plan.json --to kueue --queue team-a -o job.yaml"),
        ),
        "estimate": (
            ("70 billion parameters on 128 GPUs",
             "estimate llama-3-70b --gpu H100 --layout dp=4,tp=8,pp=4,zero=1,sp=1"),
            ("where does each number come from?",
             "estimate gpt2-xl --gpu T4 --layout dp=2,zero=3 --explain"),
            ("in a script: exit code 3 if it does not fit",
             "estimate llama-3-8b --gpu L40S --tuning qlora --must-fit"),
        ),
        "check": (
            ("memory against what others measured", "check memory"),
            ("speed, as a picture, with the 20 worst rows",
             "check speed --plot speed.png --worst 20"),
            ("your own runs (docs/measurements.md)", "check memory --rows runs.csv"),
        ),
        "profile": (
            ("a few seconds, then use it", "profile --quick --out profile.json"),
        ),
        "simulate": (
            ("policies side by side on one trace",
             "simulate --trace jobs.csv --cluster cluster.yaml --policy prices,cells,fifo"),
            ("a page with plots",
             "simulate --trace jobs.csv --cluster cluster.yaml --report out.html"),
            ("rented nodes under a budget of 40 dollars an hour",
             "simulate --trace jobs.csv --market market.yaml --policy budget --budget 40"),
        ),
        "frontier": (
            ("how much time does money buy?",
             "frontier --trace jobs.csv --market market.yaml --policy budget --plot out.png"),
            ("the least money for an hour on average",
             "frontier --trace jobs.csv --market market.yaml --policy budget --target-hours 1"),
        ),
        "trace": (
            ("a trace that nobody has", "trace generate --jobs 60 --hours 24 --out jobs.csv"),
            ("your own last month", "trace show sacct.txt"),
        ),
        "trace generate": (
            ("60 jobs that come by day and night",
             "trace generate --jobs 60 --arrivals diurnal --out jobs.csv"),
            ("two models, one of them with LoRA three times as often",
             "trace generate --mix llama-3.1-8b@lora:3,gpt2-xl --out jobs.csv"),
        ),
        "trace convert": (
            ("from Slurm's accounting to our own format",
             "trace convert sacct.txt --out jobs.csv"),
        ),
        "trace show": (
            ("jobs, time, work by GPU type, arrivals", "trace show jobs.csv"),
        ),
        "serve": (
            ("the GPUs that are here, or emulated ones", "serve"),
            ("with a page on port 8080", "serve --port 8080"),
            ("a mixed cluster that is emulated on this processor",
             "serve --cluster cluster_emulated.yaml"),
            ("the Ray cluster of this machine; a Slurm partition", "serve --engine ray"),
            ("", "serve --engine slurm --partition gpu"),
            ("renting from a simulated cloud, 6 dollars an hour on average",
             "serve --market market.yaml --budget 6 --hard-cap 10"),
        ),
        "submit": (
            ("what would it get, at what price? Nothing is started",
             "submit job.yaml --dry-run"),
            ("without a file, and without being asked",
             "submit --model mini-gpt --steps 100 --batch 8 --sequence 32 -y"),
            ("with limits",
             "submit --model gpt2 --tokens 2B --batch 64 --deadline 6h --max-cost 50"),
        ),
        "jobs": (
            ("all of them, again and again", "jobs --watch"),
            ("what waits or runs of one person",
             "jobs --state queued --state running --owner ada"),
        ),
        "show": (("job 3 in full", "show 3"), ("for a program", "show 3 --json")),
        "logs": (
            ("follow what job 3 writes", "logs 3 -f"),
            ("of its second rank, reports as they are", "logs 3 --rank 1 --raw"),
        ),
        "why": (("why does job 3 wait?", "why 3"),),
        "cancel": (("two jobs", "cancel 3 4"),),
        "pause": (("give the GPUs of job 3 to others for a while", "pause 3"),),
        "resume": (("let it go on", "resume 3"),),
        "cluster": (("nodes, GPUs, and who uses them", "cluster"), ("", "cluster --json")),
        "budget": (("what was spent, by job and by node", "budget --limit 50"),),
        "drain": (
            ("before maintenance, and after it", "drain node-1"),
            ("", "drain node-1 --undo"),
        ),
        "top": (
            ("a live view", "top"),
            ("one picture, e.g. for a script", "top --once"),
        ),
        "token": (
            ("for somebody who submits jobs", "token create --role submitter --name ada"),
        ),
        "token create": (
            ("for somebody who submits jobs for a team",
             "token create --role submitter --name ada --team vision"),
            ("for a screen on the wall", "token create --role viewer --name wall"),
        ),
        "token list": (("who has one?", "token list"),),
        "token revoke": (("it is worth nothing from now on", "token revoke 4f2a"),),
        "login": (
            ("the token is asked for", "login https://gpus.example.org"),
            ("who am I? And back to this machine", "login"),
            ("", "login --forget"),
        ),
        "team": (
            ("eight of the best GPUs, 500 dollars a month",
             "team create vision --quota 8 --budget 500"),
        ),
        "team create": (
            ("eight of the best GPUs, 500 dollars a month",
             "team create vision --quota 8 --budget 500 --period month"),
        ),
        "team set": (
            ("more GPUs, the budget stays", "team set vision --quota 16"),
            ("no budget any more", "team set vision --budget none"),
        ),
        "team list": (("limits, and what is used of them", "team list"),),
        "gpus": (
            ("all of one generation", "gpus hopper"),
            ("prices of one type, for a program", "gpus A100-80GB-SXM --json"),
            ("types of your own too", "gpus --cluster cluster.yaml"),
        ),
        "models": (
            ("those of one family", "models llama-3"),
            ("for a program", "models mixtral --json"),
        ),
        "doctor": (("what is here, what is missing?", "doctor"), ("", "doctor --json")),
    }
)  # fmt: skip


def epilog(name: str) -> str:
    """The examples of a verb, as they stand at the end of its help; lines are kept as they are."""
    lines = ["\b", "Examples:"]
    for purpose, command in EXAMPLES[name]:
        lines += [f"  # {purpose}"] if purpose else []
        lines += _cut(f"  drystone {command}")
    return "\n".join(lines)


def _cut(line: str) -> list[str]:
    """One line or, where it is too long, two that a shell takes for one."""
    if len(line) <= _WIDTH:
        return [line]
    at = line.rindex(" --", 0, _WIDTH - 2)
    return [f"{line[:at]} \\", *_cut(f"     {line[at:]}")]


def add_examples(group: Any, name: str) -> None:
    """Give every verb of a group its examples."""
    for one in group.registered_commands:
        verb = one.name or one.callback.__name__
        one.epilog = epilog(f"{name} {verb}")
