"""1. Describe a cluster: which GPUs there are, how they are wired, what they cost."""

from pathlib import Path

from drystone.describe.files.cluster import load_cluster_file, parse_cluster
from drystone.units import TERA, GiB

HERE = Path(__file__).resolve().parent

real = parse_cluster("""
nodes:
  - {gpu: A100-80G, count: 2, gpus_per_node: 8}
  - {gpu: T4, count: 4, gpus_per_node: 4}
prices: {A100-80G: 1.80, T4: 0.35}
""")
for name in real.gpu_types:
    gpu = real.gpu(name)
    count = sum(node.num_gpus for node in real.nodes if node.gpu == name)
    price = real.dollars_per_gpu_hour[name]
    rate = (gpu.bf16_flops or gpu.fp16_flops) / TERA
    print(
        f"{count:3} x {gpu.name}: {gpu.usable_bytes / GiB:.1f} GiB, {rate:.0f} TF/s, ${price:.2f}/h"
    )

# The same, to try things out on a processor: each device at its pace, with its own memory.
emulated = load_cluster_file(HERE / "cluster_emulated.yaml")
print("emulated:", ", ".join(f"{node.id} ({node.num_gpus})" for node in emulated.nodes))
