"""A small model folder and conversations, to try fine-tuning on a processor.

    python examples/small_model.py FOLDER

writes FOLDER/base (configuration, weights, tokenizer with a chat template), FOLDER/chats.jsonl,
FOLDER/held_out.jsonl, and FOLDER/tune.yaml, a job file for them. The model is a Llama of a million
parameters that has learned nothing yet.
"""

import sys
from pathlib import Path

from drystone.run.train.sample_model import write_sample

if __name__ == "__main__":
    write_sample(Path(sys.argv[1]))
